"""The C++ tests under the compiler's sanitizers; on a GPU, our kernels under compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import sanitized

from certify import parts
from certify.parts import Found

COMPILERS = ("address", "thread")
# racecheck dies of kernels for Hopper GPUs; initcheck does not see what such kernels write, those
# of cuBLAS among them.
CUDA = {
    "memcheck": ("alone", "small", "hopper", "cases"),
    "racecheck": ("alone", "small", "cases"),
    "synccheck": ("alone", "small", "hopper", "cases"),
    "initcheck": ("alone", "small"),
}
ENDED_BY_IT = 77  # the status that compute-sanitizer gives where it has found something


class Trial(parts.Trial):
    @staticmethod
    def units(device: str) -> tuple[str, ...]:
        """The tools, those of the GPU first: `--count 4` is these alone."""
        return COMPILERS if device == "cpu" else (*CUDA, *COMPILERS)

    def one(self, seed: int, unit: int) -> Found:
        units = self.units(self.device)
        tool = units[unit % len(units)]
        return compiled(tool) if tool in COMPILERS else on_gpu(tool, seed)


def compiled(kind: str) -> Found:
    """`make asan`, `make tsan`."""
    tested = sanitized.tested(kind)
    failures = [f"{kind}: {test}" for test, is_clean in tested.items() if not is_clean]
    return {"clean": {kind: sum(tested.values())}, "failures": failures}


def on_gpu(tool: str, seed: int) -> Found:
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"failures": [f"{tool}: there is no compute-sanitizer on the PATH"]}
    script = [sys.executable, str(Path(__file__).parent / "kernels.py")]
    with tempfile.TemporaryDirectory() as folder:
        planned = subprocess.run([*script, "plan", folder], capture_output=True, text=True)
        if planned.returncode:
            return {"failures": [f"{tool}: no plans: {planned.stderr[-300:]}"]}
        command = [program, f"--tool={tool}", f"--error-exitcode={ENDED_BY_IT}"]
        # initcheck must see who writes: torch's kernels, too
        command += [] if tool == "initcheck" else ["--kernel-name", "kns=fused"]
        command += [*script, "run", folder, str(seed), *CUDA[tool]]
        # torch's own pool would hide what is written beside a tensor
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = re.search(r"(\d+) calls", run.stdout)
    if run.returncode or not found:
        lines = [line for line in run.stdout.splitlines() if "=====" in line]
        return {"failures": [f"{tool}: status {run.returncode}: {' '.join(lines)[:1000]}"]}
    return {"clean": {tool: int(found[1])}}
