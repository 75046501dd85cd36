"""The operators of the random calls, each beside its plain form.

An operator is a row of OPERATORS. Its plain form goes through `step` for every product and its
activation, so that the same lines give eager's result, the one in fp64, the scale of rounding
errors, and how near a pre-activation is to ReLU's kink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

Step = Callable[..., Tensor]  # (product, x, weight, bias, activation) -> act(product(x, w, b))

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
}
SMOOTH = ("silu", "gelu_tanh", "gelu_erf")


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


# --- the operators -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """`ours` is called with (where, x, layer), `where` being the package or torch.ops.fused."""

    activations: tuple[str, ...]
    ours: Callable[..., Tensor]
    plain: Callable[[Step, Tensor, Layer], Tensor]


def _linear(step: Step, x: Tensor, layer: Layer) -> Tensor:
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


def _ours_gelu(where, x: Tensor, layer: Layer) -> Tensor:
    approximate = {"gelu_tanh": "tanh", "gelu_erf": "none"}[layer.activation]
    parameters = layer.weights[0], layer.biases[0]
    return where.linear_gelu(x, *parameters, approximate=approximate, memory=layer.memory)


def _ours_linear(where, x: Tensor, layer: Layer) -> Tensor:
    return where.linear(x, layer.weights[0], layer.biases[0])


def _ours_relu(where, x: Tensor, layer: Layer) -> Tensor:
    return where.linear_relu(x, layer.weights[0], layer.biases[0], memory=layer.memory)


def _ours_mlp(where, x: Tensor, layer: Layer) -> Tensor:
    return where.mlp(x, layer.weights, layer.biases, layer.activation, memory=layer.memory)


def _ours_silu(where, x: Tensor, layer: Layer) -> Tensor:
    return where.linear_silu(x, layer.weights[0], layer.biases[0], memory=layer.memory)


def _ours_glu(where, x: Tensor, layer: Layer) -> Tensor:
    weights, biases = ([*held, None][:2] for held in (layer.weights, layer.biases))
    options = {"activation": layer.activation, "memory": layer.memory}
    return where.linear_glu(x, *weights, *biases, **options)


def _ours_gated_mlp(where, x: Tensor, layer: Layer) -> Tensor:
    *weights, down = layer.weights
    *biases, down_bias = layer.biases
    up, up_bias = (None, None) if layer.is_stacked else (weights[1], biases[1])
    tensors = (weights[0], up, down, biases[0], up_bias, down_bias)
    return where.gated_mlp(x, *tensors, activation=layer.activation, memory=layer.memory)


def _ours_conv(where, x: Tensor, layer: Layer) -> Tensor:
    return where.conv2d_relu(x, layer.weights[0], layer.biases[0], *layer.conv)


OPERATORS = {
    "linear": Operator(("none",), _ours_linear, _linear),
    "linear_relu": Operator(("relu",), _ours_relu, _linear),
    "linear_gelu": Operator(("gelu_tanh", "gelu_erf"), _ours_gelu, _linear),
    "linear_silu": Operator(("silu",), _ours_silu, _linear),
    "mlp": Operator(("relu", *SMOOTH), _ours_mlp, _mlp),
    # without ReLU, whose kink would have to be kept away from two weights
    "linear_glu": Operator(SMOOTH, _ours_glu, _glu),
    "gated_mlp": Operator(SMOOTH, _ours_gated_mlp, _gated_mlp),
    "conv2d_relu": Operator(("relu",), _ours_conv, _conv),
}


GATED = ("linear_glu", "gated_mlp")
