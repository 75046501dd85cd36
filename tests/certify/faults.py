"""Calls of the libraries below fail at their 1st, 2nd, ... nth occurrence, by a preloaded shim.

Then the result is right, or the error is clear, and the next call is right; memory is what it was.
The cases are those of the fuzz. Unit 0 is the files of plans, by a program without Python.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cpp_programs
import torch

from certify import fuzz, fuzz_cases
from certify.parts import Found
from torch_fused_linear import plans

HERE = Path(__file__).parent
CPU_CALLS = ("posix_memalign",)
GPU_CALLS = (
    *("cudaMalloc", "cudaLaunchKernel", "cublasLtMatmul", "cublasLtMatmulAlgoGetHeuristic"),
    *("cudnnBackendExecute", "cudnnBackendFinalize"),
)
# One of these words stands in an error that is clear about what failed.
CLEAR = {
    "posix_memalign": ("memory", "alloc"),
    "cudaMalloc": ("memory",),
    "cudaLaunchKernel": ("CUDA", "launch"),
    "cublasLtMatmul": ("cublas", "cuBLAS", "CUBLAS"),
    "cublasLtMatmulAlgoGetHeuristic": ("cublas", "cuBLAS", "CUBLAS"),
    "cudnnBackendExecute": ("cudnn", "cuDNN", "CUDNN"),
    "cudnnBackendFinalize": ("cudnn", "cuDNN", "CUDNN", "engine"),
}
OCCURRENCES = 30  # of one call in one case
# To see a leak: failing calls, and in each further window as many as before it, so that a list that
# doubles grows in each. A cache that grows now and then does not, and what grows without failures
# as well (of the driver, where the GPU is shared) is no fault of theirs.
WARM, WINDOWS = 5, (5, 10, 20, 40)
NEVER = 0  # of the calls, which are counted from 1
LEAK = 512  # bytes a call: what Python and the allocator keep on their own is less


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++")


def build_shim(folder: Path) -> Path:
    target = folder / "faults.so"
    command = [str(compiler()), "-std=c++17", "-O1", "-shared", "-fPIC", str(HERE / "faults.cpp")]
    subprocess.run([*command, "-o", str(target), "-ldl"], check=True)
    return target


def preloaded() -> ctypes.CDLL | None:
    """The shim, if this process was started with it."""
    shim = ctypes.CDLL(None)
    return shim if hasattr(shim, "faults_arm") else None


def start_again() -> None:
    """This process once more, with the shim in front of all libraries."""
    shim = build_shim(Path(tempfile.mkdtemp(prefix="faults")))
    os.environ["LD_PRELOAD"] = str(shim)
    os.execv(sys.executable, [sys.executable, *sys.argv])


def plan_files() -> Found:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = cpp_programs.build(
            "../certify/plan_file_faults.cpp", folder, libraries=("torch", "torch_cpu", "c10")
        )
        libraries = os.pathsep.join([str(cpp_programs.LIB), os.environ.get("LD_LIBRARY_PATH", "")])
        run = subprocess.run(
            [program, folder],
            capture_output=True,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
        )
    text = (run.stdout.strip() + run.stderr).replace(f"{folder}/", "")
    if run.returncode:
        return {"failures": [f"plan files: {text or run.returncode}"]}
    return {"failed calls": {"of the plan file": int(text)}}


class Trial:
    def __init__(self, device: str, measured: bool) -> None:
        self.shim = preloaded()
        if self.shim is not None:
            self.shim.faults_arm.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_long)
            self.shim.faults_disarm.restype = ctypes.c_long
        fuzz.Trial(device, measured)
        gc.collect()
        gc.freeze()  # collections look at what comes from now on
        self.device = device
        self.calls = CPU_CALLS if device == "cpu" else (*CPU_CALLS, *GPU_CALLS)

    def one(self, seed: int, unit: int) -> Found:
        if self.shim is None:
            start_again()
        if unit == 0:
            return plan_files()
        case = fuzz_cases.Draw(seed, unit, self.device).case()
        if not case.is_finite or case.policy == "eager":
            return {"left out": 1}
        judge = Judge(case)
        found: Found = {"failures": [], "failed calls": {}, "errors": {}, "right all the same": {}}
        if wrong := judge.wrong(fuzz.of_ours(case)):
            return {"failures": [f"without a fault: {wrong} in {case}"]}
        for name in self.calls:
            nth = 0
            while nth < OCCURRENCES and self.fault(name, nth + 1, judge, found):
                nth += 1
            if nth and (lost := self.leaked(name, 1 + unit % nth, case)):
                where = f"{name} failed at call {1 + unit % nth}"
                words = ", ".join(f"{size:.0f} bytes of {kind}" for kind, size in lost.items())
                found["failures"].append(f"{where}: {words} are lost each time in {case}")
        return found

    def verdict(self, found: Found) -> list[str]:
        met = found.get("failed calls", {})
        return [f"{name} was never called" for name in self.calls if not met.get(name)]

    def fault(self, name: str, nth: int, judge: Judge, found: Found) -> bool:
        """Whether there was an nth call, which failed."""
        error, results = self.run(name, nth, judge.case)
        if not self.reached:
            return False
        where = f"{name} failed at call {nth}"
        found["failed calls"][name] = found["failed calls"].get(name, 0) + 1
        kind = "errors" if error else "right all the same"
        found[kind][name] = found[kind].get(name, 0) + 1
        wrong = unclear(name, error) if error else judge.wrong(results)
        if not wrong and (again := judge.wrong(fuzz.of_ours(judge.case))):
            wrong = f"the next call: {again}"
        if wrong:
            found["failures"].append(f"{where}: {wrong} in {judge.case}")
        return True

    def run(self, name: str, nth: int, case: fuzz_cases.Case):
        """The error, or the results, of a call during which another fails."""
        error, results = None, []
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # so that memory is asked for
            plans.clear()
        self.shim.faults_arm(name.encode(), nth, 1)
        try:
            results = fuzz.of_ours(case)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self.reached = self.shim.faults_disarm() >= nth
        return error, results

    def leaked(self, name: str, nth: int, case: fuzz_cases.Case) -> dict[str, float]:
        """Bytes lost by each of many failing calls, by the memory that loses them."""

        def grown(times: int, nth: int) -> dict[str, float]:
            before = memory(self.device)
            for _ in range(times):
                self.run(name, nth, case)
            gc.collect()
            return {kind: (now - before[kind]) / times for kind, now in memory(self.device).items()}

        grown(WARM, nth)
        least: dict[str, float] = {}
        for times in WINDOWS:
            failing = grown(times, nth)
            if max(failing.values()) > LEAK:
                without = grown(times, NEVER)
                failing = {kind: size - max(0, without[kind]) for kind, size in failing.items()}
            least = {kind: min(least.get(kind, size), size) for kind, size in failing.items()}
            if max(least.values()) <= LEAK:
                return {}
        return {kind: size for kind, size in least.items() if size > LEAK}


class Judge:
    """What is right for a case."""

    def __init__(self, case: fuzz_cases.Case) -> None:
        self.case = case
        self.eager, _ = fuzz.of_eager(case)
        self.exact = fuzz.of_plain(case, fuzz.wide)
        self.scale = fuzz.of_plain(case, lambda t: fuzz.wide(t).abs(), fuzz_cases.bare_step)

    def wrong(self, results: list[torch.Tensor]) -> str:
        columns = (fuzz.names(self.case), results, self.eager, self.exact, self.scale)
        for name, a, b, c, s in zip(*columns, strict=True):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"{name} is {a.dtype} {tuple(a.shape)}"
            if not a.numel() or not bool(b.isfinite().all()):
                continue
            words, _ = fuzz.compared(a, b, c, s)
            if not bool(a.isfinite().all()) or words.startswith("wrong"):
                return f"{name} is {words or 'not finite'}"
        return ""


def unclear(name: str, error: str) -> str:
    if "INTERNAL ASSERT" in error or not any(word in error for word in CLEAR[name]):
        return f"the error is not clear: {error[:300]!r}"
    return ""


class MallInfo(ctypes.Structure):
    """What malloc tells of itself (mallinfo2)."""

    _fields_ = (
        ("not_asked", 4 * ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("not_asked_either", 2 * ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("nor_these", 2 * ctypes.c_size_t),
    )


def memory(device: str) -> dict[str, int]:
    """Bytes in use: of malloc, and of the GPU's allocator."""
    asked = ctypes.CDLL(None).mallinfo2
    asked.restype = MallInfo
    info = asked()
    on_gpu = torch.cuda.memory_allocated() if device == "cuda" else 0
    return {"the CPU": info.uordblks + info.hblkhd, "the GPU": on_gpu}
