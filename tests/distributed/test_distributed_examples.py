"""The examples and the benchmark, in two processes of torchrun's."""

import json
import re
import sys

import pytest
import torch.distributed as dist
from processes import ROOT, run

from benchmarks.pages.__main__ import render
from benchmarks.pages.results import by_machine

EXAMPLES = ROOT / "examples" / "distributed"
SAYS = {
    "data_parallel": "2 blocks were one operator each in 5 steps",
    "fsdp2": "2 blocks were one operator each in 5 steps",
    "tensor_parallel": "_linear_backward_across [8, 16, 128] x [64, 128]",
}

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


def said_by_the_first(script, *arguments):
    command = ["timeout", "240", sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--local-ranks-filter=0", script, *arguments]
    return run(*command, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1").stdout


def test_there_are_examples():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAYS, "together"}


@pytest.mark.parametrize("name", SAYS)
def test_example(name):
    said = said_by_the_first(EXAMPLES / f"{name}.py")
    assert SAYS[name] in said
    losses = re.findall(r"loss (\S+), in a single process (\S+)", said)
    assert len(losses) == 5
    assert float(losses[-1][0]) < float(losses[0][0])


def test_benchmark(tmp_path):
    """It runs, compares what it times, and its numbers are a table of the documentation."""
    file = tmp_path / "numbers.json"
    script = ROOT / "benchmarks" / "distributed.py"
    only = ("--only", "DDP", "FSDP2, 4 micro-batches", "TP + sequence parallel")
    said = said_by_the_first(script, "--tiny", "--blocks", "1", "--json", file, *only)
    cases = [result["case"] for result in json.loads(file.read_text())["results"]]
    assert len(cases) == 6 and {case["ranks"] for case in cases} == {2}
    table = render("several GPUs", by_machine([file])).splitlines()[2:]
    assert len(table) == 2 + len(cases)
    assert all(line in said for line in table)
