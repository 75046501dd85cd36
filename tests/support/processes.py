"""Programs that a test runs or puts in another's place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, cwd=ROOT, code=0, **environment):
    """A program's output; `code` is what it must end with, None for anything."""
    environment = {**os.environ, **environment}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert code in (None, result.returncode), result.stdout + result.stderr
    return result


def python(*arguments, **more):
    return run(sys.executable, *map(str, arguments), **more)


def script(path, text):
    """A program of the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def git_files(*options):
    """What git lists of the tree, less what is deleted in it."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = run("git", "ls-files", *options, code=None)
    if listed.returncode != 0:
        pytest.skip("needs git")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
