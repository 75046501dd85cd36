"""Decides which modules are plain, and why others are not: a layer that only applies its
parameters, an activation of ours.

At run time csrc/python/plain.cpp decides the simple cases in C; tests hold both to one table.
"""

import ast
import functools
import operator
from collections.abc import Callable
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling, is_exporting

from .._support.torch_internals import (
    GLOBAL_HOOKS,  # noqa: F401  (C reads it here)
    HOOKS,
    added_behaviour,
    as_made,
    function_modes,
    has_any_global_hook,
    parallel_plan,
)
from .._torch.subclasses import PLAIN, is_foreign
from ..activations import name_of_gelu
from . import families, float8
from .families import ACTIVATION_LIBRARIES, ACTIVATIONS, CONV1D, full_name
from .float8 import TENSORWISE
from .runs import METHODS
from .source import called_by

# The attribute of a layer that fuse_ has marked, a dictionary of options: with "low" the layer
# keeps less for the backward, with "alone" it runs as an operator where it is called alone too, and
# in a run only if "default" or "low" is there as well; none is "default". TorchScript ignores it,
# so a marked layer has the type of an unmarked one. Dynamo knows whether a dictionary has changed,
# so it seldom looks at the layer.
MARK = "_torch_fused_linear"
MARKS: dict[str, dict] = {"default": {}, "low": {"low": {}}, "alone": {"alone": {}}}  # to be copied
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def method_pow(h, exponent):
    return h.pow(exponent)


def applied(function, more, named, h):
    """Calls the function with more than the tensor, as ``partial(applied, function, ...)``."""
    return function(h, *more, **named)


def called_in(node: ast.Call | ast.BinOp) -> Callable:
    """Returns the function that computes ``h.relu()``, ``h.pow(2)`` or ``h ** 2``."""
    return operator.pow if isinstance(node, ast.BinOp) else METHODS.get(node.func.attr, method_pow)


# Functions that square: what they are given beside the tensor.
SQUARES = {torch.square: (), METHODS["square"]: ()}
SQUARES |= dict.fromkeys((torch.pow, operator.pow, method_pow), (2,))
# Functions that are activations: which, and the option that they may be given.
FUNCTIONS = (
    (F.relu, "relu", "inplace"),
    (F.gelu, "gelu", "approximate"),
    (F.silu, "silu", "inplace"),
    *((f, "relu", "") for f in (torch.relu, torch.relu_, METHODS["relu"], METHODS["relu_"])),
)
RELU, GELU, SILU, LINEAR = (as_made(F, name) for name in ("relu", "gelu", "silu", "linear"))
# The forward of every class whose calls are known; one that was exchanged makes it unknown.
LAYERS = {cls: as_made(cls, "forward") for cls in (nn.Linear, nn.Conv2d)}
FLOAT8_LAYERS: set[type] = set()  # those of LAYERS that run in FP8, which C leaves to Python
KNOWN = (nn.ReLU, nn.GELU, nn.SiLU)
MODULES = {cls: (cls.__name__.lower(), as_made(cls, "forward")) for cls in KNOWN}
PASSED = {cls: as_made(cls, "forward") for cls in (nn.Dropout, nn.Identity)}
CALL, CALL_IMPL = (as_made(nn.Module, name) for name in ("__call__", "_call_impl"))
CALLED = {
    Tensor: "relu relu_ square pow __pow__ chunk __mul__",
    torch: "relu relu_ chunk",
    F: "linear relu gelu silu conv2d dropout",
    nn.Conv2d: "_conv_forward",
}
UNTOUCHED = tuple(  # None where there was none: methods of torch's own tensors are their base's
    (at, name, as_made(at, name)) for at, names in CALLED.items() for name in names.split()
)


def mark(layer: nn.Module, option: str) -> None:
    """Adds an option to a layer's mark: ``"default"``, which changes no ``"low"``, ``"low"`` or
    ``"alone"``."""
    before = vars(layer).get(MARK)
    names = {"default"} if before == {} else {*(before or ())}
    if option == "default" and "low" in names:
        return
    names = (names - {"default"} if option == "low" else names) | {option}
    vars(layer)[MARK] = {} if names == {"default"} else {name: {} for name in sorted(names)}


