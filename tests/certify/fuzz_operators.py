"""The operators of the random calls, each beside its plain form.

An operator is a row of OPERATORS. Its plain form goes through `step` for every product and its
activation, so that the same lines give eager's result, the one in fp64, the scale of rounding
errors, and how near a pre-activation is to ReLU's kink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from torch_fused_linear.activations import ACTIVATIONS as OF_OPERATORS

Step = Callable[..., Tensor]  # (product, x, weight, bias, activation) -> act(product(x, w, b))

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda z: z, **OF_OPERATORS}
SMOOTH = ("silu", "gelu_tanh", "gelu_erf")
GATED = ("linear_glu", "gated_mlp")


@dataclass
class Layer:
    """One call of an operator: its parameters, and what else is said."""

    operator: str
    weights: list[Tensor]
    biases: list[Tensor | None]
    activation: str
    memory: str = "default"
    conv: tuple = ()  # stride, padding, dilation, groups
    is_stacked: bool = False  # gate and up in one weight

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (*self.weights, *self.biases) if t is not None]


def weight_shapes(operator: str, sizes: Sequence[int], is_stacked: bool) -> list[tuple[int, int]]:
    """Of the weights of a call between these sizes; of gated layers the second is hidden."""
    pairs = [(out, inner) for inner, out in pairwise(sizes)]
    if operator in GATED:
        hidden, inner = pairs.pop(0)
        pairs = [(2 * hidden, inner), *pairs] if is_stacked else [(hidden, inner)] * 2 + pairs
    return pairs


def ours(where, x: Tensor, layer: Layer) -> Tensor:
    """The call itself, `where` being the package or torch.ops.fused."""
    options = {} if layer.operator in ("linear", "conv2d_relu") else {"memory": layer.memory}
    weights, biases = layer.weights, layer.biases
    given: Sequence = (weights[0], biases[0], *layer.conv)
    if layer.operator == "linear_gelu":
        options |= OF_OPERATORS[layer.activation].options
    elif layer.operator == "mlp":
        given = (weights, biases, layer.activation)
    elif layer.operator in GATED:
        options["activation"] = layer.activation
        gate, gate_bias = weights[0], biases[0]
        up, up_bias = (None, None) if layer.is_stacked else (weights[1], biases[1])
        given = (gate, up, gate_bias, up_bias)
        if layer.operator == "gated_mlp":
            given = (gate, up, weights[-1], gate_bias, up_bias, biases[-1])
    return getattr(where, layer.operator)(x, *given, **options)


# --- plain forms ---------------------------------------------------------------------------------


def linear(step: Step, x: Tensor, layer: Layer) -> Tensor:
    return step(F.linear, x, layer.weights[0], layer.biases[0], layer.activation)


def _mlp(step: Step, x: Tensor, layer: Layer) -> Tensor:
    last = len(layer.weights) - 1
    for k, (weight, bias) in enumerate(zip(layer.weights, layer.biases)):
        x = step(F.linear, x, weight, bias, "none" if k == last else layer.activation)
    return x


def _glu(step: Step, x: Tensor, layer: Layer) -> Tensor:
    """Of two weights, or of the halves of one product; the layer after it has the last."""
    if layer.is_stacked:
        both = step(F.linear, x, layer.weights[0], layer.biases[0], "none")
        half, linear = both.chunk(2, -1)
        if keep := getattr(step, "keep_halves", None):
            keep(both, half, linear)
        gated = step(_unchanged, half, half.new_ones(1), None, layer.activation)
    else:
        (gate, up), (gate_bias, up_bias) = layer.weights[:2], layer.biases[:2]
        gated = step(F.linear, x, gate, gate_bias, layer.activation)
        linear = step(F.linear, x, up, up_bias, "none")
    h = gated * linear
    if keep := getattr(step, "keep_product", None):
        keep(h, gated, linear)
    return h


def _unchanged(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Instead of a product, where only the activation is left to do."""
    return x


def _gated_mlp(step: Step, x: Tensor, layer: Layer) -> Tensor:
    return step(F.linear, _glu(step, x, layer), layer.weights[-1], layer.biases[-1], "none")


def _conv(step: Step, x: Tensor, layer: Layer) -> Tensor:
    def product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.conv2d(x, w, b, *layer.conv)

    return step(product, x, layer.weights[0], layer.biases[0], "relu")


@dataclass(frozen=True)
class Operator:
    activations: tuple[str, ...]
    plain: Callable[[Step, Tensor, Layer], Tensor]
    ours: Callable[..., Tensor] = ours


OPERATORS = {
    "linear": Operator(("none",), linear),
    "linear_relu": Operator(("relu",), linear),
    "linear_gelu": Operator(("gelu_tanh", "gelu_erf"), linear),
    "linear_silu": Operator(("silu",), linear),
    "linear_relu2": Operator(("relu2",), linear),
    "mlp": Operator(("relu", "relu2", *SMOOTH), _mlp),
    # without ReLU, whose kink would have to be kept away from two weights
    "linear_glu": Operator(("relu2", *SMOOTH), _glu),
    "gated_mlp": Operator(("relu2", *SMOOTH), _gated_mlp),
    "conv2d_relu": Operator(("relu",), _conv),
}
