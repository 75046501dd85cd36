"""The activations, each under every name that it has: one table for layers, graphs and reports."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


class SquaredReLU(nn.Module):
    r"""Applies :math:`y = \max(x, 0)^2`, of which torch has no layer. See
    `Primer <https://arxiv.org/abs/2109.08668>`_."""

    def forward(self, x: Tensor) -> Tensor:
        return squared_relu(x)


@dataclass(frozen=True)
class Activation:
    """An activation that the operators know."""

    name: str  # of the operators' ``activation`` argument
    operator: str  # applies it after a linear layer
    label: str  # in reports and pictures
    function: Callable[..., Tensor]
    layer: type[nn.Module]  # the plain one
    approximate: str | None = None  # of ``F.gelu`` and ``nn.GELU``; None for what is no GELU

    @property
    def label_of_operator(self) -> str:
        """The operator's name, with the form where it has several."""
        form = self.name.partition("_")[2]
        return f"{self.operator} ({form})" if form else self.operator

    @property
    def options(self) -> dict[str, str]:
        """Returns the arguments that function, layer and operator take besides the tensors."""
        return {} if self.approximate is None else {"approximate": self.approximate}

    def module(self) -> nn.Module:
        return self.layer(**self.options)

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x, **self.options)


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("relu", "linear_relu", "ReLU", F.relu, nn.ReLU),
        Activation("gelu_tanh", "linear_gelu", "GELU (tanh)", F.gelu, nn.GELU, "tanh"),
        Activation("gelu_erf", "linear_gelu", "GELU (erf)", F.gelu, nn.GELU, "none"),
        Activation("silu", "linear_silu", "SiLU", F.silu, nn.SiLU),
        Activation("relu2", "linear_relu2", "ReLU²", squared_relu, SquaredReLU),
    )
}
# The number by which a private operator takes one: csrc/fused_activation.h has them in this order.
NUMBERS = {name: number for number, name in enumerate(("none", *ACTIVATIONS))}
# The operators of a linear layer with one of these activations.
OPERATORS = tuple(dict.fromkeys(a.operator for a in ACTIVATIONS.values()))


def of_operator(operator: str, approximate: str = "tanh") -> Activation | None:
    """The activation that a linear operator applies; ``None`` of ``linear``, which has none.
    ``approximate`` is of GELU alone."""
    for activation in ACTIVATIONS.values():
        if activation.operator == operator and activation.approximate in (None, approximate):
            return activation
    return None


def name_of_gelu(approximate: object) -> str | None:
    """The operators' name of ``F.gelu(..., approximate=approximate)``."""
    return named_gelu(approximate) if isinstance(approximate, str) else None


def named_gelu(approximate: str) -> str | None:
    known = {a.approximate: a.name for a in ACTIVATIONS.values() if a.approximate}
    return known.get(approximate)


def name_of_module(module: nn.Module) -> str | None:
    """The operators' name of what ``nn.ReLU``, ``nn.SiLU``, ``nn.GELU`` or ours computes."""
    forms = None, module.__dict__.get("approximate")
    for name, activation in ACTIVATIONS.items():
        if type(module) is activation.layer and activation.approximate in forms:
            return name
    return None
