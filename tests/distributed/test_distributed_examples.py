"""The examples and the benchmark, in two processes of torchrun's: on CPUs, and on two GPUs."""

import json
import re
import sys

import pytest
import torch.distributed as dist
from processes import ROOT, run, starting_with

from benchmarks.distributed import ARRANGEMENTS
from benchmarks.pages.__main__ import render
from benchmarks.pages.results import by_machine

EXAMPLES = ROOT / "examples" / "distributed"
SAYS = {
    "data_parallel": "2 blocks were one operator each in 5 steps",
    "fsdp2": "2 blocks were one operator each in 5 steps",
    "tensor_parallel": "_linear_backward_across [8, 16, 128] x [64, 128]",
}
# On a GPU optimizers update all parameters of a group by one kernel, which takes no mixture of
# distributed and plain ones; on a CPU only where they are told to.
FOREACH = """
import torch
for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
    def foreach(self, *arguments, original=kind.__init__, **options):
        original(self, *arguments, **{"foreach": True, **options})
    kind.__init__ = foreach
"""
ON_CPUS = pytest.param(
    "cpu", marks=pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
)
ON_GPUS = pytest.param("cuda", marks=pytest.mark.two_gpus)
machines = pytest.mark.parametrize("machine", [ON_CPUS, ON_GPUS])


def said_by_the_first(machine, script, *arguments, **variables):
    command = ["timeout", "240", sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--local-ranks-filter=0", script, *arguments]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    if machine == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return run(*command, **environment).stdout


def test_there_are_examples():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAYS, "together"}


@machines
@pytest.mark.parametrize("name", SAYS)
def test_example(name, machine, tmp_path):
    variables = starting_with(tmp_path, FOREACH) if machine == "cpu" else {}
    said = said_by_the_first(machine, EXAMPLES / f"{name}.py", **variables)
    assert SAYS[name] in said
    assert f"2 processes on {machine}" in said
    losses = re.findall(r"loss (\S+), in a single process (\S+)", said)
    assert len(losses) == 5
    assert float(losses[-1][0]) < float(losses[0][0])


@machines
def test_benchmark(tmp_path, machine):
    """It runs, compares what it times, and its numbers are a table of the documentation."""
    file = tmp_path / "numbers.json"
    script = ROOT / "benchmarks" / "distributed.py"
    few = ("DDP", "FSDP2, 4 micro-batches", "TP + sequence parallel")
    only = few if machine == "cpu" else ARRANGEMENTS
    said = said_by_the_first(
        machine, script, "--tiny", "--blocks", "1", "--json", file, "--only", *only
    )
    cases = [result["case"] for result in json.loads(file.read_text())["results"]]
    assert len(cases) == 2 * len(only) and {case["ranks"] for case in cases} == {2}
    table = render("several GPUs", by_machine([file])).splitlines()[2:]
    assert len(table) == 2 + len(cases)
    assert all(line in said for line in table)
