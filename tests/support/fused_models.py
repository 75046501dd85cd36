"""Helpers for the tests of fuse_: a model's state and results, and comparisons."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from numerics import Tally, ulp
from stacks import assert_same
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from watching import Calls

import torch_fused_linear as tfl
from torch_fused_linear import functional
from torch_fused_linear._support import library
from torch_fused_linear.fuse import in_code, plain
from torch_fused_linear.fuse import run as decisions


def chain():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)

    def forward(self, x):
        h = self.fc1(x)
        h = self.act(h)
        return self.fc2(h)


class Gated(Block):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.axis = nn.Linear(6, 6), nn.Dropout(0.0), -1

    def forward(self, x):
        gate = self.act(self.fc1(x))
        return self.fc2(self.drop(gate * self.up(x)))


def pair(make: Callable[[], nn.Module], dtype=torch.float64) -> tuple[nn.Module, nn.Module]:
    """The fused model and a plain one."""
    torch.manual_seed(0)
    plain = make().to(dtype)
    model = copy.deepcopy(plain)
    assert tfl.fuse_(model).fused
    return model, plain


@dataclass
class Snapshot:
    """A model as it stands: the same objects in the same places, the same bits, the same text."""

    text: str
    modules: list[tuple[str, int, type, list[str]]]
    parameters: list[tuple[str, int]]
    state: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        return cls(
            repr(model),
            [
                (name, id(m), type(m), sorted([*vars(m), *m._modules]), m.training)
                for name, m in model.named_modules(remove_duplicate=False)
            ],
            [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)],
            {name: t.clone() for name, t in model.state_dict().items()},
        )

    def assert_equals(self, other: Snapshot) -> None:
        assert self.text == other.text
        assert self.modules == other.modules
        self.assert_same_parameters(other)

    def assert_same_parameters(self, other: Snapshot) -> None:
        assert self.parameters == other.parameters
        assert list(self.state) == list(other.state)
        assert all(torch.equal(t, other.state[name]) for name, t in self.state.items())


def tensor_of(output) -> Tensor:
    """The main result of a model: of a transformers output, the first tensor."""
    return output if isinstance(output, Tensor) else output[0]


def results(model: nn.Module, inputs: Sequence | dict) -> list[Tensor | None]:
    """The output and the gradient of every parameter and floating input."""
    named = inputs if isinstance(inputs, dict) else dict(enumerate(inputs))
    named = {
        k: v.detach().clone().requires_grad_(v.is_floating_point()) if torch.is_tensor(v) else v
        for k, v in named.items()
    }
    model.zero_grad()
    torch.manual_seed(1)  # the same dropout
    output = tensor_of(model(**named) if isinstance(inputs, dict) else model(*named.values()))
    gen = torch.Generator().manual_seed(2)
    g = torch.randn(output.shape, generator=gen, dtype=torch.float64).to(output)
    output.backward(g)
    leaves = [*model.parameters(), *(v for v in named.values() if torch.is_tensor(v))]
    return [output.detach(), *(None if t.grad is None else t.grad.clone() for t in leaves)]


def gated(report) -> list[str]:
    """The gated operators that a report of fuse_ names."""
    names = [name for block in report.fused for name in block.after]
    return [name for name in names if name.startswith(("gated_mlp", "linear_glu"))]


def cast(inputs, dtype: torch.dtype):
    """The floating inputs in this dtype."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)


def assert_fuses(
    make: Callable[[], nn.Module], inputs, blocks: int, joint: int, **options
) -> nn.Module:
    """fuse_ on a model: the same function and gradients in fp64, both ways of state, and back.
    So many backward steps are of two layers."""
    torch.manual_seed(0)
    model = make().double()
    inputs = cast(inputs, torch.float64)
    eager, before = copy.deepcopy(model), Snapshot.of(model)
    report = tfl.fuse_(model, **options)
    assert len(report.fused) == blocks, report
    before.assert_same_parameters(Snapshot.of(model))
    for training in (True, False):
        want = results(eager.train(training), inputs)
        with tfl.explain() as calls:
            got = results(model.train(training), inputs)
        assert_same(got, want, f"training={training}")
    steps = [call.operator for call in calls.calls]
    assert steps.count("_linear_backward_across") == joint, calls
    with torch.no_grad():  # the fast path of nn.TransformerEncoderLayer, for one
        assert_same([tensor_of(call(model, inputs))], [tensor_of(call(eager, inputs))], "inference")
    for source, target in ((model, eager), (eager, model)):
        with torch.no_grad():
            for p in source.parameters():
                p.add_(0.01)
        target.load_state_dict(source.state_dict(), strict=True)
        assert_same([tensor_of(call(model, inputs))], [tensor_of(call(eager, inputs))], "state")
    fused = Snapshot.of(model)
    assert not tfl.fuse_(model, **options).fused
    fused.assert_equals(Snapshot.of(model))
    tfl.unfuse_(model.train())
    after = Snapshot.of(model)
    assert (after.text, after.modules) == (before.text, before.modules)
    tfl.fuse_(model, **options)
    return model


def call(model: nn.Module, inputs):
    torch.manual_seed(1)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def assert_contract_in(dtype: torch.dtype, make: Callable[[], nn.Module], inputs) -> None:
    """docs/numerics.md for a whole model: its error against fp64 beside eager's."""
    torch.manual_seed(0)
    eager = make().to(dtype)
    fused, truth = copy.deepcopy(eager), copy.deepcopy(eager).double()
    assert tfl.fuse_(fused).fused
    tally = Tally()
    inputs = cast(inputs, dtype)
    wide = cast(inputs, torch.float64)
    columns = results(fused, inputs), results(eager, inputs), results(truth, wide)
    for ours, theirs, exact in zip(*columns, strict=True):
        if exact is not None:
            assert ours.dtype == theirs.dtype
            tally.add(ours, theirs, exact, ulp(ours.dtype, float(exact.abs().max())))
    tally.check(f"{dtype}")


def operators(model: nn.Module, *inputs: Tensor) -> list[str]:
    """Those of ours that one forward calls, without gradients."""
    with torch.no_grad(), Calls() as calls:
        model(*inputs)
    return [name.partition("::")[2] for name in calls.names if name.startswith("fused::")]


def unmark_all(monkeypatch) -> None:
    """Takes the marks of all models, also of earlier tests, until the end of this one."""
    for module in [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]:
        monkeypatch.delitem(vars(module), plain.MARK, raising=False)


@pytest.fixture(params=["C", "Python"])
def decides(request, monkeypatch):
    if request.param == "Python":
        decided_in_python(monkeypatch)


def decided_in_python(monkeypatch) -> None:
    """Decides about rewritten code's calls in Python, as where the C library cannot be built."""
    for name in in_code.IN_C:
        monkeypatch.setattr(in_code, name, getattr(decisions, name))
    monkeypatch.setattr(functional, "direct", library._NotDirect())
