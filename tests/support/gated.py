"""Gated layers and blocks beside their definition in torch: what their tests share."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from helpers import GELU_ERF, GELU_TANH, RELU, SILU
from torch import Tensor

fused = torch.ops.fused
ACTS = {op.activation: op.act for op in (SILU, GELU_TANH, GELU_ERF, RELU)}
activation_param = pytest.mark.parametrize("activation", ACTS)

# How gate and up are given. "halves" are two views of one weight, gate first.
FORMS = ("apart", "stacked", "halves", "up first")
form_param = pytest.mark.parametrize("form", FORMS)


class Gated:
    """The arguments of one gated layer, or with `out` of a block, all widths different."""

    def __init__(
        self,
        form: str = "apart",
        lead: tuple[int, ...] = (5,),
        sizes: tuple[int, int, int | None] = (6, 8, None),
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        bias: bool = True,
        activation: str = "silu",
        seed: int = 0,
        memory: str = "default",
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        width, hidden, out = sizes

        def leaf(*shape: int, scale: float = 1.0) -> Tensor:
            values = torch.randn(*shape, generator=gen, dtype=torch.float64) * scale
            return values.to(device=device, dtype=dtype).requires_grad_()

        self.form, self.activation, self.memory = form, activation, memory
        self.x = leaf(*lead, width)
        small = 1 / math.sqrt(max(width, 1))
        rows = [hidden, hidden] if form == "apart" else [2 * hidden]
        self.weights = [leaf(n, width, scale=small) for n in rows]
        self.biases = [leaf(n) for n in rows] if bias else []
        self.down = None if out is None else leaf(out, hidden, scale=1 / math.sqrt(max(hidden, 1)))
        self.down_bias = leaf(out) if bias and out is not None else None
        self.g = leaf(*lead, hidden if out is None else out).detach()

    @property
    def leaves(self) -> list[Tensor]:
        ends = [t for t in (self.down, self.down_bias) if t is not None]
        return [self.x, *self.weights, *self.biases, *ends]

    @property
    def options(self) -> dict[str, str]:
        return {"activation": self.activation, "memory": self.memory}

    def pair(self, tensors: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """(gate, up) of the weights or of the biases, as the operators are given them."""
        if not tensors:
            return None, None
        if self.form == "apart":
            return tensors[0], tensors[1]
        if self.form == "stacked":
            return tensors[0], None
        halves = tensors[0].chunk(2)
        return halves if self.form == "halves" else halves[::-1]

    def call(self, *leaves: Tensor) -> Tensor:
        """By our operator, of other leaves if there are any."""
        own = self.of(leaves)
        (gate, up), (gate_bias, up_bias) = own.pair(own.weights), own.pair(own.biases)
        if own.down is None:
            return fused.linear_glu(own.x, gate, up, gate_bias, up_bias, **own.options)
        ends = own.down, gate_bias, up_bias, own.down_bias
        return fused.gated_mlp(own.x, gate, up, *ends, **own.options)

    def apart(self, *leaves: Tensor) -> Tensor:
        """The same as two layers, of which the second hands its gradient over."""
        own = copy.copy(self.of(leaves))
        down, bias, own.down = own.down, own.down_bias, None
        return fused.linear(own.call(), down, bias)

    def eager(self, *leaves: Tensor) -> Tensor:
        own = self.of(leaves)
        (gate, up), (gate_bias, up_bias) = own.pair(own.weights), own.pair(own.biases)
        first = F.linear(own.x, gate, gate_bias)
        first, second = first.chunk(2, -1) if up is None else (first, F.linear(own.x, up, up_bias))
        hidden = ACTS[own.activation](first) * second
        return hidden if own.down is None else F.linear(hidden, own.down, own.down_bias)

    def grads(self, y: Tensor, **options) -> list[Tensor]:
        wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
        return list(torch.autograd.grad(y, wanted, self.g, **options))

    def of(self, leaves: Sequence[Tensor]) -> Gated:
        """The same with these leaves."""
        if not leaves:
            return self
        other, queue = copy.copy(self), iter(leaves)
        other.x = next(queue)
        other.weights = [next(queue) for _ in self.weights]
        other.biases = [next(queue) for _ in self.biases]
        other.down = None if self.down is None else next(queue)
        other.down_bias = None if self.down_bias is None else next(queue)
        return other

    def map(self, change: Callable[[Tensor], Tensor]) -> Gated:
        """The same with every leaf and the gradient changed."""
        other = self.of([change(t.detach()).requires_grad_(t.requires_grad) for t in self.leaves])
        other.g = change(self.g)
        return other
