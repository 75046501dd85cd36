"""The machine's properties that times depend on, for the header of the results."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import torch_fused_linear as tfl
from torch_fused_linear import doctor
from torch_fused_linear._support import library

CLOCK_FIELDS = {
    "sm_clock": "clocks.sm",
    "max_sm_clock": "clocks.max.sm",
    "memory_clock": "clocks.mem",
    "power": "power.draw",
    "power_limit": "power.limit",
    "temperature": "temperature.gpu",
}


def processor() -> str:
    cpus = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:(.*)", cpus.read_text() if cpus.exists() else "", re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


def clocks(device: torch.device) -> dict[str, str]:
    """Clocks, power and temperature as nvidia-smi tells them; empty where it does not."""
    if device.type != "cuda":
        return {}
    which = str(torch.cuda.get_device_properties(device).uuid)
    query = f"--query-gpu={','.join(CLOCK_FIELDS.values())}"
    command = ["nvidia-smi", f"--id=GPU-{which}", query, "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(CLOCK_FIELDS, map(str.strip, answer.stdout.strip().split(","))))


@functools.cache
def sensors(device: torch.device) -> Callable[[], tuple[int, int]] | None:
    """Returns a reader of the multiprocessors' clock, in MHz, and the energy used so far, in mJ, in
    microseconds; nothing where NVIDIA's library is not there."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, clock, energy = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_ulonglong()
    which = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(which, ctypes.byref(handle)):
        return None

    def read() -> tuple[int, int]:
        of_multiprocessors = 1
        nvml.nvmlDeviceGetClockInfo(handle, of_multiprocessors, ctypes.byref(clock))
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy))
        return clock.value, energy.value

    return read


@contextlib.contextmanager
def observed(device: torch.device, clocks: list[int]) -> Iterator[None]:
    """Adds the clock at the end to the others, where there is a GPU that tells it."""
    yield
    if device.type == "cuda" and (read := sensors(device)):
        clocks.append(read()[0])


def power(device: torch.device, call: Callable[[], object], seconds: float) -> float | None:
    """The watts of calls in a loop of their own; nothing where the GPU does not count its energy.

    It is taken from one step of the counter to another, as those are too far apart for a turn.
    """
    if (read := sensors(device)) is None:
        return None
    steps = [(begin := time.perf_counter(), read()[1])]
    while (now := time.perf_counter()) < begin + 4 * seconds:
        for _ in range(3):
            call()
        torch.cuda.synchronize(device)
        if (energy := read()[1]) != steps[-1][1]:
            steps.append((time.perf_counter(), energy))
            if now > steps[1][0] + seconds:
                break
    # The first step's own beginning is not known.
    if len(steps) < 3:
        return None
    (start, before), (end, after) = steps[1], steps[-1]
    return (after - before) / 1e3 / (end - start)


def warm_up(device: torch.device, seconds: float = 0.5) -> None:
    """A GPU at rest has low clocks; keep it busy until they are up."""
    if device.type != "cuda":
        return
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize()


def begin(device: torch.device, arguments: list[str]) -> dict[str, Any]:
    """Warms the device up. -> the header of a file of results, with the clocks at the start."""
    warm_up(device)
    about = header(device, arguments)
    about["clocks"].update({"start": now} if (now := clocks(device)) else {})
    return about


def header(device: torch.device, arguments: list[str]) -> dict[str, Any]:
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        machine = f"{processor()}, {threads} thread{'s' if threads > 1 else ''}"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "device": device.type,
        **doctor.versions(),
        "package": tfl.__version__,
        "library": library.build_info(),
        "policy": tfl.get_policy(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn": {
            name: getattr(torch.backends.cudnn, name) for name in ("allow_tf32", "benchmark")
        },
        # Where a file lay is of nobody's interest elsewhere.
        "arguments": [Path(a).name if Path(a).is_absolute() else a for a in arguments],
        "clocks": {},
    }
