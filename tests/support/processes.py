"""Programs that a test runs or puts in another's place."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, cwd=ROOT, code=0, **environment):
    """A program's output; `code` is what it must end with, None for anything; variables that are
    None it does not have."""
    variables = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
    result = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
    assert code in (None, result.returncode), result.stdout + result.stderr
    return result


def python(*arguments, **more):
    return run(sys.executable, *map(str, arguments), **more)


def run_python(program, code=0, **variables):
    """In a process of its own, whose environment has of the library's variables these alone."""
    names = [name for name in os.environ if name.startswith("TORCH_FUSED_LINEAR_")]
    own = dict.fromkeys(names) | {f"TORCH_FUSED_LINEAR_{n}": v for n, v in variables.items()}
    return python("-c", program, code=code, PYTHONPATH=str(ROOT), **own)


def starting_with(folder, code):
    """The environment in which processes run the code first; tests' modules are found by it."""
    begin = f"import os, sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    (folder / "sitecustomize.py").write_text(begin + code)
    return {"PYTHONPATH": os.pathsep.join(map(str, [folder, ROOT / "tests" / "support", ROOT]))}


def module_at(path, name=None):
    """Imports a file as a module, under its own name or the given one."""
    name = name or path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(path, text):
    """A program of the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def git_files(*options):
    """The files that git lists, without deleted ones."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = run("git", "ls-files", *options, code=None)
    if listed.returncode != 0:
        pytest.skip("needs git")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
