"""Stacks of fused layers or blocks, and the same of plain torch: one scenario, run on both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import operators
import torch
import torch.nn.functional as F
from numerics import assert_same
from operators import ACTS
from torch import Tensor, nn

import torch_fused_linear as tfl


class Glu:
    """A gated layer with the parameters of any other: up's weight is made of gate's."""

    def call(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return torch.ops.fused.linear_glu(x, w, w.cos(), None, b)

    def eager(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.silu(F.linear(x, w)) * F.linear(x, w.cos(), b)


@dataclass(frozen=True)
class Mlp:
    """Two layers in one operator, with the parameters of one: the second weight is made of them."""

    activation: str
    memory: str = "default"

    def second(self, w: Tensor) -> Tensor:
        return w.cos() @ w.sin().mT / max(w.shape[1], 1)

    def call(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        weights, biases = [w, self.second(w)], [b, None if b is None else b.cos()]
        return tfl.mlp(x, weights, biases, activation=self.activation, memory=self.memory)

    def eager(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        hidden = ACTS[self.activation](F.linear(x, w, b))
        return F.linear(hidden, self.second(w), None if b is None else b.cos())


LAYERS = {**{op.activation: op for op in operators.OPS}, "glu": Glu()}
BLOCKS = {
    "mlp relu": Mlp("relu"),
    "mlp gelu": Mlp("gelu_tanh"),
    "mlp low": Mlp("gelu_erf", "low"),
    "mlp relu low": Mlp("relu", "low"),
}
EVERY = {**LAYERS, **BLOCKS}
MIXED = ("relu", "gelu_tanh", "gelu_erf", "none")
STACKS = {"layers": MIXED, "blocks": tuple(BLOCKS)}


class Stack:
    """Layers whose widths all differ, so that no two tensors can be mistaken for each other."""

    def __init__(
        self,
        activations: Sequence[str] = MIXED,
        lead: Sequence[int] = (3,),
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        widths: Sequence[int] | None = None,
        bias: bool = True,
        seed: int = 0,
        fused: bool = True,
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.activations, self.fused = tuple(activations), fused
        widths = widths or range(4, 5 + len(self.activations))

        def leaf(*shape: int, scale: float = 1.0) -> Tensor:
            values = torch.randn(*shape, generator=gen, dtype=torch.float64) * scale
            return values.to(device=device, dtype=dtype).requires_grad_()

        self.x = leaf(*lead, widths[0])
        pairs = list(itertools.pairwise(widths))
        self.weights = [leaf(o, i, scale=1 / math.sqrt(max(i, 1))) for i, o in pairs]
        self.biases = [leaf(o) if bias else None for _, o in pairs]
        self.g = leaf(*lead, widths[len(self.activations)]).detach()

    def apply(self, name: str, *tensors: Tensor | None) -> Tensor:
        op = EVERY[name]
        return (op.call if self.fused else op.eager)(*tensors)

    def layer(self, k: int, x: Tensor) -> Tensor:
        return self.apply(self.activations[k], x, self.weights[k], self.biases[k])

    def outputs(self) -> list[Tensor]:
        """The outputs of every layer."""
        found = [self.x]
        for k in range(len(self.activations)):
            found.append(self.layer(k, found[-1]))
        return found[1:]

    def __call__(self) -> Tensor:
        return self.outputs()[-1]

    @property
    def leaves(self) -> list[Tensor]:
        pairs = zip(self.weights, self.biases)
        return [self.x, *(t for pair in pairs for t in pair if t is not None)]

    def backward(self, *tensors: Tensor, gradients: Sequence[Tensor] = (), **options) -> None:
        gradients = gradients or [self.g, *map(torch.ones_like, tensors[1:])]
        torch.autograd.backward(tensors, list(gradients), **options)

    def step(self, *tensors: Tensor, **options) -> list[Tensor | None]:
        """Gradients of all leaves, after a backward from its output or the given ones."""
        self.backward(*(tensors or [self()]), **options)
        return self.grads()

    def grads(self) -> list[Tensor | None]:
        return [None if t.grad is None else t.grad.clone() for t in self.leaves]


def network(form: str, device: torch.device | str = "cpu", fused: bool = True) -> nn.Sequential:
    """Separate layers, or blocks of several; or torch's own modules with the same parameters."""
    modules = {"gelu_tanh": partial(nn.GELU, "tanh"), "gelu_erf": nn.GELU, "relu": nn.ReLU}
    blocks = {
        "layers": [("relu", 4, 5, None), ("gelu_tanh", 5, 6, None), ("gelu_erf", 6, 7, None)],
        "blocks": [("gelu_tanh", 4, 5, 6), ("relu", 6, 7, 7), ("gelu_erf", 7, 5, 7)],
    }[form]
    classes = {
        "relu": tfl.FusedLinearReLU,
        "gelu_tanh": tfl.FusedLinearGELU,
        "gelu_erf": partial(tfl.FusedLinearGELU, approximate="none"),
    }
    made: list[nn.Module] = []
    for activation, i, hidden, o in blocks:
        if fused and o is None:
            made.append(classes[activation](i, hidden))
        elif fused:
            memory = "low" if activation == "gelu_erf" else "default"
            made.append(tfl.FusedMLP(i, hidden, o, activation=activation, memory=memory))
        else:
            last = [nn.Linear(hidden, o)] if o else []
            made.append(nn.Sequential(nn.Linear(i, hidden), modules[activation](), *last))
    made.append(tfl.FusedLinear(7, 3) if fused else nn.Linear(7, 3))
    model, gen = nn.Sequential(*made).to(torch.float64), torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, gen)
    return model.to(device)


def assert_equal_eager(
    scenario: Callable[[Stack], Sequence[Tensor | None]], **options
) -> tfl.explain:
    """Runs scenario(a new stack) on fused operators and on torch's own; what it returns, gradients
    and what hooks have seen, must be the same."""
    with tfl.explain() as none:
        want = scenario(Stack(fused=False, **options))
    assert not none.calls, none
    with tfl.explain() as report:
        got = scenario(Stack(**options))
    assert report.calls
    assert_same(got, want, f"{getattr(scenario, '__name__', '')}\n{report}\n")
    return report
