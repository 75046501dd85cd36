"""C++ tests: programs that are compiled here and run test by test, with no Python in them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from torch_fused_linear import library_path
from torch_fused_linear._support import library

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build_tools"))
import parts  # noqa: E402
import toolkits  # noqa: E402
import torchs  # noqa: E402

(TORCH,) = torchs.found()
LIB = TORCH.folder / "lib"
WITH_CUDA = library.build_info()["cuda"] is not None
# Where CUDA's headers and libraries may be; no nvcc where a library built elsewhere is tried.
HOME = toolkits.find_nvcc(TORCH.cuda, toolkits.homes(TORCH))[0] if WITH_CUDA else None
CUDA = [*filter(None, [HOME]), *toolkits.pip_folders(TORCH)] if WITH_CUDA else []


def names_in(source):
    """The tests of a program, in their order."""
    text = (ROOT / "tests/csrc" / source).read_text()
    return re.findall(r"^TEST\((\w+)\)", text, re.MULTILINE)


def build(source, folder, *flags, libraries=("c10",)):
    """Compiles tests/csrc/`source` against torch and our library."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    target = folder / Path(source).stem
    command = [compiler, "-std=c++20", "-Wall", "-Werror", *flags, f"-I{ROOT / 'csrc'}"]
    command += parts.headers_of(TORCH, None) + parts.as_system(p / "include" for p in CUDA)
    command += [str(ROOT / "tests/csrc" / source), "-o", str(target), library_path(), f"-L{LIB}"]
    command += [*parts.cxx_runtime(), "-Wl,--no-as-needed", *(f"-l{name}" for name in libraries)]
    command += ["-pthread", "-Wl,--allow-shlib-undefined"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return target


def run(program, name, **options):
    """Runs one test of a program and returns its output, which is the reason if it fails."""
    folders = [str(LIB), *(str(p / "lib") for p in CUDA)]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(folders)}
    result = subprocess.run(
        [program, name], capture_output=True, text=True, env=environment, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
