"""What stands in rewritten code in the place of calls: it looks at what it gets, and decides then.

Each is called where the call was, with what was called and what that got. ``step`` runs nothing yet
where it meets a marked plain layer with fitting tensors: it returns a *begun* call, which only the
next of these functions gets to see and runs as one operator with the activation. Whatever is not
plain is called at once, as it was.

The functions are in Python for torch.compile, which traces them, and for what is not simple;
csrc/python/expression.cpp has them in C.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from .._torch_internals import has_any_global_hook
from ..activations import ACTIVATIONS as BY_NAME
from ..functional import gated_mlp, linear, linear_glu
from ..nn.conv import FusedConv2dReLU
from ..subclasses import PLAIN, is_foreign
from . import parallel, plain
from .plain import METHODS, dropped_share, hooks_objection, memory_of, plain_kind


class Begun:
    """A begun call: (Begun, layer, input, weight, bias, dropouts behind it)."""


class Factor:
    """An activation whose result a product gets: (Factor, begun or half, kind, activation,
    what else it is given by position, and by name)."""


class Half:
    """One half of a begun layer's result: (Half, list of the begun call and the chunk's function
    and arguments, or of both halves when they were made, number)."""


def glu(*given) -> Tensor:
    """In the place of a begun call's layer: its input is all that linear_glu takes."""
    *tensors, activation, memory = given
    return linear_glu(*tensors, activation=activation, memory=memory)


def is_begun(value: object) -> bool:
    return type(value) is tuple and len(value) == 6 and value[0] is Begun


def is_half(value: object) -> bool:
    return type(value) is tuple and len(value) == 3 and value[0] is Half


def is_factor(value: object) -> bool:
    return type(value) is tuple and len(value) == 6 and value[0] is Factor


# --- one call after another ---------------------------------------------------------------------


def step(function, /, *args, **named):
    """In place of ``function(h, ...)`` whose result only the next of these calls gets."""
    h = args[0] if args else named.get("input")
    if is_begun(h):
        more, options = args[1:], {name: v for name, v in named.items() if name != "input"}
        share = dropped_share(function, more, options)
        if share is not None:
            return (*h[:5], (*h[5], (share, function, more, options))) if share else h
        result = _activated(function, h, more, options)
        if result is None and not more and not options:
            result = _down(function, h)
        if result is not None:
            return result
        h = end(h)
        args, named = ((h, *more), named) if args else ((), {**named, "input": h})
    if len(args) + len(named) == 1:
        begun = _begun(function, h) or _begun_between_hooks(function, h)
        if begun is not None:
            return begun
    return function(*args, **named)


def last(function, /, *args, **named):
    """The same where the result may go anywhere."""
    return end(step(function, *args, **named))


def call(activation, layer, input):
    """In place of ``activation(layer(input))``."""
    return last(activation, step(layer, input))


def end(h):
    """What a begun call would have returned; anything else as it is."""
    if not is_begun(h):
        return h
    layer = h[1]
    if layer is glu:
        result = glu(*h[2])
    elif type(layer) is nn.Conv2d:
        result = layer(h[2])
    else:
        result = _run(linear, h)
    for _, function, more, options in h[5]:
        result = function(result, *more, **options)
    return result


def _begun(layer, input) -> tuple | None:
    """A begun call of a plain layer; None where it must be called as it is."""
    if type(input) not in PLAIN or not isinstance(layer, nn.Module) or memory_of(layer) is None:
        return None
    held = plain.parameters(layer)
    if held is None or not plain.fits(layer, input, *held):
        return None
    return (Begun, layer, input, *held, ())


def _begun_between_hooks(layer, input) -> tuple | None:
    """The same of a layer under a plan of tensor parallelism, whose weight is a DTensor."""
    if not isinstance(layer, nn.Module) or not parallel.is_spread(layer):
        return None
    if memory_of(layer) is None or is_foreign(input) or not plain.plain_modes():
        return None
    if hooks_objection(layer) or has_any_global_hook():
        return None
    held = layer._parameters
    weight, bias = held.get("weight"), held.get("bias")
    given = [weight] if bias is None else [weight, bias]
    if weight is None or any(type(t) in PLAIN or is_foreign(t) for t in given):
        return None
    if not plain.is_untouched(nn.Linear, plain.LAYERS[nn.Linear]):
        return None
    return (Begun, layer, input, weight, bias, ())


def _activated(function, h, more, options) -> Tensor | None:
    """The activation of a begun call; None where it must be called as it is."""
    _, layer, input, weight, _, dropouts = h
    if layer is glu:
        return None
    if more:
        if len(more) > 1 or options or function not in (F.relu, F.silu):
            return None
        options = {"inplace": more[0]}
    kind = plain_kind(function, options or None)
    if kind is None or (kind != "relu" and (dropouts or type(layer) is nn.Conv2d)):
        return None
    if type(weight) not in PLAIN and not parallel.has_whole_sums(layer):
        return None
    memory = memory_of(layer) or "default"
    if type(layer) is nn.Conv2d:
        result = FusedConv2dReLU.forward(layer, input)
    else:
        activation = BY_NAME[kind]
        operator = getattr(functional, activation.operator)
        result = _run(operator, h, **activation.options, memory=memory)
    for share, *_ in dropouts:
        result = F.dropout(result, share)
    return result


