"""The kernels for Hopper GPUs (csrc/cuda/hopper): compiled for sm_90a alone, with CUTLASS.

Apart from the rest, as they need instructions that only this target has, headers that few builds
want, and minutes; what has not changed is not compiled again, whenever its file was written.
"""

import concurrent.futures
import hashlib
import importlib.util
import itertools
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "csrc" / "cuda" / "hopper"
PACKAGE = "nvidia-cutlass==4.2.0.0"
TARGET = ["-gencode=arch=compute_90a,code=sm_90a"]
# How often kernels.cu is compiled.
KINDS = ("forward", "saving_forward", "backward", "gating", "glu")
UNITS = list(itertools.product(KINDS, ("bf16", "f16"), ("true", "false")))
# 2908 is about CUTLASS's own lambdas. Without NDEBUG the tensor cores wait after each instruction.
FLAGS = ["-std=c++20", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-diag-suppress=2908"]


def headers():
    """CUTLASS's include folder, or None: TORCH_FUSED_LINEAR_CUTLASS, or the package from PyPI."""
    folder = os.environ.get("TORCH_FUSED_LINEAR_CUTLASS")
    spec = importlib.util.find_spec("cutlass_library")
    if folder is None and spec is not None:
        folder = Path(spec.origin).parent / "source"
    include = Path(folder, "include") if folder else None
    return include if include and (include / "cutlass" / "version.h").exists() else None


def version():
    text = (headers() / "cutlass" / "version.h").read_text()
    return ".".join(
        re.findall(r"^#define CUTLASS_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text, re.MULTILINE)
    )


def is_visible():
    """Whether a GPU of this kind is in the machine; asked of the driver, not of torch."""
    try:
        ask = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        return "9.0" in subprocess.run(ask, capture_output=True, text=True).stdout.split()
    except OSError:
        return False


def choose(wish, arch_list):
    """(whether they are built, why). arch_list: of a build for CUDA, else None."""
    if wish == "0":
        return False, "TORCH_FUSED_LINEAR_HOPPER=0"
    if arch_list is None:
        return False, "a build for the CPU only"
    if not re.search(r"\b9\.0a?\b", arch_list):
        return False, "not among the architectures"
    if wish != "1" and not is_visible():
        return False, "no such GPU here; TORCH_FUSED_LINEAR_HOPPER=1 builds them"
    if headers() is None:
        why = f"CUTLASS is missing: pip install --no-deps {PACKAGE}"
        if wish == "1":
            raise SystemExit(f"TORCH_FUSED_LINEAR_HOPPER=1, but {why}")
        return False, why
    return True, f"CUTLASS {version()}"


def included(path, found):
    """The file and all of csrc that it includes, into `found`."""
    if path not in found:
        found.add(path)
        for name in re.findall(r'^#include "(.+)"$', path.read_text(), re.MULTILINE):
            included(ROOT / "csrc" / name, found)
    return found


def tools(nvcc):
    """What compiles all of them: versions and flags, and no path."""
    texts = [(headers() / "cutlass" / "version.h").read_bytes()]
    texts.append(subprocess.run([nvcc, "--version"], capture_output=True).stdout)
    texts.append(" ".join([*FLAGS, *TARGET]).encode())
    return texts


def compile_unit(nvcc, kind, type_, transposed, system, folder, made_with):
    source = KERNELS / "kernels.cu"
    made = folder / f"{kind}_{type_}{'_transposed' * (transposed == 'true')}.o"
    stamp = made.with_suffix(".sha256")
    texts = [p.read_bytes() for p in sorted(included(source, set()))]
    current = hashlib.sha256(b"\0".join([*texts, *made_with])).hexdigest()
    if made.exists() and stamp.exists() and stamp.read_text() == current:
        return made
    stamp.unlink(missing_ok=True)
    command = [nvcc, "-c", *FLAGS, *TARGET, "-Xcompiler", "-fPIC", f"-I{ROOT / 'csrc'}", *system]
    command += [f"-DFUSED_KIND={kind}", f"-DFUSED_TYPE={type_}"]
    command += [f"-DFUSED_TRANSPOSED={transposed}"]
    command += ["-isystem", headers(), source, "-o", made]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{made.stem}:\n{done.stdout}{done.stderr}")
    stamp.write_text(current)
    return made


def objects(nvcc, system, folder, jobs):
    """Compiles the kernels.

    Args:
        nvcc: the compiler.
        system: flags that name the system headers, torch's and CUDA's.
        folder: where the objects are put, and looked for.
        jobs: how many at a time; each takes 2 GiB.

    Returns:
        The paths of the objects.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made_with = tools(nvcc)
    with concurrent.futures.ThreadPoolExecutor(max(jobs, 1)) as pool:
        work = [pool.submit(compile_unit, nvcc, *u, system, folder, made_with) for u in UNITS]
        return [str(done.result()) for done in work]
