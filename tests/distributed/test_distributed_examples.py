"""The examples, as their readers run them: two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "distributed"
SAYS = {
    "data_parallel": "handed over 10 times in 5 steps",
    "fsdp2": "handed over 10 times in 5 steps",
    "tensor_parallel": "_linear_backward_across [8, 16, 128] x [64, 128] handed over",
}


def test_there_are_examples():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAYS, "together"}


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("name", SAYS)
def test_example(name):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
    losses = re.findall(r"loss (\S+), in a single process (\S+)", done.stdout)
    assert len(losses) == 5
    assert float(losses[-1][0]) < float(losses[0][0])
