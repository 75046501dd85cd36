"""The lower storey, csrc/gemm, without a GPU: a C++ program compiled here and run test by test."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

import setup
from torch_fused_linear import _library

ROOT = Path(__file__).resolve().parents[1]
WITH_CUDA = _library.build_info()["cuda"] is not None


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    target = tmp_path_factory.mktemp("gemm") / "gemm_test"
    command = [compiler, "-std=c++20", "-O1", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}"]
    command += [flag for folder in include_paths() for flag in ("-isystem", folder)]
    lib = str(Path(torch.__file__).parent / "lib")
    link = [*setup.cxx_runtime(), f"-L{lib}", "-lc10"]
    if WITH_CUDA:
        home = setup.find_cuda()[0]
        folders = [home, *setup.pip_cuda(torch.version.cuda)]
        command += ["-DTORCH_FUSED_LINEAR_WITH_CUDA"]
        command += [flag for folder in folders for flag in ("-isystem", f"{folder}/include")]
        # The cache and the descriptors come from the library itself.
        library = next((ROOT / "torch_fused_linear").glob("_C*.so"))
        link += [str(library), "-Wl,--allow-shlib-undefined"]
    command += [str(ROOT / "tests/csrc/gemm_test.cpp"), "-o", str(target), *link]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return target


@pytest.mark.parametrize(
    "name",
    [
        "forward_mapping",
        "input_gradient_mapping",
        "weight_gradient_mapping",
        "epilogue_table",
        "problem_key",
        "refusals",
        pytest.param(
            "algorithm_cache",
            marks=pytest.mark.skipif(not WITH_CUDA, reason="the library is built without CUDA"),
        ),
    ],
)
def test_gemm(program, name):
    folders = [str(Path(torch.__file__).parent / "lib")]
    if WITH_CUDA:
        folders += [str(p / "lib") for p in setup.pip_cuda(torch.version.cuda)]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders)}
    result = subprocess.run([program, name], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
