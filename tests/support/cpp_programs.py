"""C++ tests: programs that are compiled here and run test by test, with no Python in them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

import setup
from torch_fused_linear import _library

ROOT = Path(__file__).resolve().parents[2]
LIB = Path(torch.__file__).parent / "lib"
WITH_CUDA = _library.build_info()["cuda"] is not None


def names_in(source):
    """The tests of a program, in the order of its table."""
    text = (ROOT / "tests/csrc" / source).read_text()
    return re.findall(r"^    \{\"(\w+)\", \w+\},$", text, re.MULTILINE)


def build(source, folder, *flags, libraries=("c10",)):
    """Compiles tests/csrc/`source` against torch and our library."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    target = folder / Path(source).stem
    library = next((ROOT / "torch_fused_linear").glob("_C*.so"))
    command = [compiler, "-std=c++20", "-Wall", "-Werror", *flags, f"-I{ROOT / 'csrc'}"]
    command += setup.as_system(include_paths())
    if WITH_CUDA:
        folders = [setup.find_cuda()[0], *setup.pip_cuda(torch.version.cuda)]
        command += setup.as_system(f"{path}/include" for path in folders)
    command += [str(ROOT / "tests/csrc" / source), "-o", str(target), str(library), f"-L{LIB}"]
    command += [*setup.cxx_runtime(), "-Wl,--no-as-needed", *(f"-l{name}" for name in libraries)]
    command += ["-pthread", "-Wl,--allow-shlib-undefined"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return target


def run(program, name, **options):
    """Runs one test of a program; what it prints is the reason where it fails."""
    folders = [str(LIB)]
    if WITH_CUDA:
        folders += [str(p / "lib") for p in setup.pip_cuda(torch.version.cuda)]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders)}
    result = subprocess.run(
        [program, name], capture_output=True, text=True, env=environment, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
