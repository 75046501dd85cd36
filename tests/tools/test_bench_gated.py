"""The benchmark suites of gated blocks: the same work by all contenders."""

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

from benchmarks import contenders, gated, operands
from benchmarks.__main__ import main
from benchmarks.cases import SUITES, Case, cases_of
from benchmarks.run import entrants

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def outcome(name, case, data):
    """The output, or the gradients of input, gate, up and down."""
    network = contenders.network_of(name, case, data)
    if case.mode == "forward":
        return [network(data.input)]
    step = contenders.step_of(network, data)
    step()
    step()  # gradients do not add up
    leaves = [data.input, *network.parameters()]
    return [leaf.grad.clone() for leaf in leaves]


class QuackMLP(nn.Module):
    """What QuACK's computes on a CPU."""

    def __init__(self, width, hidden, out, activation, device, dtype, tuned):
        super().__init__()
        assert activation == "swiglu"
        self.fc1 = nn.Linear(width, 2 * hidden, bias=False, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out, bias=False, device=device, dtype=dtype)

    def forward(self, x):
        y = self.fc1(x)
        return self.fc2(F.silu(y[..., ::2]) * y[..., 1::2])


class LigerMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.hidden_act == "silu"
        i, o = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(i, o, bias=False), nn.Linear(i, o, bias=False)
        self.down_proj = nn.Linear(o, i, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("mode", ["forward", "step"])
def test_all_do_the_work_of_eager(mode, monkeypatch):
    fakes = {"quack.mlp": {"MLP": QuackMLP}}
    fakes["liger_kernel.transformers"] = {"LigerSwiGLUMLP": LigerMLP}
    for name, content in fakes.items():
        monkeypatch.setitem(sys.modules, name.partition(".")[0], SimpleNamespace())
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    case = Case("gated", (6, 10, 6), 4, "fp32", "silu", mode)
    data = operands.Operands.random(case, CPU)
    want = outcome("eager", case, data)
    for name in gated.BLOCKS:
        got = outcome(name, case, data)
        if name.startswith("quack") and mode == "step":
            both = torch.stack(want[1:3], 1).flatten(0, 1)
            torch.testing.assert_close(got, [want[0], both, want[3]])
        else:
            torch.testing.assert_close(got, want)


def test_the_cases():
    named = {str(case) for case in cases_of("gated", CUDA)}
    assert "gated 4096→14336→4096 T=8192 bf16 silu step" in named
    assert "gated 1024→2816→1024 T=1 bf16 silu forward" in named
    assert not any("T=1 " in name and "step" in name for name in named)
    case = Case("gated-memory", (16, 24, 16), 8, "bf16", "silu", "saved")
    names = ["ours", "fused", "eager", "liger", "quack", "mm"]
    assert entrants(case, names, CUDA) == names[:-1]
    assert entrants(case, names, CPU) == names[:3]


def test_what_is_not_installed_is_named_and_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    case = Case("gated", (16, 24, 16), 8, "fp32", "silu", "forward")
    data = operands.Operands.random(case, CPU)
    with pytest.raises(ModuleNotFoundError, match="liger_kernel"):
        contenders.contender("liger", case, [data])


def test_they_run_and_keep_less_than_eager(capsys, tmp_path):
    suites = [name for name in SUITES if name.startswith("gated")]
    assert len(suites) == 4
    file = tmp_path / "bench.json"
    options = ["--quick", "--device", "cpu", "--dtypes", "fp32", "--json", str(file)]
    assert main([*suites, *options]) == 0
    from benchmarks import results

    _, records = results.load(file)
    assert len(records) == 7
    for record in records:
        assert {"ours", "fused", "eager"} <= set(record.numbers) and not record.failed
        if record.case.mode == "saved":
            kept = {name: number.median for name, number in record.numbers.items()}
            assert kept["ours"] == kept["fused"] < kept["eager"]
