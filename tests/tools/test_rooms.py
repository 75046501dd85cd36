"""The rooms of CONTRIBUTING: who may include or import whom, and no circles."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from cpp_programs import parts

ROOT = Path(__file__).resolve().parents[2]
CSRC, PACKAGE = ROOT / "csrc", ROOT / "torch_fused_linear"


def order(folder):
    """The names in the first column of the table that begins with the folder's name."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = re.search(rf"^\| {folder} \|.*\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row.split("|")[1] for row in table[1].splitlines()]
    return {name: n for n, row in enumerate(rows) for name in re.findall(r"`([^`]+)`", row)}


# --- C++ --------------------------------------------------------------------------------------


def csrc_room(path):
    return path if "/" not in path else path.rpartition("/")[0]


def includes():
    arrows = defaultdict(set)
    for path in CSRC.rglob("*"):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            name = path.relative_to(CSRC).as_posix()
            arrows[name] |= set(re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE))
    return arrows


# --- Python -----------------------------------------------------------------------------------


def modules():
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports():
    """Of every module of the package: those of the package that its code imports anywhere."""
    known = modules()
    arrows = defaultdict(set)
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            for target in imported(node, package):
                while target not in known:
                    target = target.rpartition(".")[0]
                if target and target != name:
                    arrows[name].add(target)
    return arrows


def imported(node, package):
    """Names, relative to the package, that an import statement may mean."""
    if isinstance(node, ast.Import):
        whole = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = ["torch_fused_linear", *filter(None, package.split("."))]
            base = ".".join([*parts[: len(parts) + 1 - node.level], *filter(None, [node.module])])
        whole = [f"{base}.{alias.name}" for alias in node.names]
    else:
        return []
    prefix = "torch_fused_linear."
    return [name.removeprefix(prefix) for name in whole if name.startswith(prefix)]


def package_room(name):
    return name.partition(".")[0]


# --- the rules --------------------------------------------------------------------------------


def upward(arrows, rooms, room_of):
    return [
        f"{source} -> {target}"
        for source, targets in sorted(arrows.items())
        for target in sorted(targets)
        if room_of(source) != room_of(target) and rooms[room_of(target)] > rooms[room_of(source)]
    ]


def circles(arrows):
    """Every arrow that lies on a circle."""

    def reachable(start):
        seen, stack = set(), [start]
        while stack:
            for target in arrows.get(stack.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        return seen

    return sorted(name for name in list(arrows) if name in reachable(name))


def python_arrows():
    # The package itself gathers the public names; a package's own __init__ stands for its modules.
    return {source: targets for source, targets in imports().items() if source}


def test_every_room_is_in_the_tables():
    assert {csrc_room(name) for name in includes()} == set(order("csrc"))
    found = {package_room(name) for name in modules()} - {""}
    assert found == set(order("torch_fused_linear"))


def test_the_build_takes_every_room():
    sources = {p.parent for p in CSRC.rglob("*") if p.suffix in (".cpp", ".cu")}
    listed = {CSRC / room for room in (*parts.ROOMS, *parts.CUDA_ROOMS, "python")}
    assert sources <= listed and all(room.is_dir() for room in listed)


def test_no_include_leads_up():
    assert upward(includes(), order("csrc"), csrc_room) == []


def test_no_include_leads_in_a_circle():
    assert circles(includes()) == []


def test_no_import_leads_up():
    assert upward(python_arrows(), order("torch_fused_linear"), package_room) == []


def test_no_import_leads_in_a_circle():
    assert circles(python_arrows()) == []


@pytest.mark.parametrize("wrong", ["core/check.h", "gemm/strategy.h"])
def test_an_include_of_a_room_above_is_found(wrong):
    arrows = {**includes(), wrong: {"autograd/handover.h"}}
    assert upward(arrows, order("csrc"), csrc_room) == [f"{wrong} -> autograd/handover.h"]


def test_a_circle_is_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert circles(arrows) == ["a", "b", "c"]
