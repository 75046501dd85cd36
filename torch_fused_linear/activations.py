"""The activations, each under every name that it has: one table for layers, graphs and reports."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


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

    def module(self) -> nn.Module:
        """The plain layer that computes it."""
        if self.approximate is None:
            return nn.ReLU()
        return nn.GELU(approximate=self.approximate)


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("relu", "linear_relu", "ReLU"),
        Activation("gelu_tanh", "linear_gelu", "GELU (tanh)", approximate="tanh"),
        Activation("gelu_erf", "linear_gelu", "GELU (erf)", approximate="none"),
    )
}
NAMES = tuple(ACTIVATIONS)
_BY_APPROXIMATE = {a.approximate: a.name for a in ACTIVATIONS.values() if a.approximate}


def name_of_gelu(approximate: object) -> str | None:
    """The operators' name of ``F.gelu(..., approximate=approximate)``."""
    return _BY_APPROXIMATE.get(approximate) if isinstance(approximate, str) else None


def name_of_module(module: nn.Module) -> str | None:
    """The operators' name of what torch's own ``nn.ReLU`` or ``nn.GELU`` computes."""
    if type(module) is nn.ReLU:
        return "relu"
    return name_of_gelu(module.approximate) if type(module) is nn.GELU else None
