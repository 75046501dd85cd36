"""docs/design.md says what the code says: files, functions, the path of a call, its length."""

import re
from itertools import pairwise
from typing import NamedTuple

import pytest
from processes import ROOT

PAGE = ROOT / "docs" / "design.md"
TEXT = PAGE.read_text()
MOST_HOPS, MOST_FILES, MOST_WORDS = 10, 25, 25


class Line(NamedTuple):
    number: int | None  # None for a function that the call passes in the same hop
    function: str
    path: str
    caller: int  # the hop that calls it; 0: the one before


LINE = re.compile(
    r"^(?P<number>\d+)? +(?P<function>[\w:]+)  +(?P<path>\S+\.\w+)"
    r"(?:  +(?:from (?P<caller>\d+))?.*)?$"
)


def figures(page):
    """The paths of calls: the title of each, and its lines."""
    found = {}
    for block in re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        title, *rows = block.splitlines()
        if title.startswith(("forward of", "backward of")):
            matches = [LINE.match(row) for row in rows]
            assert all(matches), f"{title}: {rows[matches.index(None)]!r} is no line of a path"
            found[title] = [
                Line(int(m["number"] or 0) or None, m["function"], m["path"], int(m["caller"] or 0))
                for m in matches
            ]
    return found


def text_of(path):
    return (ROOT / path).read_text()


def names(text, function):
    """Returns whether the text has the last part of the function's name as a word."""
    return re.search(rf"\b{re.escape(function.rpartition('::')[2])}\b", text) is not None


def hops_of(lines):
    """Each hop's lines: the call into another file, and what it passes there."""
    starts = [i for i, line in enumerate(lines) if line.number] + [len(lines)]
    return [lines[i:j] for i, j in pairwise(starts)]


def wrong_in(lines):
    """The steps of a path that the code does not have."""
    found = []
    for line in lines:
        where = ROOT / line.path
        if not where.exists():
            return [f"{line.path} does not exist"]
        for part in line.function.split("::"):
            if not re.search(rf"\b{part}\b[<( :]", where.read_text()):
                found.append(f"{line.path} has no {line.function}")
    hops = hops_of(lines)
    if [hop[0].number for hop in hops] != [*range(1, len(hops) + 1)]:
        found.append("the numbers do not count")
    for n, hop in enumerate(hops):
        for i, line in enumerate(hop):
            callers = hop[:i] or (hops[line.caller - 1 if line.caller else n - 1] if n else [])
            stems = [re.split(r"[/.]", line.path)[-2]]  # Python calls C by the module's name
            called = [line.function, *(stems if line.function == "Function::call" else [])]
            known = any(names(text_of(c.path), name) for c in callers for name in called)
            if callers and not known:
                found.append(f"nothing before it calls {line.function}")
    if len(hops) - 1 > MOST_HOPS:
        found.append(f"{len(hops) - 1} hops")
    if len({line.path for line in lines}) > MOST_FILES:
        found.append("too many files")
    return found


FIGURES = figures(TEXT)


def test_all_paths_are_found():
    calls = "linear_gelu", "a timm Mlp after fuse_"
    assert {*FIGURES} == {f"{way} of {call}" for way in ("forward", "backward") for call in calls}


@pytest.mark.parametrize("title", FIGURES)
def test_the_path_of_a_call_is_that_of_the_code(title):
    assert wrong_in(FIGURES[title]) == []


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("Linear::forward_aux", "Linear::forward_anew", "has no Linear::forward_anew"),
        ("csrc/calls.cpp", "csrc/called.cpp", "does not exist"),
        ("2  Function", "3  Function", "the numbers do not count"),
        ("execute  ", "choose  ", "has no choose"),
        ("4  linear_with_gradient", "   mlp_with_gradient", "has no mlp_with_gradient"),
    ],
)
def test_a_wrong_path_is_found(old, new, what):
    lines = figures(TEXT.replace(old, new))["forward of linear_gelu"]
    assert what in "\n".join(wrong_in(lines))


def test_a_hop_to_a_function_that_is_not_called_is_found():
    lines = FIGURES["forward of linear_gelu"]
    skipped = [line for line in lines if line.number != 4 and "node.cpp" not in line.path]
    numbered = [line for line in skipped if line.number and line.number > 4]
    kept = [line._replace(number=line.number - 1) if line in numbered else line for line in skipped]
    assert wrong_in(kept) == ["nothing before it calls linear_aux"]


def test_a_path_that_is_too_long_is_found():
    lines = FIGURES["forward of linear_gelu"]
    long = [line for line in lines if line.number] + [lines[0]] * 3
    long = [line._replace(number=n) for n, line in enumerate(long, 1)]
    assert "11 hops" in wrong_in(long)


# `function` ([label](path)), or the same in two cells of a table
NAMED = re.compile(r"`([\w+]+)`(?: \([\w ]+\))?(?: \| | )\(?\[[^\]]*\]\((\.\./[^)#]+)\)")


def test_every_function_stands_in_the_file_beside_it():
    page = TEXT.replace("\n   ", " ")
    found = NAMED.findall(page)
    assert len(found) > 60
    wrong = [
        (name, path)
        for name, path in found
        if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", (PAGE.parent / path).read_text())
    ]
    assert wrong == []


def test_the_glossary_is_short_and_gives_each_word_once():
    table = TEXT.partition("## Glossary")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:-1] for row in table.splitlines() if row.startswith("|")][2:]
    words = [word.strip() for word, _, _ in rows]
    assert 20 <= len(words) <= MOST_WORDS and len({*words}) == len(words)
    assert all(NAMED.search(f"{place.strip()}") for _, _, place in rows)
