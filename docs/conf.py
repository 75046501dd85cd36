"""Sphinx: `python -m sphinx -c docs . build/docs`, with what requirements-docs.txt names.

The package is imported, built library and all: the reference is made of its docstrings. The sources
are those of the whole tree, so that a page may link to the README and to the examples as it does
on GitHub, and a link that leads nowhere is a warning.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_fused_linear

project = "torch_fused_linear"
author = "the authors of torch_fused_linear"
release = version = torch_fused_linear.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"]
include_patterns += ["examples/*/README.md", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "dist"]  # not even walked through

html_theme = "furo"
html_title = f"{project} {release}"

myst_heading_anchors = 4  # links to headings, as on GitHub
autodoc_member_order = "bysource"
napoleon_custom_sections = ["Shape"]

# Every name of ours in a docstring must lead somewhere; those of others are not looked up, which
# would need a network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|collections|os)\..*")]
