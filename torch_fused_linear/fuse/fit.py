"""Which layers and activations may become one call, as they are now, and why others may not."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from . import plain
from .families import ACTIVATION_FUNCTIONS, ACTIVATION_LIBRARIES, CONV1D, REFUSALS, full_name
from .parallel import is_spread
from .plain import DTYPES, LAYERS, activation_kind, hooks_objection

KNOWN = (nn.ReLU, nn.GELU, nn.SiLU)


def is_linear(value: object) -> bool:
    """Whether it stands where a linear layer may stand, fit to be fused or not."""
    if not isinstance(value, nn.Module):
        return False
    if isinstance(value, nn.Linear) or full_name(type(value)) == CONV1D:
        return True
    # quantised and LoRA layers are not all children of nn.Linear, but they are named like it
    return type(value).__name__.endswith(("Linear", "Linear4bit", "Linear8bitLt"))


def is_layer(value: object) -> bool:
    """Whether it is of a kind that may be one call with the activation after it."""
    return is_linear(value) or isinstance(value, nn.Conv2d)


def is_activation(value: object) -> bool:
    if isinstance(value, nn.Module):
        return (
            isinstance(value, KNOWN) or type(value).__module__ in ACTIVATION_LIBRARIES
        ) and not isinstance(value, nn.MultiheadAttention)
    if any(value is function for function in ACTIVATION_FUNCTIONS):
        return True
    return callable(value) and activation_kind(value) is not None


def is_passed(value: object) -> bool:
    """Whether it is a dropout or nothing at all, which may stand between or after."""
    return value is F.dropout or (
        type(value) in (nn.Dropout, nn.Identity) and not hooks_objection(value)
    )


def layer_objection(layer: nn.Module, is_sharded: bool = False) -> str | None:
    """Why this linear layer, or convolution, must be called as it is, or None."""
    kind = type(layer)
    if "parametrizations" in layer._modules:
        return "has a parametrisation"
    plain.learn(layer)
    if kind not in LAYERS:
        expected = "nn.Conv2d" if isinstance(layer, nn.Conv2d) else "nn.Linear"
        return f"{kind.__name__} is not exactly {expected}"
    if reason := hooks_objection(layer):
        return reason
    weight = layer._parameters.get("weight")
    may_be_distributed = is_sharded or is_spread(layer)
    is_distributed = may_be_distributed and type(weight).__name__ == "DTensor"
    if type(weight) is not nn.Parameter and not is_distributed:
        return f"its weight is a {type(weight).__name__}, not a plain nn.Parameter"
    if weight.dtype not in DTYPES:
        return f"there are no fused kernels for {weight.dtype}"
    return None


def plain_kind(value: object, options: dict | None = None) -> str | None:
    """Which activation it is, unless it must be called as it is."""
    return None if activation_objection(value, options) else activation_kind(value, options)


def activation_objection(value: object, options: dict | None = None) -> str | None:
    """Why this activation must be called as it is, or None."""
    if activation_kind(value, options) is None:
        cls = type(value)
        is_module = isinstance(value, nn.Module)
        name = cls.__name__ if is_module else getattr(value, "__name__", repr(value))
        if isinstance(value, KNOWN) and cls not in KNOWN:
            return f"{name} is a subclass and may compute something else"
        return f"{name}: {REFUSALS.get(name, 'only ReLU, GELU (erf, tanh) and SiLU can be fused')}"
    if isinstance(value, nn.Module) and (reason := hooks_objection(value)):
        return f"the activation {reason}"
    return None
