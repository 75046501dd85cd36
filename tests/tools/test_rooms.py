"""The rooms of docs/design.md: who may include or import whom, and no circles."""

import ast
import re
from graphlib import TopologicalSorter
from importlib.util import resolve_name

import pytest
from cpp_programs import parts
from processes import ROOT

CSRC, PACKAGE = ROOT / "csrc", ROOT / "torch_fused_linear"


def rows_of(folder):
    """The cells of the table that begins with the folder's name."""
    text = (ROOT / "docs" / "design.md").read_text()
    table = re.search(rf"^\| {folder} \|.*\n\|(?:---\|)+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [row.split("|")[1:-1] for row in table[1].splitlines()]


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def order(folder):
    """The names in the first column."""
    return {name: n for n, (room, *_) in enumerate(rows_of(folder)) for name in quoted(room)}


def unknown(folder):
    """By room: what it does not know, the names in the last column."""
    return {name: quoted(last) for room, _, last in rows_of(folder) for name in quoted(room)}


def includes(pattern='"([^"]+)"'):
    return {
        path.relative_to(CSRC).as_posix(): set(
            re.findall(f"^#include {pattern}", path.read_text(), re.MULTILINE)
        )
        for path in CSRC.rglob("*")
        if path.suffix in (".h", ".cpp", ".cu", ".cuh")
    }


def csrc_room(path):
    return path if "/" not in path else path.rpartition("/")[0]


def imported(node, package):
    """Names that an import statement may mean."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = resolve_name("." * node.level + (node.module or ""), package)
        return [f"{base}.{alias.name}" for alias in node.names]
    return []


def imports():
    """For every module of the package, the package's modules that its code imports anywhere."""
    paths = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        paths[name.removesuffix(".__init__")] = path
    del paths[PACKAGE.name]  # it gathers the public names
    arrows = {name: set() for name in paths}
    for name, path in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            for target in imported(node, package):
                while target and target not in paths:
                    target = target.rpartition(".")[0]
                arrows[name] |= {target} - {"", name}
    return arrows


def upward(arrows, rooms, room_of):
    return [
        f"{source} -> {target}"
        for source, targets in sorted(arrows.items())
        for target in sorted(targets)
        if room_of(source) != room_of(target) and rooms[room_of(target)] > rooms[room_of(source)]
    ]


languages = pytest.mark.parametrize(
    ("folder", "arrows", "room_of"),
    [
        ("csrc", includes(), csrc_room),
        ("torch_fused_linear", imports(), lambda name: name.split(".")[1]),
    ],
    ids=["csrc", "package"],
)


@languages
def test_every_room_is_in_the_tables(folder, arrows, room_of):
    assert set(map(room_of, arrows)) == set(order(folder))


@languages
def test_nothing_leads_up(folder, arrows, room_of):
    assert upward(arrows, order(folder), room_of) == []


@languages
def test_nothing_leads_in_a_circle(folder, arrows, room_of):
    TopologicalSorter(arrows).prepare()  # which refuses one


@pytest.mark.parametrize("wrong", ["core/check.h", "gemm/strategy.h"])
def test_an_include_of_a_room_above_is_found(wrong):
    arrows = {**includes(), wrong: {"autograd/node.h"}}
    assert upward(arrows, order("csrc"), csrc_room) == [f"{wrong} -> autograd/node.h"]


def known_in_spite(arrows, forbidden, room_of, is_in):
    return [
        f"{source} -> {target}"
        for source, targets in sorted(arrows.items())
        for target in sorted(targets)
        if any(is_in(target, name) for name in forbidden[room_of(source)])
    ]


def includes_of(target, name):
    return target.startswith(name)  # "cuda" is CUDA's headers, too


def imports_of(target, name):
    return target.split(".")[1] == name


def test_rooms_do_not_know_what_the_tables_say():
    everything, csrc, package = includes('["<]([^">]+)[">]'), unknown("csrc"), unknown(PACKAGE.name)
    assert known_in_spite(everything, csrc, csrc_room, includes_of) == []
    assert known_in_spite(imports(), package, lambda n: n.split(".")[1], imports_of) == []
    assert sum(map(len, [*csrc.values(), *package.values()])) > 40
    wrong = {"gemm/strategy.h": {"cuda_runtime_api.h", "gemm/problem.h"}}
    assert known_in_spite(wrong, csrc, csrc_room, includes_of) == [
        "gemm/strategy.h -> cuda_runtime_api.h"
    ]


def test_the_top_folder_is_for_users():
    names = [path.stem for path in PACKAGE.glob("*.py")]
    assert len(names) <= 14
    assert [n for n in names if n.startswith("_") and not n.startswith("__")] == []


def test_the_build_takes_every_room():
    sources = {p.parent for p in CSRC.rglob("*") if p.suffix in (".cpp", ".cu")}
    listed = {CSRC / room for room in (*parts.ROOMS, *parts.CUDA_ROOMS, "python")}
    assert sources <= listed and all(room.is_dir() for room in listed)