def learn(value: object) -> None:
    """Makes known the class of a layer or an activation of another library."""
    cls = type(value)
    kind = ACTIVATIONS.get(full_name(cls))
    is_float8 = float8.is_float8(value) and float8.is_known(value)
    if kind is None and full_name(cls) != CONV1D and not is_float8:
        return
    forward = as_made(next(c for c in cls.__mro__ if "forward" in vars(c)), "forward")
    known, what = (LAYERS, forward) if kind is None else (MODULES, (kind, forward))
    known.setdefault(cls, what)
    if is_float8:
        FLOAT8_LAYERS.add(cls)


def kind_of_class(cls: type) -> str | None:
    """Returns what a call of such a module is: ``"layer"``, ``"float8"``, an activation
    (``"gelu"`` of either form), ``"dropout"`` or ``"identity"``; None where it is unknown, or
    somebody has put another function into the class, or into torch."""
    if cls in LAYERS:
        kind, forward = "float8" if cls in FLOAT8_LAYERS else "layer", LAYERS[cls]
    elif cls in PASSED:
        kind, forward = cls.__name__.lower(), PASSED[cls]
    else:
        kind, forward = MODULES.get(cls, (None, None))
    call = nn.Module.__call__ if is_exporting() else CALL  # wrapped for a while
    known = kind and cls.forward is forward and cls.__call__ is call and cls._call_impl is CALL_IMPL
    is_untouched = known and all(
        getattr(owner, name) is (value or getattr(torch._C.TensorBase, name))
        for owner, name, value in UNTOUCHED
    )
    return kind if is_untouched else None


