"""What runs where ``act(linear(x))`` stood: it looks at what it was given, and decides then.

A rewritten expression calls these functions in the order in which the original calls its layers.
``begin`` runs nothing yet where it meets a plain layer with fitting tensors: it returns a *begun*
call, which nobody else gets to see, and ``activate`` ends it as one operator. Whatever is not
plain is called at once, as in the original.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.nn.modules.module import _has_any_global_hook

from .._library import direct
from ..activations import ACTIVATIONS as BY_NAME
from ..activations import name_of_gelu
from ..functional import linear, linear_gelu, linear_glu, linear_relu, linear_silu
from ..nn.conv import FusedConv2dReLU
from ..subclasses import PLAIN, is_foreign
from . import parallel
from .families import ACTIVATIONS, CONV1D, full_name

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Begun:
    """The first element of a begun call, (Begun, layer, input, weight, bias, dropouts)."""


# What stands for `h.relu()`, as a function of h.
METHODS = {name: operator.methodcaller(name) for name in ("relu", "relu_")}
RELU = (F.relu, torch.relu, torch.relu_, *METHODS.values())
# The forward of every class whose calls are known; one that was exchanged makes it unknown.
LAYERS = {cls: cls.forward for cls in (nn.Linear, nn.Conv2d)}
MODULES = {
    cls: (kind, cls.forward)
    for cls, kind in ((nn.ReLU, "relu"), (nn.GELU, "gelu"), (nn.SiLU, "silu"))
}
PASSED = {cls: cls.forward for cls in (nn.Dropout, nn.Identity)}
# Of plain functions: what they call with their argument and nothing else (resolve.py).
RECIPES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
UNTOUCHED = (
    (nn.Module, "__call__", nn.Module.__call__),
    (nn.Module, "_call_impl", nn.Module._call_impl),
    (torch, "relu", torch.relu),  # which F.relu calls
    *((F, name, getattr(F, name)) for name in ("linear", "relu", "gelu", "silu", "conv2d")),
)
GLOBAL_HOOKS = tuple(
    getattr(nn.modules.module, f"_global_{kind}")
    for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
)


def glu(given: tuple) -> Tensor:
    """In the place of a begun call's layer: its input is all that linear_glu takes."""
    return linear_glu(*given)


KNOWN = (LAYERS, MODULES, RELU, F.gelu, F.silu, Begun, GLOBAL_HOOKS, UNTOUCHED)
direct.know_plain(*KNOWN, nn.Linear, nn.Conv2d, glu)


def learn(value: object) -> None:
    """Makes known the class of a layer or an activation of another library, or a function."""
    cls = type(value)
    if isinstance(value, nn.Module):
        if full_name(cls) == CONV1D:
            LAYERS.setdefault(cls, cls.forward)
        elif kind := ACTIVATIONS.get(full_name(cls)):
            MODULES.setdefault(cls, (kind, cls.forward))
    elif cls is FunctionType and value not in RECIPES:
        RECIPES[value] = value.__code__, recipe(value)


# Reads what a function of one argument calls with it; resolve.py, which imports this file's
# readers, puts it here.
recipe: Callable[[FunctionType], tuple | None] | None = None


# --- what is plain ------------------------------------------------------------------------------


def hooks_objection(module: nn.Module) -> str | None:
    """Where somebody watches the module or has replaced its forward."""
    own = module.__dict__
    for kind in HOOKS[2:] if parallel.is_spread(module) else HOOKS:
        if own.get(kind):
            return f"has {kind.strip('_').replace('_', ' ')}"
    if "forward" in own:
        return "has a forward of its own, set on the object"
    if own.get("_compiled_call_impl") is not None:
        return "was compiled"
    return None


def is_untouched(cls: type, forward: object) -> bool:
    """Whether nobody has put another function into the class, or into torch."""
    if is_dynamo_compiling() or is_exporting():  # which do, for a while
        return True
    return cls.forward is forward and all(
        getattr(owner, name) is value for owner, name, value in UNTOUCHED
    )


def plain_modes() -> bool:
    """Whether no function mode of somebody else wants to see torch's own calls."""
    modes = torch.overrides._get_current_function_mode_stack()
    return all(type(mode).__module__.startswith("torch.") for mode in modes)


