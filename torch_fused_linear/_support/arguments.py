"""The values that arguments of functions and layers may have, and the errors for others."""

from typing import Literal, get_args

from torch import nn

Activation = Literal["relu", "gelu_tanh", "gelu_erf", "silu", "relu2"]
Approximate = Literal["tanh", "none"]
Memory = Literal["default", "low"]
Precision = Literal["default", "float8"]

_TYPES = {"activation": Activation, "approximate": Approximate}
_TYPES |= {"memory": Memory, "precision": Precision}
_KNOWN = {name: get_args(values) for name, values in _TYPES.items()}


def check(who: str, **arguments: object) -> None:
    """Raises ``ValueError``, naming the caller, if an argument has an unknown value."""
    for name, value in arguments.items():
        if value not in _KNOWN[name]:
            *rest, last = map(repr, _KNOWN[name])
            text = f"{who}: {name} must be {', '.join(rest)} or {last}, got {value!r}"
            if value == "gelu":
                text += ": GELU is 'gelu_tanh' or, as nn.GELU() is, 'gelu_erf'"
            raise ValueError(text)


def check_precision(who: str, precision: str, memory: str) -> None:
    """Raises ``ValueError``, of who was called, if the two do not go together."""
    check(who, precision=precision)
    if precision == "float8" and memory != "default":
        raise ValueError(
            f"{who}: memory must be 'default' with precision='float8', which keeps FP8 copies, "
            f"got {memory!r}"
        )


def check_module(who: str, module: object) -> None:
    """Raises ``TypeError``, naming the caller, for anything but a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{who}: expected an nn.Module, got {type(module).__name__}")
