"""The notes that layers leave each other, kept and broken on purpose: a program in C++, LibTorch
only, that is compiled here and run test by test."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

import setup
from torch_fused_linear import _library

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tests/csrc/handover_test.cpp"
NAMES = re.findall(r"^    \{\"(\w+)\", \w+\},$", SOURCE.read_text(), re.MULTILINE)
LIB = Path(torch.__file__).parent / "lib"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    target = tmp_path_factory.mktemp("handover") / "handover_test"
    library = next((ROOT / "torch_fused_linear").glob("_C*.so"))
    command = [compiler, "-std=c++20", "-O0", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}"]
    command += [flag for folder in include_paths() for flag in ("-isystem", folder)]
    command += [str(SOURCE), "-o", str(target), str(library), f"-L{LIB}"]
    command += [*setup.cxx_runtime(), "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    command += ["-pthread"]
    command += ["-Wl,--allow-shlib-undefined"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return target


def test_all_are_found():
    assert len(NAMES) == 10


@pytest.mark.parametrize("name", NAMES)
def test_protocol(program, name):
    folders = [str(LIB)]
    if _library.build_info()["cuda"] is not None:
        folders += [str(p / "lib") for p in setup.pip_cuda(torch.version.cuda)]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders)}
    result = subprocess.run([program, name], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