def fits(layer: nn.Module, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """False where torch's own function would raise an error, which then does."""
    others = (input,) if bias is None else (input, bias)
    if input.is_nested or any(t.device != weight.device for t in others):
        return False
    if any(t.dtype != weight.dtype for t in others):
        return torch.is_autocast_enabled(weight.device.type)
    if type(layer) is nn.Conv2d:
        is_image = weight.dim() == 4 and input.dim() in (3, 4)
        return is_image and input.shape[-3] == weight.shape[1] * layer.groups
    return weight.dim() == 2 and input.dim() >= 1 and input.shape[-1] == weight.shape[1]


def parameters(layer: object) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a layer that does nothing but apply them; None of any other."""
    cls = type(layer)
    if not isinstance(layer, nn.Module):
        return None
    if cls not in LAYERS:
        if full_name(cls) != CONV1D or is_dynamo_compiling():
            return None
        learn(layer)
    if hooks_objection(layer) or _has_any_global_hook() or not is_untouched(cls, LAYERS[cls]):
        return None
    if parallel.is_spread(layer):
        return None
    held = layer._parameters
    if "weight" not in held or "bias" not in held:  # somebody made a buffer of it
        return None
    weight, bias = held["weight"], held["bias"]
    if type(weight) not in PLAIN or not (bias is None or type(bias) in PLAIN):
        return None
    if not is_dynamo_compiling() and not plain_modes():
        return None
    if cls is not nn.Linear and cls is not nn.Conv2d:
        weight = weight.t()  # a view: the operators take any strides
    return weight, bias


def activation_kind(function: object, options: dict | None = None) -> str | None:
    """The operators' name of the activation, or None where it is none of ours exactly.

    Args:
        function: a module or a function.
        options: the keyword arguments beside the tensor.
    """
    if isinstance(function, nn.Module):
        cls = type(function)
        if cls not in MODULES and not is_dynamo_compiling():
            learn(function)
        if options or cls not in MODULES:
            return None
        kind, forward = MODULES[cls]
        if not is_untouched(cls, forward):
            return None
        return name_of_gelu(function.approximate) if kind == "gelu" else kind
    if function is F.gelu:
        if options and (len(options) > 1 or "approximate" not in options):
            return None
        return name_of_gelu(options["approximate"] if options else "none")
    if any(function is known for known in RELU):
        if options and (function is not F.relu or options.keys() != {"inplace"}):
            return None
        return "relu"
    if function is F.silu:
        return None if options and options.keys() != {"inplace"} else "silu"
    if options:
        return None
    if type(function) is functools.partial:
        known = function.func in (F.relu, F.gelu, F.silu)
        return activation_kind(function.func, function.keywords) if known and not function.args \
            else None  # fmt: skip
    if type(function) is not FunctionType:
        return None
    value, inner = called_by(function)
    return None if value is None else activation_kind(value, inner)


def plain_kind(function: object, options: dict | None = None) -> str | None:
    """The same, unless somebody watches the activation."""
    if isinstance(function, nn.Module) and (hooks_objection(function) or _has_any_global_hook()):
        return None
    return activation_kind(function, options)


def called_by(function: FunctionType) -> tuple[object, object]:
    """What a function calls with its argument, if it does no more, and the options of that call."""
    known = RECIPES.get(function)
    if known is None and not is_dynamo_compiling():
        learn(function)
        known = RECIPES[function]
    if known is None or known[1] is None or known[0] is not function.__code__:
        return None, None
    (name, *attributes), options = known[1]
    value = function.__globals__.get(name)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return (None, None) if value is function else (value, options)


# --- what a rewritten expression calls ----------------------------------------------------------


def is_begun(value: object) -> bool:
    return type(value) is tuple and len(value) == 6 and value[0] is Begun


def call(function, layer, input):
    """In place of ``act(layer(x))``."""
    if not is_dynamo_compiling():
        result = direct.call(function, layer, input)
        if result is not None:
            return result
    return activate(function, begin(layer, input))


def ready(layer, input) -> tuple | None:
    """A begun call of a plain layer; None where it must be called as it is."""
    begun = None if is_dynamo_compiling() else direct.begin(layer, input)
    if begun is None and type(input) in PLAIN:
        held = parameters(layer)
        if held is not None and fits(layer, input, *held):
            return (Begun, layer, input, *held, ())
    return begun


def _ready_between_hooks(layer, input) -> tuple | None:
    """The same of a layer under a plan of tensor parallelism, whose weight is a DTensor."""
    if not isinstance(layer, nn.Module) or not parallel.is_spread(layer):
        return None
    watched = hooks_objection(layer) or _has_any_global_hook() or not plain_modes()
    if watched or not is_untouched(nn.Linear, LAYERS[nn.Linear]) or is_foreign(input):
        return None
    held = layer._parameters
    weight, bias = held.get("weight"), held.get("bias")
    given = [weight] if bias is None else [weight, bias]
    if weight is None or any(type(t) in PLAIN or is_foreign(t) for t in given):
        return None
    return (Begun, layer, input, weight, bias, ())


def begin(layer, input=None, /, **named):
    """In place of ``layer(x)`` or ``layer(input=x)`` where an activation follows."""
    given = named["input"] if named else input
    begun = ready(layer, given) or _ready_between_hooks(layer, given)
    if begun is not None:
        return begun
    return layer(**named) if named else layer(input)


def through(function, /, *args, **kwargs):
    """In place of ``dropout(h)`` between the two."""
    h = args[0] if args else None
    if not is_begun(h):
        return function(*args, **kwargs)
    p = dropped_share(function, args[1:], kwargs)
    if p is None:
        return function(value(h), *args[1:], **kwargs)
    return (*h[:5], (*h[5], (p, function, args[1:], kwargs))) if p else h


def dropped_share(function, args, kwargs) -> float | None:
    """What share of its input it drops now; None if it is neither dropout nor identity."""
    if _has_any_global_hook() or (isinstance(function, nn.Module) and hooks_objection(function)):
        return None
    cls = type(function)
    if cls in PASSED and not is_untouched(cls, PASSED[cls]):
        return None
    if cls is nn.Identity:
        return 0
    if cls is nn.Dropout:
        p, training, inplace = function.p, function.training, function.inplace
    elif function is F.dropout:
        p, training, inplace = _dropout_arguments(*args, **kwargs)
    else:
        return None
    # in place torch draws other numbers, and the backward needs what the operator returned
    if type(p) not in (int, float) or not 0 <= p <= 1 or (inplace and p and training):
        return None
    return p if training else 0


def _dropout_arguments(p=0.5, training=True, inplace=False):
    return p, training, inplace


def activate(function, h=None, /, *more, **named):
    """In place of ``act(h, ...)``, where h may be a begun call."""
    if not more and not named and not is_dynamo_compiling():
        result = direct.activate(function, h, "default")
        if result is None and type(function) is FunctionType and is_begun(h):
            called, options = called_by(function)
            result = None if options else direct.activate(called, h, "default")
        if result is not None:
            return result
    return _activate("default", function, () if "input" in named else (h, *more), named)


def activate_low(function, /, *args, **kwargs):
    """The same, with what is kept for the backward as in ``memory="low"``."""
    return _activate("low", function, args, kwargs)


def _activate(memory, function, args, kwargs):
    h = args[0] if args else kwargs["input"]
    if not is_begun(h):
        return function(*args, **kwargs)
    options = {name: v for name, v in kwargs.items() if name != "input"} if kwargs else None
    if len(args) == 2 and function in (F.relu, F.silu) and options is None:
        options = {"inplace": args[1]}
    elif len(args) > 1:
        options = {"more": args}
    kind = plain_kind(function, options)
    _, layer, input, weight, _, dropouts = h
    if (
        kind is None
        or (kind != "relu" and (dropouts or type(layer) is nn.Conv2d))
        or (type(weight) not in PLAIN and not parallel.has_whole_sums(layer))
    ):
        if not args:
            return function(**{**kwargs, "input": value(h)})
        return function(value(h), *args[1:], **kwargs)
    if type(layer) is nn.Conv2d:
        result = FusedConv2dReLU.forward(layer, input)
    elif kind == "relu":
        result = _run(linear_relu, h, memory)
    elif kind == "silu":
        result = _run(linear_silu, h, memory)
    else:
        result = _run(linear_gelu, h, BY_NAME[kind].approximate, memory)
    for p, *_ in dropouts:
        result = F.dropout(result, p)
    return result


def _run(operator, h, *options):
    """An operator in the place of the begun call's layer."""
    _, layer, input, weight, bias, _ = h
    if type(weight) in PLAIN:
        return operator(input, weight, bias, *options)
    return parallel.between_hooks(layer, operator, input, weight, bias, *options)


def value(h):
    """What a begun call would have returned at once; anything else as it is."""
    if not is_begun(h):
        return h
    result = h[1](h[2])
    for _, function, args, kwargs in h[5]:
        result = function(result, *args, **kwargs)
    return result


def follow(layer, input=None, /, **named):
    """In place of ``layer(x)`` where x may come from a fused call, to hand its gradient over."""
    return end(begin(layer, input, **named))


def end(h):
    """A begun call whose activation does not come: the layer alone."""
    return _end(h, True)


def unless(owner, layer):
    """A layer that ``filter_fn`` would not have, as something that is called as it is."""
    config = getattr(type(owner), "__fused__", None)
    for path in config.refused if config else ():
        here = owner
        for name in path.split("."):
            here = getattr(here, "_modules", {}).get(name)
        if here is layer:
            return layer.__call__
    return layer


def run_sequential(self, input):
    """In place of nn.Sequential's forward: its children as they are at this moment."""
    config = getattr(type(self), "__fused__", None)
    if config is None:  # a bound method that somebody kept from before unfuse_
        return nn.Sequential.forward(self, input)
    last, waiting = "", None  # the name of the layer that is begun, or waits for its activation
    for name, child in self._modules.items():
        if waiting is not None:
            both = direct.call(child, waiting, input) if last not in config.low else None
            input = begin(waiting, input) if both is None else both
            waiting = None
            if both is not None:
                continue
            child = self._modules[name]  # a hook of the layer before may have exchanged it
        cls = type(child)
        if is_begun(input):
            if cls is nn.Dropout or cls is nn.Identity:
                input = through(child, input)
                continue
            if cls not in LAYERS:
                input = activate_low(child, input) if last in config.low else activate(child, input)
                continue
            input = _end(input, last in config.follows)
        if cls not in LAYERS or name in config.refused:
            input = child(input)
        elif is_dynamo_compiling():
            input, last = begin(child, input), name
        else:
            waiting, last = child, name
    if waiting is not None:
        input = begin(waiting, input)
    return _end(input, last in config.follows)


def _end(h, follows: bool):
    if follows and is_begun(h) and not h[5] and type(h[1]) is not nn.Conv2d:
        return _run(linear, h)
    return value(h)
