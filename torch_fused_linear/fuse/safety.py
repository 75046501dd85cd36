"""Whether a module may be changed, and why not."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .families import ACTIVATION_LIBRARIES, ACTIVATIONS, CONV1D, REFUSALS, full_name
from .swap import FusedActivation, is_swapped

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

CALL_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def is_linear(value: object) -> bool:
    """Whether it stands where a linear layer may stand, fit to be fused or not."""
    if not isinstance(value, nn.Module):
        return False
    if isinstance(value, nn.Linear) or full_name(type(value)) == CONV1D:
        return True
    # quantised and LoRA layers are not all children of nn.Linear, but they are named like it
    return type(value).__name__.endswith(("Linear", "Linear4bit", "Linear8bitLt"))


def is_convolution(value: object) -> bool:
    return isinstance(value, nn.Conv2d)


def is_layer(value: object) -> bool:
    """Whether it is of a kind that may apply the activation after it."""
    return is_linear(value) or is_convolution(value)


def is_activation(value: object) -> bool:
    if isinstance(value, nn.Module):
        return (
            isinstance(value, (FusedActivation, nn.ReLU, nn.GELU))
            or type(value).__module__ in ACTIVATION_LIBRARIES
        ) and not isinstance(value, nn.MultiheadAttention)
    return callable(value)


def activation_kind(value: object) -> str | None:
    """``'relu'``, ``'gelu_tanh'``, ``'gelu_erf'``, or None where it is none of these exactly."""
    if type(value) is nn.GELU:
        return {"tanh": "gelu_tanh", "none": "gelu_erf"}.get(value.approximate)
    if isinstance(value, nn.Module):
        return ACTIVATIONS.get(full_name(type(value)))
    if value in (F.relu, torch.relu):
        return "relu"
    if value is F.gelu:
        return "gelu_erf"
    if isinstance(value, functools.partial) and value.func is F.gelu and not value.args:
        if value.keywords.keys() - {"approximate"}:
            return None
        return {"tanh": "gelu_tanh", "none": "gelu_erf"}.get(value.keywords.get("approximate"))
    return None


def hooks_objection(module: nn.Module, kinds=CALL_HOOKS) -> str | None:
    """Where somebody watches the module or has replaced its forward."""
    for kind in kinds:
        if getattr(module, kind):
            return f"has {kind.strip('_').replace('_', ' ')}"
    if "forward" in vars(module):
        return "has a forward of its own, set on the object"
    if module._compiled_call_impl is not None:
        return "was compiled"
    return None


def linear_objection(linear: nn.Module, is_shared: Callable[[nn.Module], bool]) -> str | None:
    """Why this linear layer, or convolution, must stay as it is, or None."""
    kind = type(linear)
    if is_swapped(linear):
        return "already fused"
    if "parametrizations" in linear._modules:
        return "has a parametrisation"
    if kind not in (nn.Linear, nn.Conv2d) and full_name(kind) != CONV1D:
        expected = "nn.Conv2d" if is_convolution(linear) else "nn.Linear"
        return f"{kind.__name__} is not exactly {expected}"
    if reason := hooks_objection(linear):
        return reason
    if is_shared(linear):
        return "is shared between places"
    weight = linear.weight
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}, not a plain nn.Parameter"
    if weight.dtype not in DTYPES:
        return f"there are no fused kernels for {weight.dtype}"
    return None


def activation_objection(value: object) -> str | None:
    """Why this activation must stay where it is, or None."""
    if activation_kind(value) is None:
        cls = type(value)
        name = (
            cls.__name__
            if isinstance(value, nn.Module)
            else getattr(value, "__name__", repr(value))
        )
        if isinstance(value, (nn.ReLU, nn.GELU)) and cls not in (nn.ReLU, nn.GELU):
            return f"{name} is a subclass and may compute something else"
        return f"{name}: {REFUSALS.get(name, 'only ReLU and GELU (erf, tanh) can be fused')}"
    if isinstance(value, nn.Module) and (
        reason := hooks_objection(value, CALL_HOOKS + STATE_HOOKS)
    ):
        return f"the activation {reason}"
    return None
