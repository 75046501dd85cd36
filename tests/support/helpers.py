"""What is no matter of operators: devices, threads and processes of tests."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]  # conftest skips the latter
device_param = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For the files that import it: on tensors this small a second thread only costs, and on a
    busy machine it costs a hundredfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_python(code: str, **variables: str | None) -> subprocess.CompletedProcess:
    """In a process of its own, whose environment has of the library's variables these alone."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_FUSED_LINEAR_")}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    for name, value in variables.items():
        if value is not None:
            environment[f"TORCH_FUSED_LINEAR_{name}"] = value
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment)
