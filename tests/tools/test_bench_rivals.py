"""The benchmark suite of feed-forward blocks of other libraries: the same work by all of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import one_thread  # noqa: F401
from torch import nn

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from benchmarks import contenders, operands, rivals
from benchmarks.cases import Case, cases_of
from benchmarks.run import entrants

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TUNED, HEURISTICS = [], []


def mlp_func(x, weight1, weight2, activation, bias1=None, bias2=None, tuned=True):
    """What QuACK's computes, on a CPU."""
    TUNED.append(tuned)
    z = F.linear(x, weight1, bias1)
    h = {"relu": F.relu(z), "gelu_tanh_approx": F.gelu(z, approximate="tanh")}[activation]
    return F.linear(h, weight2, bias2)


class FlashMLP(nn.Module):
    def __init__(self, in_features, hidden_features, activation, heuristic):
        super().__init__()
        HEURISTICS.append(heuristic)
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.kind = {"relu": "relu", "gelu_approx": "gelu_tanh_approx"}[activation]

    def forward(self, x):
        fc1, fc2 = self.fc1, self.fc2
        return mlp_func(x, fc1.weight, fc2.weight, self.kind, fc1.bias, fc2.bias)


class ApexMLP(nn.Module):
    def __init__(self, width, hidden, out):
        super().__init__()
        self.weight1, self.bias1 = nn.Parameter(torch.empty(hidden, width)), None
        self.weight2, self.bias2 = nn.Parameter(torch.empty(out, hidden)), None

    def forward(self, x):
        tensors = self.weight1, self.weight2, "gelu_tanh_approx", self.bias1, self.bias2
        return mlp_func(x, *tensors)


@pytest.fixture
def installed(monkeypatch):
    for name, content in {
        "quack.mlp": {"mlp_func": mlp_func},
        "flash_attn.ops.fused_dense": {"FusedMLP": FlashMLP},
        "apex.fused_dense": {"FusedDenseGeluDense": ApexMLP},
    }.items():
        parts = name.split(".")
        for k in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:k]), SimpleNamespace())
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))


@pytest.mark.parametrize(("activation", "heuristics"), [("relu", ["auto"]), ("gelu", ["auto", 0])])
def test_all_do_the_work_of_eager(activation, heuristics, installed):
    case = Case("rivals", (6, 24, 6), 4, "fp32", activation, "step")
    data = operands.Operands.random(case, CPU)

    def gradients(name):
        contenders.step_of(contenders.network_of(name, case, data), data)()
        return [leaf.grad.clone() for leaf in data.leaves]

    want = gradients("eager")
    assert len(want) == 5
    names = [name for name in rivals.BLOCKS if contenders.applies(name, case, CUDA)]
    assert len(names) == (5 if activation == "gelu" else 3)
    TUNED.clear()
    HEURISTICS.clear()
    for name in names:
        torch.testing.assert_close(gradients(name), want)
    assert TUNED[:2] == [False, True]
    assert heuristics == HEURISTICS


def test_the_cases():
    named = {str(case) for case in cases_of("rivals", CUDA)}
    assert "rivals 1024→4096→1024 T=65536 bf16 gelu graph" in named
    assert not any("4096→16384" in name and "T=65536" in name for name in named)
    case = Case("rivals", (6, 24, 6), 4, "bf16", "relu", "step")
    names = ["mlp", "eager", "mm", *rivals.BLOCKS]
    assert entrants(case, names, CUDA) == [*names[:3], "quack", "quack-tuned", "flash-attn"]
    assert entrants(case, names, CPU) == names[:3]
    other = Case("ffn", (6, 24, 6), 4, "bf16", "relu", "step")
    assert entrants(other, names, CUDA) == names[:3]


@pytest.mark.parametrize("name", rivals.BLOCKS)
def test_what_is_not_installed_is_named(name, monkeypatch):
    package = name.removesuffix("-tuned").removesuffix("-fused").replace("-", "_")
    monkeypatch.setitem(sys.modules, package, None)
    case = Case("rivals", (6, 24, 6), 4, "fp32", "gelu", "step")
    with pytest.raises(ModuleNotFoundError, match=package):
        contenders.contender(name, case, [operands.Operands.random(case, CPU)])
