"""A function can be read at a glance: 45 lines at most, in CUDA 60, docstrings not counted. A
header is for more than one source, or declares what a source defines."""

import ast
import re

import pytest
from processes import ROOT

MOST, MOST_IN_CUDA = 45, 60
# One loop or one switch that reads from top to bottom, and would be halves that know each other.
WHOLE = {
    "execute": "a case for each step of a plan",
    "cast_kernel": "a tile's loads, casts and stores",
    "ordered_product_kernel": "a tile's copies and sums",
}
IGNORED = re.compile(
    r"//[^\n]*|^[ ]*#(?:[^\n]*\\\n)*[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", re.M
)
IS_ROOM = re.compile(
    r"^(?:\s*template\s*<.*>)?\s*(?:inline )?(?:namespace|class|struct|union|extern)\b", re.S
)


def functions_in_cpp(text):
    """The head of each function and its lines, by the braces of namespaces and classes."""
    blank = IGNORED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    open_blocks, begin = [], 0
    for place in re.finditer(r"[{};]", blank):
        head = blank[begin : place.start()].strip()
        begin = place.end()
        if place[0] == "{":
            outside = all(kind == "room" for kind, _, _ in open_blocks)
            is_room = bool(IS_ROOM.match(head))
            kind = "room" if is_room else "function" if outside and "(" in head else "other"
            line = blank.count("\n", 0, place.start() - len(head))
            open_blocks.append((kind, head, line))
        elif place[0] == "}" and open_blocks:
            kind, head, line = open_blocks.pop()
            if kind == "function":
                yield " ".join(head.split()), blank.count("\n", 0, place.start()) - line + 1


def functions_in_python(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=False) or ""
            lines = node.end_lineno - node.lineno + 1 - len(docstring.splitlines())
            yield node.name, lines


def too_long(path):
    if path.suffix == ".py":
        found, most = functions_in_python(path.read_text()), MOST
    else:
        in_cuda = "cuda" in path.relative_to(ROOT).parts
        found, most = functions_in_cpp(path.read_text()), MOST_IN_CUDA if in_cuda else MOST
    return [
        f"{name}: {lines}"
        for name, lines in found
        if lines > most and not any(re.search(rf"\b{whole}\(", name) for whole in WHOLE)
    ]


def sources(folder, *suffixes):
    return sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


FILES_IN_CPP = sources("csrc", ".h", ".cpp", ".cu", ".cuh")
FILES = [*FILES_IN_CPP, *sources("torch_fused_linear", ".py")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_functions_are_short(path):
    assert too_long(path) == []


def test_long_functions_are_found():
    body = "  x();\n" * 46
    for head in (
        "void f() {",
        "template <class T>\nvoid f(const T& a,\n       int b) const {",
        "A::A(int b)\n    : c_(b) {",
    ):
        (found,) = functions_in_cpp(f"namespace a {{\nstruct B {{}};\n{head}\n{body}}}\n}}\n")
        assert found[1] > MOST and "{" not in found[0]
    (found,) = functions_in_cpp(f"class C {{\n  int g() {{\n    if (a) {{\n{body}}}\n}}\n}};\n")
    assert found[1] > MOST
    python = "def f():\n    '''Says.'''\n" + "    x()\n" * 46
    assert list(functions_in_python(python)) == [("f", 47)]


def test_the_test_reads_functions():
    heads = [
        head
        for path in FILES
        if path.suffix == ".cpp"
        for head, _ in functions_in_cpp(path.read_text())
    ]
    assert len(heads) > 400


# --- headers ----------------------------------------------------------------------------------

MOST_IN_HEADER = 5  # lines of a function in a header that one source reads
# kernels.cu is compiled once for each kind of product, and reads the kinds from files of their own.
PARTS_OF_KERNELS = ("backward", "bits", "forward", "gating", "glu", "kernel")


def readers(texts):
    """By header: the sources that include it, also through other headers."""
    included = {name: re.findall(r'^#include "([^"]+)"', texts[name], re.M) for name in texts}
    found = {name: set() for name in texts if name.endswith((".h", ".cuh"))}
    for source in texts.keys() - found.keys():
        todo, seen = [source], set()
        while todo:
            fresh = [name for name in included[todo.pop()] if name in found and name not in seen]
            seen.update(fresh)
            todo += fresh
        for header in seen:
            found[header].add(source)
    return found


def sources_in_disguise(texts):
    """Headers that one source alone reads, with functions that belong into a source."""
    return [
        name
        for name, sources in sorted(readers(texts).items())
        if len(sources) == 1
        and any(
            lines > MOST_IN_HEADER and not head.startswith("template")
            for head, lines in functions_in_cpp(texts[name])
        )
    ]


def texts_of_csrc():
    tests = sources("tests/csrc", ".h", ".cpp")
    paths = {path.relative_to(ROOT / "csrc").as_posix(): path for path in FILES_IN_CPP}
    paths |= {path.relative_to(ROOT).as_posix(): path for path in tests}
    return {name: path.read_text() for name, path in paths.items()}


def test_no_header_is_a_part_of_one_source():
    expected = [f"cuda/hopper/{part}.cuh" for part in PARTS_OF_KERNELS]
    assert sources_in_disguise(texts_of_csrc()) == expected


def test_a_source_in_disguise_is_found():
    function = "inline int f() {\n" + "  x();\n" * 5 + "}\n"
    texts = {"a.cpp": '#include "b.h"\n', "b.h": '#include "c.h"\n', "c.h": function}
    assert sources_in_disguise(texts) == ["c.h"]
    assert sources_in_disguise({**texts, "d.cpp": '#include "c.h"\n'}) == []
    assert sources_in_disguise({**texts, "c.h": "template <typename T>\n" + function}) == []
