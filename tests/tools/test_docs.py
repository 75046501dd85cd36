"""The documentation is true: its Python runs, its C++ is quoted from the examples, links lead on.

A comment in the line before a fence says more about a snippet: `<!-- needs: transformers -->` what
it cannot run without (`cuda` is a GPU, `compiler` one for C++), `<!-- from: examples/cpp/direct.cpp
-->` where it is quoted from, line by line; a line `// ...` stands for lines left out. C++ is always
quoted.
"""

import importlib.util
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compiler import has_compiler
from helpers import one_thread  # noqa: F401
from processes import ROOT

import torch_fused_linear as tfl

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
PAGES += sorted(ROOT.glob("benchmarks/*.md")) + [ROOT / "docs" / "llms.txt"]
FENCE = re.compile(
    r"(?P<notes>(?:^ *<!--[^\n]*-->\n)*)^(?P<indent> *)```(?P<language>\w*)\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int  # of its first line in the page
    language: str
    text: str
    needs: tuple[str, ...]
    source: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def note(notes: str, name: str) -> str:
    return "".join(re.findall(rf"<!-- {name}: (.*?) -->", notes))


def snippets(page: Path) -> list[Snippet]:
    content = page.read_text()
    return [
        Snippet(
            page,
            content.count("\n", 0, match.start("text")) + 1,
            match["language"],
            textwrap.dedent(match["text"]),
            tuple(re.findall(r"[\w.]+", note(match["notes"], "needs"))),
            note(match["notes"], "from") or None,
        )
        for match in FENCE.finditer(content)
    ]


ALL = [snippet for page in PAGES for snippet in snippets(page)]
PYTHON = [snippet for snippet in ALL if snippet.language == "python"]


def missing(needs: tuple[str, ...]) -> list[str]:
    def found(name: str) -> bool:
        if name == "cuda":
            return torch.cuda.is_available()
        if name == "compiler":
            return has_compiler
        return importlib.util.find_spec(name) is not None

    return [name for name in needs if not found(name)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", dict.fromkeys(s.page for s in PYTHON), ids=name_of)
def test_python_runs(page, tmp_path, monkeypatch):
    """As somebody types a page's snippets in, one after the other."""
    monkeypatch.chdir(tmp_path)
    names, left_out = {"__name__": "__main__"}, set()
    for snippet in (s for s in PYTHON if s.page == page):
        if not_here := missing(snippet.needs):
            left_out.update(not_here)
            continue
        with tfl.set_policy(tfl.get_policy()):
            # With the page's lines, so that a traceback points into the page.
            exec(compile("\n" * (snippet.line - 1) + snippet.text, str(page), "exec"), names)
    if left_out:
        pytest.skip(f"all ran but what needs {', '.join(sorted(left_out))}")


@pytest.mark.parametrize("snippet", [s for s in ALL if s.source], ids=str)
def test_quotations_are_verbatim(snippet):
    """Each piece between `...` lines stands in the file as it is, in this order."""
    lines = (ROOT / snippet.source).read_text().splitlines()
    for piece in re.split(r"^\s*(?://|#) \.\.\.\n", snippet.text, flags=re.MULTILINE):
        want = textwrap.dedent(piece).splitlines()
        found = (
            at
            for at in range(len(lines) - len(want) + 1)
            if textwrap.dedent("\n".join(lines[at : at + len(want)])).splitlines() == want
        )
        at = next(found, None)
        assert at is not None, f"not in {snippet.source}, or not in this order:\n{piece}"
        lines = lines[at + len(want) :]


def test_cpp_is_quoted():
    for snippet in ALL:
        assert snippet.language != "cpp" or snippet.source, f"{snippet}: <!-- from: ... -->"


def test_the_quick_start_is_a_script():
    """docs/start.py is the snippets of docs/start.md, one after the other, and runs by itself."""
    page, script = ROOT / "docs" / "start.md", (ROOT / "docs" / "start.py").read_text()
    pieces = [snippet.text for snippet in PYTHON if snippet.page == page]
    assert script.partition('"""\n\n')[2] == "\n".join(pieces)


def anchors(page: Path) -> set[str]:
    """The headings' anchors, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    # in what is no code
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in links + re.findall(r'\b(?:href|src)="([^"]+)"', text):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link}: there is no {target}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: {target} has no such heading"