def _run(operator, h, **options):
    """An operator in the place of the begun call's layer."""
    _, layer, input, weight, bias, _ = h
    if type(weight) in PLAIN:
        return operator(input, weight, bias, **options)
    return parallel.between_hooks(layer, operator, input, weight, bias, **options)


# --- gated layers -------------------------------------------------------------------------------


def later(function, /, *args, **named):
    """In place of ``act(h)`` whose result only a product gets."""
    h = args[0] if args else named.get("input")
    if is_begun(h) or is_half(h):
        more, options = args[1:], {name: v for name, v in named.items() if name != "input"}
        kind = None if more else plain_kind(function, options or None)
        if kind is not None and not (is_half(h) and _is_in_place(function, options)):
            return (Factor, h, kind, function, more, options)
        h = _value(h)
        args, named = ((h, *more), named) if args else ((), {**named, "input": h})
    return function(*args, **named)


def halves(chunk, h, /, *args, **named):
    """In place of ``chunk(h, 2, dim=-1)``."""
    if not is_begun(h):
        return chunk(h, *args, **named)
    is_known = chunk is method_chunk or chunk is torch.chunk
    is_single = h[1] is not glu and not h[5] and type(h[1]) is not nn.Conv2d
    if is_known and is_single and h[3].dim() == 2 and _is_in_two(h[2], *args, **named):
        cell = [h, chunk, args, named]
        return (Half, cell, 0), (Half, cell, 1)
    return chunk(end(h), *args, **named)


def method_chunk(h, /, *args, **named):
    return h.chunk(*args, **named)


def product(left, right):
    """In place of ``left * right`` whose result only a layer of ours gets."""
    begun = _gated(left, right) or _gated(right, left)
    return begun or _value(left) * _value(right)


def _gated(factor, other) -> tuple | None:
    """A begun gated layer of both layers or of one for both; None where one is not plain."""
    if not is_factor(factor):
        return None
    _, h, kind, *_ = factor
    begun = h if is_begun(h) else h[1][0]
    if not is_begun(begun):
        return None  # its halves were made
    _, layer, input, gate, gate_bias, dropouts = begun
    up = up_bias = None
    if is_begun(h):
        if not is_begun(other) or other[1] is glu or other[2] is not input or other[5]:
            return None
        up, up_bias = other[3:5]
        if gate.shape != up.shape:
            return None
        given = gate, up
    else:
        if not is_half(other) or other[1] is not h[1] or other[2] == h[2] or gate.shape[0] % 2:
            return None
        given = (gate,)
        if h[2] == 1:
            up, gate = gate.chunk(2)
            if gate_bias is not None:
                up_bias, gate_bias = gate_bias.chunk(2)
    if dropouts or layer is glu or any(t.dim() != 2 or type(t) not in PLAIN for t in given):
        return None
    memory = memory_of(layer) or "default"
    return Begun, glu, (input, gate, up, gate_bias, up_bias, kind, memory), None, None, ()


def _down(layer, h) -> Tensor | None:
    """The layer after a begun gated layer, as one operator with it."""
    if h[1] is not glu or h[5] or not isinstance(layer, nn.Module) or memory_of(layer) is None:
        return None
    held = None if type(layer) is nn.Conv2d else plain.parameters(layer)
    if held is None or not _fits_glu(h[2], *held):
        return None
    (x, gate, up, gate_bias, up_bias, activation, memory), (weight, bias) = h[2], held
    tensors = x, gate, up, weight, gate_bias, up_bias, bias
    return gated_mlp(*tensors, activation=activation, memory=memory)


def _fits_glu(given, weight, bias) -> bool:
    """False where torch's own function would raise an error, or autocast has to decide."""
    _, gate, up, *_ = given
    hidden = gate.shape[0] // (2 if up is None else 1)
    tensors = (weight,) if bias is None else (weight, bias)
    return (
        weight.dim() == 2
        and weight.shape[1] == hidden
        and all(t.dtype == gate.dtype and t.device == gate.device for t in tensors)
    )


def _value(h):
    """The value of whatever waits for a product."""
    if is_factor(h):
        _, inner, _, function, more, options = h
        return last(function, _value(inner) if is_half(inner) else inner, *more, **options)
    if not is_half(h):
        return end(h)
    _, cell, number = h
    if len(cell) != 2:
        begun, chunk, args, named = cell
        cell[:] = chunk(end(begun), *args, **named)
    return cell[number]


def _is_in_place(function, options) -> bool:
    """Whether it writes into a half, which torch forbids where there are gradients."""
    given = function.keywords if type(function) is functools.partial else options
    is_set = given.get("inplace") or getattr(function, "inplace", False)
    return bool(is_set) or function is torch.relu_ or function is METHODS["relu_"]


def _is_in_two(x, chunks=None, dim=0):
    return chunks == 2 and (dim == -1 or (type(x) in PLAIN and dim == x.dim() - 1))