class Rules:
    """The questions that decide a run. They are methods, because Dynamo tests before each call of
    compiled code that a module still has the functions which were traced, and tests no methods.
    """

    def mark_of(self, layer: object) -> dict | None:
        """Returns the options of a marked layer, else None."""
        if not isinstance(layer, nn.Module):
            return None
        # Dynamo guards an attribute that is looked up, but no entry of __dict__. The one that is
        # missing costs most, and what is no layer has none.
        is_traced = is_dynamo_compiling()
        if is_traced and kind_of_class(type(layer)) not in ("layer", "float8"):
            return None
        return getattr(layer, MARK, None) if is_traced else layer.__dict__.get(MARK)

    def memory_of(self, layer: object) -> str | None:
        """Returns ``"default"`` or ``"low"`` for a layer that may be part of a run, else None."""
        mark = self.mark_of(layer)
        if not mark:
            return None if mark is None else "default"
        if "low" in mark:
            return "low"
        return "default" if "default" in mark else None

    def runs_alone(self, layer: object) -> bool:
        """Returns whether it is marked to run as an operator where it is called alone."""
        return "alone" in (self.mark_of(layer) or ())

    def is_float8(self, layer: object) -> bool:
        """Returns whether it is a layer in FP8."""
        return kind_of_class(type(layer)) == "float8"

    def is_spread(self, layer: nn.Module) -> bool:
        """Returns whether its hooks are only ``ColwiseParallel``'s or ``RowwiseParallel``'s."""
        is_linear = not is_dynamo_compiling() and type(layer) is nn.Linear
        return is_linear and parallel_plan(layer) is not None

    def objection(self, module: nn.Module) -> str | None:
        """Returns why a call of the module is more than its class's forward, or None."""
        if self.is_spread(module):
            return added_behaviour(module, HOOKS[2:])
        return added_behaviour(module)

    def is_watched(self, module: nn.Module) -> bool:
        return bool(self.objection(module) or has_any_global_hook())

    def fits(self, layer: nn.Module, input: object, weight: Tensor, bias: Tensor | None) -> bool:
        """False where torch's own function would raise an error, which then does."""
        if type(weight) not in PLAIN:  # a DTensor, between the hooks that make one of the input
            return not is_foreign(input)
        if type(input) not in PLAIN or input.is_nested:
            return False
        if not self.agree(layer, input, weight, bias):
            return False
        if type(layer) is nn.Conv2d:
            is_image = weight.dim() == 4 and input.dim() in (3, 4)
            return is_image and input.shape[-3] == weight.shape[1] * layer.groups
        return weight.dim() == 2 and input.dim() >= 1 and input.shape[-1] == weight.shape[1]

    def has_known_geometry(self, layer: nn.Conv2d) -> bool:
        """Returns whether our layer reads it as torch's does; users may set anything later."""
        is_word = layer.padding == "valid" or (layer.padding == "same" and layer.stride == (1, 1))
        given = layer.stride, layer.dilation, 0 if is_word else layer.padding
        pairs = [g if type(g) is tuple else (g, g) for g in given]
        return all(len(pair) == 2 and all(type(n) is int for n in pair) for pair in pairs)

    def agree(self, layer: nn.Module, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Returns whether they are on one device, and of one dtype unless the layer, or autocast,
        casts them."""
        if self.is_float8(layer):
            return TENSORWISE.agree(input, weight, bias)
        others = (input,) if bias is None else (input, bias)
        is_one = all(t.dtype == weight.dtype for t in others)
        kind = weight.device.type  # of which autocast may know nothing
        is_one = is_one or (kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind))
        return is_one and all(t.device == weight.device for t in others)

    def parameters(self, layer: nn.Module) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of a layer that does nothing but apply them; None of any other."""
        held, kind = layer._parameters, kind_of_class(type(layer))
        if kind not in ("layer", "float8") or self.is_watched(layer) or F.linear is not LINEAR:
            return None
        if "weight" not in held or "bias" not in held:  # somebody made a buffer of it
            return None
        weight, bias = held["weight"], held["bias"]
        tensors = (weight,) if bias is None else (weight, bias)
        if self.is_spread(layer):
            is_known = not any(t is None or type(t) in PLAIN or is_foreign(t) for t in tensors)
        else:
            is_known = all(type(t) in PLAIN for t in tensors)
        # The modes of others want to see torch's calls.
        modes = [] if is_dynamo_compiling() else function_modes()
        if not is_known or not all(type(mode).__module__.startswith("torch.") for mode in modes):
            return None
        if kind == "float8":
            return None if TENSORWISE.objection(layer, weight) else (weight, bias)
        # another library's layer has its weight transposed; the operators take any strides
        is_torchs_own = type(layer) is nn.Linear or type(layer) is nn.Conv2d
        return (weight if is_torchs_own else weight.t()), bias

    def activation_kind(self, function: object, options: dict | None = None) -> str | None:
        """The operators' name of a module or function with these keyword arguments beside the
        tensor, or None where it is no activation of ours exactly."""
        if isinstance(function, nn.Module):
            return None if options else self._kind_of_module(function)
        for known, kind, option in FUNCTIONS:
            if function is known:
                if options and options.keys() != {option}:
                    return None
                return name_of_gelu((options or {}).get(option, "none")) if kind == "gelu" else kind
        if options:
            return None
        if type(function) is functools.partial:
            known = any(function.func is f for f, _, option in FUNCTIONS if option)
            is_bare = known and not function.args
            return self.activation_kind(function.func, function.keywords) if is_bare else None
        if type(function) is not FunctionType:
            return None
        return self.activation_kind(*called_by(function))

    def _kind_of_module(self, module: nn.Module) -> str | None:
        if not is_dynamo_compiling():
            learn(module)
        kind = kind_of_class(type(module))
        if kind in (None, "layer", "float8", "dropout", "identity"):
            return None
        held = module.__dict__.get("act")  # of transformers' classes, and may be exchanged
        if held is not None and getattr(held, "__self__", None) is not module:
            return kind if self.activation_kind(held) == kind else None
        # Dynamo guards those of torch's functions that are named here.
        if kind == "gelu":
            return name_of_gelu(module.approximate) if F.gelu is GELU else None
        if kind == "relu":
            return kind if F.relu is RELU else None
        if kind == "silu":
            return kind if F.silu is SILU else None
        return kind

    def plain_kind(self, function: object, options: dict | None = None) -> str | None:
        """Returns activation_kind, or None if something watches the activation or autocast squares
        in fp32.
        """
        if isinstance(function, nn.Module) and self.is_watched(function):
            return None
        kind = self.activation_kind(function, options)
        return None if kind == "relu2" and torch.is_autocast_enabled("cuda") else kind

    def is_square(self, function: object, more: tuple = ()) -> bool:
        """Returns whether a function with these further arguments returns the tensor's square."""
        known = (given for square, given in SQUARES.items() if function is square)
        return more == next(known, None) and all(type(value) is int for value in more)

    def dropped_share(self, function: object, args: tuple, kwargs: dict) -> float | None:
        """Returns the share of its input that it drops now, or None for other functions."""
        if isinstance(function, nn.Module):
            kind = kind_of_class(type(function))
            if kind not in ("dropout", "identity") or self.is_watched(function):
                return None
            if kind == "identity":
                return 0
            p, training, inplace = function.p, function.training, function.inplace
        elif function is F.dropout:
            p, training, inplace = self._dropout_arguments(*args, **kwargs)
        else:
            return None
        # in place torch draws other numbers, and the backward needs what the operator returned
        if type(p) not in (int, float) or not 0 <= p <= 1 or (inplace and p and training):
            return None
        return p if training else 0

    def _dropout_arguments(self, p=0.5, training=True, inplace=False):
        return p, training, inplace


RULES = Rules()


# --- before anything runs -----------------------------------------------------------------------


def is_linear(value: object) -> bool:
    """Returns whether it is in the place of a linear layer, fit to be fused or not."""
    if not isinstance(value, nn.Module):
        return False
    if isinstance(value, nn.Linear) or full_name(type(value)) == CONV1D:
        return True
    # quantised and LoRA layers are not all children of nn.Linear, but they are named like it
    return type(value).__name__.endswith(("Linear", "Linear4bit", "Linear8bitLt"))


def is_layer(value: object) -> bool:
    """Returns whether its kind may be one call with the activation after it."""
    return is_linear(value) or isinstance(value, nn.Conv2d)


def is_activation(value: object) -> bool:
    if isinstance(value, nn.Module):
        is_known = isinstance(value, KNOWN) or type(value).__module__ in ACTIVATION_LIBRARIES
        return is_known and not isinstance(value, nn.MultiheadAttention)
    if any(value is function for function in families.ACTIVATION_FUNCTIONS):
        return True
    return callable(value) and RULES.activation_kind(value) is not None


def is_passed(value: object) -> bool:
    """Returns whether it is a dropout or does nothing, so that it may stand between or after."""
    return value is F.dropout or (type(value) in PASSED and not RULES.objection(value))


def layer_objection(layer: nn.Module, is_sharded: bool = False) -> str | None:
    """Why this linear layer, or convolution, must be called as it is, or None."""
    kind = type(layer)
    if reason := RULES.objection(layer):
        return reason
    learn(layer)
    if kind not in LAYERS:
        if float8.is_float8(layer):
            return "this release of torchao has other options, which are not known"
        expected = "nn.Conv2d" if isinstance(layer, nn.Conv2d) else "nn.Linear"
        return f"{kind.__name__} is not exactly {expected}"
    weight = layer._parameters.get("weight")
    is_distributed = (is_sharded or RULES.is_spread(layer)) and type(weight).__name__ == "DTensor"
    if type(weight) is not nn.Parameter and not is_distributed:
        return f"its weight is a {type(weight).__name__}, not a plain nn.Parameter"
    is_float8 = float8.is_float8(layer)
    if weight.dtype not in (float8.DTYPES if is_float8 else DTYPES):
        return f"there are no fused kernels for {weight.dtype}"
    return TENSORWISE.objection(layer, weight) if is_float8 else None


def activation_objection(value: object, options: dict | None = None) -> str | None:
    """Why this activation must be called as it is, or None."""
    if RULES.activation_kind(value, options) is None:
        cls = type(value)
        name = getattr(cls if isinstance(value, nn.Module) else value, "__name__", repr(value))
        if isinstance(value, KNOWN) and cls not in KNOWN:
            return f"{name} is a subclass and may compute something else"
        expected = "only ReLU, squared ReLU, GELU (erf, tanh) and SiLU can be fused"
        return f"{name}: {families.REFUSALS.get(name, expected)}"
    if isinstance(value, nn.Module) and (reason := RULES.objection(value)):
        return f"the activation {reason}"
    return None
