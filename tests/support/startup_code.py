"""Code that other processes run when they start."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def environment(folder, code):
    """The environment in which processes run the code first; tests' modules are found by it."""
    begin = f"import os, sys\nsys.path.insert(0, {str(TESTS)!r})\n"
    (folder / "sitecustomize.py").write_text(begin + code)
    return {"PYTHONPATH": os.pathsep.join(map(str, [folder, TESTS / "support", TESTS.parent]))}
