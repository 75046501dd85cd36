"""CUDA: whether there is what compiles for GPUs, and for which."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchs import Torch

# As torch's own builds for CUDA 13. The last two are known to nvcc from 12.8 on.
ARCHITECTURES, NEW_ARCHITECTURES = ["7.5", "8.0", "8.6", "9.0"], ["10.0", "12.0"]
CUTLASS = "nvidia-cutlass==4.2.0.0"


@dataclass(frozen=True)
class Toolkit:
    """The compiler and libraries for GPUs.

    Attributes:
        home: nvcc's folder is below it.
        version: nvcc's.
        folders: where headers and libraries are looked for.
        arch_list: as in TORCH_CUDA_ARCH_LIST.
        cutlass: CUTLASS's headers, if our own products for Hopper GPUs are compiled.
    """

    home: Path
    version: str
    folders: tuple[Path, ...]
    arch_list: str
    cutlass: Path | None

    @property
    def includes(self):
        return [f / name for f in self.folders for name in ("include", "include/cccl")]

    def library(self, name):
        """By path, not by -l: the libraries that pip installs carry no plain .so name."""
        places = (
            p
            for f in self.folders
            for d in ("lib64", "lib")
            for p in (f / d).glob(f"lib{name}.so*")
        )
        return str(next(places, f"-l{name}"))


def wish_for(what):
    """'0', '1', or None where the variable is not set, or empty."""
    variable = f"TORCH_FUSED_LINEAR_{what}"
    wish = os.environ.get(variable) or None
    if wish not in (None, "0", "1"):
        sys.exit(f"{variable} must be 0 or 1, got '{wish}'")
    return wish


@cache
def visible_gpus():
    """The capabilities of the GPUs in the machine; asked of the driver, not of torch."""
    try:
        ask = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        said = subprocess.run(ask, capture_output=True, text=True).stdout
    except OSError:
        return ()
    return tuple(sorted(set(re.findall(r"^\d+\.\d+$", said, re.MULTILINE)), key=float))


def pip_folders(torch: Torch):
    """Where pip puts the CUDA packages of torch's major version: torch's own, nvcc if installed."""
    name = "cu" + torch.cuda.split(".")[0]
    spec = importlib.util.find_spec("nvidia")
    beside = [torch.folder.parent / "nvidia"]
    others = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    return [f / name for f in dict.fromkeys([*beside, *others]) if (f / name).is_dir()]


def homes(torch: Torch):
    """Where nvcc may be."""
    on_path = shutil.which("nvcc")
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    named += [on_path and Path(on_path).resolve().parents[1], "/usr/local/cuda"]
    return [Path(home) for home in named if home] + pip_folders(torch)


def version_of_nvcc(home):
    answer = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True)
    return re.search(r"release (\d+\.\d+)|$", answer.stdout)[1] or "unknown"


def find_nvcc(torch_cuda, homes):
    """(home, version, why): of torch's very CUDA if there is one, else of the same major version,
    within which they are compatible."""
    found = [(home, version_of_nvcc(home)) for home in homes if (home / "bin" / "nvcc").exists()]
    major = torch_cuda.split(".")[0]
    fit = [pair for pair in found if pair[1].split(".")[0] == major]
    for home, version in sorted(fit, key=lambda pair: pair[1] != torch_cuda):
        other = "" if version == torch_cuda else f", torch's CUDA is {torch_cuda}"
        return home, version, f"nvcc {version} in {home}{other}"
    if found:
        home, version = found[0]
        return None, None, f"nvcc {version} in {home} does not fit torch's CUDA {torch_cuda}"
    return None, None, "no nvcc was found"


def no_nvcc(why, torch: Torch):
    """Never a CPU-only library without a word where GPUs are wanted: both ways out."""
    return (
        f"torch_fused_linear: the library cannot be built for GPUs: {why}.\n"
        f"  Either install nvcc of CUDA {torch.cuda}: pip install '{nvcc_package(torch)}'\n"
        "  or NVIDIA's toolkit (CUDA_HOME names its folder),\n"
        "  or build for the CPU only, with TORCH_FUSED_LINEAR_CUDA=0 in the environment."
    )


def nvcc_package(torch: Torch):
    return f"cuda-toolkit[nvcc,cccl]=={torch.cuda}.*"


def wants_cuda(torch: Torch, everything):
    named = os.environ.get("TORCH_CUDA_ARCH_LIST")
    wanted = everything or wish_for("CUDA") == "1" or named or visible_gpus()
    return wish_for("CUDA") != "0" and torch.cuda is not None and bool(wanted)


def choose(torch: Torch, *, everything=False):
    """(the toolkit, or None for the CPU's library alone; why).

    Built is what can run here; all architectures with `everything`, or where a build for GPUs is
    asked for and none is here.
    """
    wish = wish_for("CUDA")
    if wish == "0":
        return None, "TORCH_FUSED_LINEAR_CUDA=0"
    if torch.cuda is None:
        if wish == "1":
            sys.exit("TORCH_FUSED_LINEAR_CUDA=1, but this torch is built without CUDA")
        return None, "this torch is built without CUDA"
    if not wants_cuda(torch, everything):
        return None, "no GPU here; TORCH_FUSED_LINEAR_CUDA=1 builds for all GPUs"
    home, version, why = find_nvcc(torch.cuda, homes(torch))
    if home is None:
        sys.exit(no_nvcc(why, torch))
    here = None if everything else ";".join(visible_gpus())
    arch_list = os.environ.get("TORCH_CUDA_ARCH_LIST") or here or all_architectures(version)
    cutlass, why_hopper = hopper(arch_list)
    if has_hopper(arch_list):
        why += f"; {'with' if cutlass else 'without'} own products for Hopper ({why_hopper})"
    return Toolkit(home, version, (home, *pip_folders(torch)), arch_list, cutlass), why


def lacks_nvcc(torch: Torch, everything):
    """Returns whether choose() would end because nvcc is missing."""
    return wants_cuda(torch, everything) and find_nvcc(torch.cuda, homes(torch))[0] is None


# --- architectures ------------------------------------------------------------------------------


def all_architectures(cuda):
    new = tuple(map(int, cuda.split(".")[:2])) >= (12, 8)
    return ";".join([*ARCHITECTURES, *NEW_ARCHITECTURES * new]) + "+PTX"


def gencode(arch_list):
    """nvcc's flags for "8.0;9.0+PTX"."""
    flags = []
    for name in re.split(r"[;\s]+", arch_list.strip()):
        match = re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", name)
        if match is None:
            sys.exit(
                f"TORCH_CUDA_ARCH_LIST: expected numbers as in '8.0;9.0+PTX', got '{arch_list}'"
            )
        number = match[1] + match[2]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def has_hopper(arch_list):
    return re.search(r"\b9\.0a?\b", arch_list) is not None


# --- our own products for Hopper GPUs -------------------------------------------------------------


def cutlass_headers():
    """CUTLASS's include folder, or None: TORCH_FUSED_LINEAR_CUTLASS, or the package from PyPI."""
    folder = os.environ.get("TORCH_FUSED_LINEAR_CUTLASS")
    spec = importlib.util.find_spec("cutlass_library")
    if folder is None and spec is not None:
        folder = Path(spec.origin).parent / "source"
    include = Path(folder, "include") if folder else None
    return include if include and (include / "cutlass" / "version.h").exists() else None


def cutlass_version(headers):
    text = (headers / "cutlass" / "version.h").read_text()
    numbers = re.findall(r"^#define CUTLASS_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text, re.MULTILINE)
    return ".".join(numbers)


def hopper(arch_list):
    """(CUTLASS's headers, or None where those products are left out; why)."""
    wish = wish_for("HOPPER")
    if wish == "0":
        return None, "TORCH_FUSED_LINEAR_HOPPER=0"
    if not has_hopper(arch_list):
        return None, "not among the architectures"
    if wish != "1" and "9.0" not in visible_gpus():
        return None, "no such GPU here; TORCH_FUSED_LINEAR_HOPPER=1 builds them"
    headers = cutlass_headers()
    if headers is None:
        why = f"CUTLASS is missing: pip install --no-deps {CUTLASS}"
        if wish == "1":
            sys.exit(f"TORCH_FUSED_LINEAR_HOPPER=1, but {why}")
        return None, why
    return headers, f"CUTLASS {cutlass_version(headers)}"
