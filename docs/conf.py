"""Sphinx: `python -m sphinx -c docs . build/docs`, with what requirements-docs.txt names.

The package is imported, built library and all: the reference is made of its docstrings. The sources
are those of the whole tree, so that a page may link to the README and to the examples as it does
on GitHub, and a link that leads nowhere is a warning.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import torch_fused_linear

project = "torch_fused_linear"
author = copyright = "torch_fused_linear contributors"
release = version = torch_fused_linear.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
include_patterns += ["examples/README.md", "examples/*/README.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "dist"]  # not even walked through

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]

myst_heading_anchors = 4  # links to headings, as on GitHub
autodoc_member_order = "bysource"
napoleon_custom_sections = ["Shape"]

# Every name of ours in a docstring must lead somewhere; those of others are not looked up, which
# would need a network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|collections|os)\..*")]


def visit_math(translator, node):
    """Formulas as MathML, which browsers show by themselves; MathJax needs a network."""
    block = isinstance(node, nodes.math_block)
    translator.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def let_cells_break(app, doctree, name):
    """In tables of HTML a line may end after these signs, so that they fit on a phone.

    `<wbr>` is nothing to whoever copies the text.
    """
    if app.builder.format != "html":
        return
    for text in [t for entry in doctree.findall(nodes.entry) for t in entry.findall(nodes.Text)]:
        pieces = re.split(r"(?:(?<=[→×/=_(.])|(?<=[a-z]-))(?=\w)(?<!\d\.)", text)
        between = nodes.raw("", "<wbr>", format="html")
        broken = [node for piece in pieces for node in (nodes.Text(piece), between.deepcopy())]
        text.parent.replace(text, broken[:-1])


def front_page(app, failure):
    """An index.html in the folder itself, which leads to that of docs/."""
    if failure is None and app.builder.format == "html":
        leads = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">\n'
        Path(app.outdir, "index.html").write_text(leads)


def setup(app):
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("doctree-resolved", let_cells_break)
    app.connect("build-finished", front_page)


html_math_renderer = "mathml"
