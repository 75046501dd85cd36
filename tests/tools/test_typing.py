"""The types of the public names, as mypy and pyright see them in a program of a user's."""

import inspect
import json
from inspect import ismodule
from pathlib import Path
from typing import get_args

import pytest
import torch
from processes import ROOT, python

import torch_fused_linear as tfl
from torch_fused_linear._support import arguments
from torch_fused_linear.activations import ACTIVATIONS

PROGRAM = Path(__file__).with_name("user_program.py")


def mypy(program, folder, code):
    pytest.importorskip("mypy", reason="pip install -r requirements-lint.txt")
    # "silent": the package's own code is not what is checked. One cache: reading torch takes long.
    options = ["--follow-imports=silent", "--strict", f"--cache-dir={folder.parent / 'mypy'}"]
    return python("-m", "mypy", *options, program, cwd=folder, code=code, MYPYPATH=str(ROOT)).stdout


def pyright(program, folder, code):
    pytest.importorskip("basedpyright", reason="pip install -r requirements-lint.txt")
    packages = str(Path(torch.__file__).parents[1])
    settings = {"include": [str(program)], "extraPaths": [str(ROOT), packages]}
    path = folder / "pyrightconfig.json"
    path.write_text(json.dumps({**settings, "typeCheckingMode": "standard"}))
    return python("-m", "basedpyright", "-p", path, cwd=folder, code=code).stdout


each_checker = pytest.mark.parametrize("check", [mypy, pyright])


@each_checker
def test_a_users_program_has_the_types_it_says(check, tmp_path):
    check(PROGRAM, tmp_path, code=0)


WRONG = """
import torch_fused_linear as tfl
from torch import ones
tfl.FusedLinearReLU('8', 16)
tfl.fuse(1)
tfl.linear_gelu(ones(2, 2), ones(2, 2), approximate="erf")
tfl.linear_relu(ones(2, 2), ones(2, 2), None, "low")
tfl.FusedMLP(2, 2, activation="gelu")
"""


@each_checker
def test_a_wrong_call_is_seen(check, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    said = check(tmp_path / "wrong.py", tmp_path, code=1)
    for line in range(4, 9):
        assert f"wrong.py:{line}" in said, said


def test_the_values_of_arguments_are_the_operators():
    assert get_args(arguments.Activation) == tuple(ACTIVATIONS)
    gelus = {a.approximate for a in ACTIVATIONS.values()} - {None}
    assert set(get_args(arguments.Approximate)) == gelus


def test_options_are_given_by_name_alone():
    for name in tfl.__all__:
        value = getattr(tfl, name)
        takers = [value, *(getattr(value, n, None) for n in ("from_sequential", "from_modules"))]
        for taker in filter(callable, takers):
            for argument in inspect.signature(taker).parameters.values():
                if argument.name in ("memory", "approximate"):
                    assert argument.kind == argument.KEYWORD_ONLY, name


def test_a_users_program_runs():
    python(PROGRAM, PYTHONPATH=str(ROOT))


def test_all_is_complete_and_what_dir_names():
    """Every function and class of the package itself, and the modules that are meant for users."""
    names = {n for n, v in vars(tfl).items() if not n.startswith("_") and not ismodule(v)}
    assert names | {"flops", "plans"} == set(tfl.__all__)
    assert sorted(name for name in dir(tfl) if not name.startswith("__")) == sorted(tfl.__all__)
    assert all(hasattr(tfl, name) for name in tfl.__all__) and "__version__" in dir(tfl)
