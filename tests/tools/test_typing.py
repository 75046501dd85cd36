"""The types of the public names, as mypy and pyright see them in a program of a user's."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from inspect import ismodule
from pathlib import Path
from typing import get_args

import pytest
import torch

import torch_fused_linear as tfl
from torch_fused_linear import _arguments
from torch_fused_linear.activations import ACTIVATIONS

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("user_program.py")


def without(name):
    """As a mark: skipped where the type checker is not installed."""
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"needs {name}: pip install -r requirements-lint.txt")


def mypy(program, folder):
    # "silent": the package's own code is not what is checked. One cache: reading torch takes long.
    options = ["--follow-imports=silent", "--strict", f"--cache-dir={folder.parent / 'mypy'}"]
    command = [sys.executable, "-m", "mypy", *options, str(program)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def pyright(program, folder):
    packages = str(Path(torch.__file__).parents[1])
    settings = {"include": [str(program)], "extraPaths": [str(ROOT), packages]}
    path = folder / "pyrightconfig.json"
    path.write_text(json.dumps({**settings, "typeCheckingMode": "standard"}))
    command = [sys.executable, "-m", "basedpyright", "-p", str(path)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


CHECKERS = [
    pytest.param(mypy, marks=without("mypy"), id="mypy"),
    pytest.param(pyright, marks=without("basedpyright"), id="pyright"),
]


@pytest.mark.parametrize("check", CHECKERS)
def test_a_users_program_has_the_types_it_says(check, tmp_path):
    result = check(PROGRAM, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


WRONG = """
import torch_fused_linear as tfl
from torch import ones
tfl.FusedLinearReLU('8', 16)
tfl.fuse(1)
tfl.linear_gelu(ones(2, 2), ones(2, 2), approximate="erf")
tfl.linear_relu(ones(2, 2), ones(2, 2), None, "low")
tfl.FusedMLP(2, 2, activation="gelu")
"""


@pytest.mark.parametrize("check", CHECKERS)
def test_a_wrong_call_is_seen(check, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    result = check(tmp_path / "wrong.py", tmp_path)
    assert result.returncode == 1
    for line in range(4, 9):
        assert f"wrong.py:{line}" in result.stdout, result.stdout


def test_the_values_of_arguments_are_the_operators():
    assert get_args(_arguments.Activation) == tuple(ACTIVATIONS)
    gelus = {a.approximate for a in ACTIVATIONS.values()} - {None}
    assert set(get_args(_arguments.Approximate)) == gelus


def test_options_are_given_by_name_alone():
    for name in tfl.__all__:
        value = getattr(tfl, name)
        takers = [value, *(getattr(value, n, None) for n in ("from_sequential", "from_modules"))]
        for taker in filter(callable, takers):
            for argument in inspect.signature(taker).parameters.values():
                if argument.name in ("memory", "approximate"):
                    assert argument.kind == argument.KEYWORD_ONLY, name


def test_a_users_program_runs():
    command, path = [sys.executable, PROGRAM], {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_package_says_that_it_has_types():
    assert (ROOT / "torch_fused_linear" / "py.typed").exists()


def test_dir_names_what_is_public():
    assert sorted(name for name in dir(tfl) if not name.startswith("__")) == sorted(tfl.__all__)
    assert all(hasattr(tfl, name) for name in tfl.__all__)
    assert "__version__" in dir(tfl)


def test_all_is_complete():
    """Every function and class of the package itself, and the modules that are meant for users."""
    names = {n for n, v in vars(tfl).items() if not n.startswith("_") and not ismodule(v)}
    assert names | {"flops", "plans"} == set(tfl.__all__)
