"""Files of plans, written by hand, and processes that have one."""

from dataclasses import dataclass

import pytest
import torch
from fresh_process import LET_GO, python
from watching import explained

from torch_fused_linear import plans

ALGORITHM = slice(-11, -3)  # of a plan's words
PASSES = ("fprop", "dgrad", "wgrad", "gating", "glu", "chain")
ACTIVATIONS = ("none", "relu", "gelu_tanh", "gelu_erf", "silu", "relu2")
# The machine that a plan is valid for, the version that wrote it, and its words.
FOREIGN = "GPU A\t130100\t580.65\t9.9\tsome_strategy 1 2"


def file_text(*lines, first="torch_fused_linear plans 5"):
    body = "\n".join([first, *(lines or [FOREIGN]), ""])
    hash = 0xCBF29CE484222325  # FNV-1a
    for byte in body.encode():
        hash = (hash ^ byte) * 0x100000001B3 % 2**64
    return f"{body}checksum {hash:x}\n"


@dataclass(frozen=True)
class Plan:
    """The machine that a line of the file is for."""

    what: str
    activation: str
    mask: bool


@pytest.fixture(autouse=True)
def measuring(cuda):
    """A small budget, nothing known at first, and every size measured at once."""
    plans.clear()
    with plans.budget(20), plans.patience(0):
        yield
    plans.clear()


def write_forced(step, path, strategy, takes, algorithm=0):
    """A file of step's plans, as they are measured, where those that `takes` says yes to are of
    that strategy, or of the one that it names."""
    plans.clear()
    known = 0
    while True:  # what is forced may lead to further problems
        step()
        plans.save(path)
        _, *lines, _ = path.read_text().splitlines()
        for i, line in enumerate(lines):
            *origin, plan = line.split("\t")
            words = plan.split(" ")
            problem = PASSES[int(words[1])], ACTIVATIONS[int(words[2])], words[4] in ("2", "3")
            if taken := takes(Plan(*problem)):
                words[0] = taken if isinstance(taken, str) else strategy
                words[ALGORITHM] = [str(algorithm), *"0000000"]
                lines[i] = "\t".join([*origin, " ".join(words)])
        path.write_text(file_text(*lines))
        plans.clear()
        if len(lines) == known:
            return
        known = len(lines)
        plans.load(path)


def run_with(path, step):
    """The results of step by the plans of a file, and its paths."""
    plans.clear()
    plans.load(path)
    result, report = explained(step)
    return result, [call.path for call in report.calls]


def run_forced(step, folder, strategy, takes, algorithm=0):
    """The results of step, and its paths, if the plans that `takes` accepts have that
    strategy."""
    write_forced(step, folder / "plans", strategy, takes, algorithm)
    return run_with(folder / "plans", step)


STEP = """
import sys, torch, torch_fused_linear as tfl
torch.manual_seed(0)
model = torch.nn.Sequential(tfl.FusedLinearGELU(96, 320), tfl.FusedLinear(320, 96)).cuda().half()
x = torch.randn(1024, 96, device="cuda", dtype=torch.float16)
grads = torch.autograd.grad(model(x).float().square().mean(), model.parameters())
torch.save([g.cpu() for g in grads], sys.argv[1])
print(tfl.plans.show())
"""


def run_step(target, code=STEP, **variables):
    """A process's output and error streams, and the gradients of its step."""
    done = python(code + LET_GO, target, **{"TORCH_FUSED_LINEAR_BUDGET_MS": "20", **variables})
    return done.stdout, done.stderr, torch.load(target)
