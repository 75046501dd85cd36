"""Stacks of separate fused layers, run plain and with hand-over: what the hand-over tests share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import operators
import torch
import torch.nn.functional as F
from numerics import assert_same
from torch import Tensor, nn

import torch_fused_linear as tfl

OPS = {op.activation: op for op in operators.OPS}


class Glu:
    """A gated layer with the parameters of any other: up's weight is made of gate's."""

    def call(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return torch.ops.fused.linear_glu(x, w, w.cos(), None, b)

    def eager(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.silu(F.linear(x, w)) * F.linear(x, w.cos(), b)


LAYERS = {**OPS, "glu": Glu()}
MIXED = ("relu", "gelu_tanh", "gelu_erf", "none")
HANDED = "handed over"
NOT_OURS = "the input is not a fused layer's output"


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
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.activations = tuple(activations)
        widths = widths or range(4, 5 + len(self.activations))

        def leaf(*shape: int, scale: float = 1.0) -> Tensor:
            values = torch.randn(*shape, generator=gen, dtype=torch.float64) * scale
            return values.to(device=device, dtype=dtype).requires_grad_()

        self.x = leaf(*lead, widths[0])
        pairs = list(itertools.pairwise(widths))
        self.weights = [leaf(o, i, scale=1 / math.sqrt(max(i, 1))) for i, o in pairs]
        self.biases = [leaf(o) if bias else None for _, o in pairs]
        self.g = leaf(*lead, widths[len(self.activations)]).detach()

    def layer(self, k: int, x: Tensor, fused: bool = True) -> Tensor:
        op = LAYERS[self.activations[k]]
        call = op.call if fused else op.eager
        return call(x, self.weights[k], self.biases[k])

    def outputs(self, fused: bool = True) -> list[Tensor]:
        """Of every layer."""
        found = [self.x]
        for k in range(len(self.activations)):
            found.append(self.layer(k, found[-1], fused))
        return found[1:]

    def __call__(self, fused: bool = True) -> Tensor:
        return self.outputs(fused)[-1]

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


def network(device: torch.device | str = "cpu") -> nn.Sequential:
    """Modules of which three of four are handed a gradient."""
    torch.manual_seed(3)
    return nn.Sequential(
        tfl.FusedLinearReLU(4, 5),
        tfl.FusedLinearGELU(5, 6),
        tfl.FusedLinearGELU(6, 7, approximate="none"),
        tfl.FusedLinear(7, 3),
    ).to(device, torch.float64)


def reasons(report: tfl.explain) -> list[str]:
    """Why the backwards that did not hand over did not."""
    return [c.handover.removeprefix("plain: ") for c in report.calls if c.handover != HANDED]


def assert_equal_plain(
    scenario: Callable[[Stack], Sequence[Tensor | None]],
    handed: int | None,
    reason: str = "",
    **options,
) -> tfl.explain:
    """Runs scenario(a new stack) plain and with hand-over; what it returns, gradients and what
    hooks have seen, must be the same, and the fast path must have been taken just so often."""
    with tfl.handover(False), tfl.explain() as off:
        want = scenario(Stack(**options))
    assert off.handed_over == 0, off
    with tfl.handover(True), tfl.explain() as report:
        got = scenario(Stack(**options))
    assert_same(got, want, f"{getattr(scenario, '__name__', '')}\n{report}\n")
    assert handed is None or report.handed_over == handed, report
    assert any(reason in text for text in reasons(report)), report
    return report
