"""The activations, each under every name that it has: one table for layers, graphs and reports."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


class SquaredReLU(nn.Module):
    r"""Applies :math:`y = \max(x, 0)^2`, of which torch has no layer. See
    `Primer <https://arxiv.org/abs/2109.08668>`_."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


_MODULES = {"relu": nn.ReLU, "silu": nn.SiLU, "relu2": SquaredReLU}


@dataclass(frozen=True)
class Activation:
    """An activation that the operators know.

    Attributes:
        name: of the operators' ``activation`` argument.
        operator: the one that applies it after a linear layer.
        label: in reports and pictures.
        approximate: the argument of ``F.gelu`` and ``nn.GELU``; ``None`` for what is no GELU.
    """

    name: str
    operator: str
    label: str
    approximate: str | None = None

    @property
    def label_of_operator(self) -> str:
        """The operator's name, with the form where it has several."""
        form = self.name.partition("_")[2]
        return f"{self.operator} ({form})" if form else self.operator

    def module(self) -> nn.Module:
        """The plain layer that computes it."""
        if self.approximate is None:
            return _MODULES[self.name]()
        return nn.GELU(approximate=self.approximate)

    def __call__(self, x: Tensor) -> Tensor:
        """What torch's own function gives."""
        return self.module()(x)


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("relu", "linear_relu", "ReLU"),
        Activation("gelu_tanh", "linear_gelu", "GELU (tanh)", approximate="tanh"),
        Activation("gelu_erf", "linear_gelu", "GELU (erf)", approximate="none"),
        Activation("silu", "linear_silu", "SiLU"),
        Activation("relu2", "linear_relu2", "ReLU²"),
    )
}
NAMES = tuple(ACTIVATIONS)
# Of a linear layer with one of them.
OPERATORS = tuple(dict.fromkeys(a.operator for a in ACTIVATIONS.values()))
CHOICE = ", ".join(map(repr, NAMES[:-1])) + f" or {NAMES[-1]!r}"
_BY_APPROXIMATE = {a.approximate: a.name for a in ACTIVATIONS.values() if a.approximate}


def check_activation(who: str, activation: object) -> None:
    """Raises ``ValueError``, which names who was called, for what is none of the names."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{who}: activation must be {CHOICE}, got {activation!r}")


def name_of_gelu(approximate: object) -> str | None:
    """The operators' name of ``F.gelu(..., approximate=approximate)``."""
    return _BY_APPROXIMATE.get(approximate) if isinstance(approximate, str) else None


def name_of_module(module: nn.Module) -> str | None:
    """The operators' name of what ``nn.ReLU``, ``nn.SiLU``, ``nn.GELU`` or ours computes."""
    if type(module) is nn.GELU:
        return name_of_gelu(module.approximate)
    return next((name for name, cls in _MODULES.items() if type(module) is cls), None)
