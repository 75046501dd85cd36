"""Calls of the libraries below fail at their 1st, 2nd, ... nth occurrence, by a preloaded shim.

Then the result is right, or the error is clear, and the next call is right; memory is what it was.
The cases are those of the fuzz. Unit 0 is the files of plans, by a program without Python.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import cpp_programs
import torch

from certify import fuzz, fuzz_cases, parts
from certify.parts import Found
from certify.record import add
from torch_fused_linear import plans

HERE = Path(__file__).parent
CUBLAS, CUDNN = ("cublas", "cuBLAS", "CUBLAS"), ("cudnn", "cuDNN", "CUDNN")
# The calls; one of the words stands in an error that is clear about what failed.
CLEAR = {
    "posix_memalign": ("memory", "alloc"),
    "cudaMalloc": ("memory",),
    "cudaLaunchKernel": ("CUDA", "launch"),
    "cublasLtMatmul": CUBLAS,
    "cublasLtMatmulAlgoGetHeuristic": CUBLAS,
    "cudnnBackendExecute": CUDNN,
    "cudnnBackendFinalize": (*CUDNN, "engine"),
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


def preloaded() -> ctypes.CDLL:
    """The shim, in a process that was started with it."""
    return ctypes.CDLL(None)


def calls(device: str) -> tuple[str, ...]:
    return ("posix_memalign",) if device == "cpu" else tuple(CLEAR)


def plan_files() -> Found:
    with tempfile.TemporaryDirectory() as folder:
        source, libraries = "../certify/plan_file_faults.cpp", ("torch", "torch_cpu", "c10")
        program = cpp_programs.build(source, Path(folder), libraries=libraries)
        try:
            failed = int(cpp_programs.run(program, folder))
        except AssertionError as wrong:
            return {"failures": [f"plan files: {wrong}".replace(f"{folder}/", "")]}
    return {"failed calls": {"of the plan file": failed}}


class Trial(parts.Trial):
    def __init__(self, device: str, measured: bool) -> None:
        fuzz.Trial(device, measured)
        self.device, self.shim = device, preloaded()
        self.shim.faults_arm.argtypes = (ctypes.c_char_p, ctypes.c_long)
        self.shim.faults_disarm.restype = ctypes.c_long
        gc.collect()
        gc.freeze()  # collections look at what comes from now on

    @staticmethod
    def environment() -> dict[str, str]:
        """The shim, in front of all libraries."""
        return {"LD_PRELOAD": str(build_shim(Path(tempfile.mkdtemp(prefix="faults"))))}

    def one(self, seed: int, unit: int) -> Found:
        if unit == 0:
            return plan_files()
        case = fuzz_cases.Draw(seed, unit, self.device).case()
        if not case.is_finite or case.policy == "eager":
            return {"left out": 1}
        yardstick = fuzz.Yardstick(case)
        if wrong := yardstick.wrong(fuzz.of_ours(case)):
            return {"failures": [f"without a fault: {wrong} in {case}"]}
        found: Found = {}
        for name in calls(self.device):
            tried = (self.fault(name, nth, yardstick) for nth in range(1, OCCURRENCES + 1))
            failed = list(itertools.takewhile(bool, tried))
            for one in failed:
                add(found, one)
            nth = 1 + unit % max(1, len(failed))
            if failed and (lost := self.leaked(name, nth, case)):
                words = ", ".join(f"{size:.0f} bytes of {kind}" for kind, size in lost.items())
                text = f"{name} failed at call {nth}: {words} are lost each time in {case}"
                add(found, {"failures": [text]})
        return found

    @staticmethod
    def verdict(found: Found, device: str) -> list[str]:
        met = found.get("failed calls", {})
        return [f"{name} was never called" for name in calls(device) if not met.get(name)]

    def fault(self, name: str, nth: int, yardstick: fuzz.Yardstick) -> Found:
        """The result of a failure of the nth call; nothing if there is no nth call."""
        case = yardstick.case
        error, results = self.run(name, nth, case)
        if not self.reached:
            return {}
        wrong = unclear(name, error) if error else yardstick.wrong(results)
        if not wrong and (again := yardstick.wrong(fuzz.of_ours(case))):
            wrong = f"the next call: {again}"
        failures = [f"{name} failed at call {nth}: {wrong} in {case}"] if wrong else []
        kind = "errors" if error else "right all the same"
        return {"failures": failures, "failed calls": {name: 1}, kind: {name: 1}}

    def run(self, name: str, nth: int, case: fuzz_cases.Case):
        """The error, or the results, of a call during which another fails."""
        error, results = None, []
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # so that memory is asked for
            plans.clear()
        self.shim.faults_arm(name.encode(), nth)
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


def unclear(name: str, error: str) -> str:
    if "INTERNAL ASSERT" in error or not any(word in error for word in CLEAR[name]):
        return f"the error is not clear: {error[:300]!r}"
    return ""


class MallInfo(ctypes.Structure):
    """malloc's own statistics (mallinfo2)."""

    _fields_ = (("sizes", 10 * ctypes.c_size_t),)


def memory(device: str) -> dict[str, int]:
    """Bytes in use: of malloc, and of the GPU's allocator."""
    asked = ctypes.CDLL(None).mallinfo2
    asked.restype = MallInfo
    sizes = asked().sizes
    mapped, from_arenas = sizes[4], sizes[7]
    on_gpu = torch.cuda.memory_allocated() if device == "cuda" else 0
    return {"the CPU": mapped + from_arenas, "the GPU": on_gpu}
