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
from ..activations import ACTIVATIONS
from ..functional import gated_mlp, linear, linear_glu
from ..nn.conv import FusedConv2dReLU
from ..subclasses import PLAIN
from . import parallel, plain
from .plain import METHODS, dropped_share, memory_of, plain_kind


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
    return linear_glu(*given)


def is_a(kind: type, value: object) -> bool:
    """Whether it is a begun call, a factor or a half."""
    return type(value) is tuple and len(value) > 0 and value[0] is kind


# --- one call after another ---------------------------------------------------------------------


def step(function, /, *args, **named):
    """In place of ``function(h, ...)`` whose result only the next of these calls gets."""
    h, more, options = _parts(args, named)
    if is_a(Begun, h):
        share = dropped_share(function, more, options)
        if share is not None:
            return (*h[:5], (*h[5], (share, function, more, options))) if share else h
        result = _activated(function, h, more, options)
        if result is None and not more and not options:
            result = _down(function, h)
        if result is not None:
            return result
        h = end(h)
        args, named = _with(h, args, named)
    begun = None if more or options else _begun(function, h)
    return function(*args, **named) if begun is None else begun


def last(function, /, *args, **named):
    """The same where the result may go anywhere."""
    return end(step(function, *args, **named))


def end(h):
    """What a begun call would have returned; anything else as it is."""
    if not is_a(Begun, h):
        return h
    layer = h[1]
    if layer is glu:
        result = linear_glu(*h[2])
    elif type(layer) is nn.Conv2d:
        result = layer(h[2])
    else:
        result = _run(linear, h)
    for _, function, more, options in h[5]:
        result = function(result, *more, **options)
    return result


def _parts(args, named) -> tuple:
    """The tensor of a call, what else it is given by position, and what by name."""
    if args:
        return args[0], args[1:], named
    return named.get("input"), (), {name: v for name, v in named.items() if name != "input"}


def _with(h, args, named) -> tuple:
    """What a call is given, with another tensor."""
    return ((h, *args[1:]), named) if args else (args, {**named, "input": h})


def _begun(layer, input) -> tuple | None:
    """A begun call of a plain layer; None where it must be called as it is."""
    held = None if memory_of(layer) is None else plain.parameters(layer)
    if held is None or not plain.fits(layer, input, *held):
        return None
    return (Begun, layer, input, *held, ())


def _activated(function, h, more, options) -> Tensor | None:
    """The activation of a begun call; None where it must be called as it is."""
    _, layer, input, weight, _, dropouts = h
    if layer is glu or len(more) > 1 or (more and options):
        return None
    kind = plain_kind(function, {"inplace": more[0]} if more else options)
    is_convolution = type(layer) is nn.Conv2d
    if kind is None or (kind != "relu" and (dropouts or is_convolution)):
        return None
    if type(weight) not in PLAIN and not parallel.has_whole_sums(layer):
        return None
    if is_convolution:
        result = FusedConv2dReLU.forward(layer, input)
    else:
        activation = ACTIVATIONS[kind]
        form = () if activation.approximate is None else (activation.approximate,)
        operator = getattr(functional, activation.operator)
        result = _run(operator, h, *form, memory_of(layer) or "default")
    for share, *_ in dropouts:
        result = F.dropout(result, share)
    return result


def _run(operator, h, *options):
    """An operator in the place of the begun call's layer."""
    _, layer, input, weight, bias, _ = h
    if type(weight) in PLAIN:
        return operator(input, weight, bias, *options)
    return parallel.between_hooks(layer, operator, input, weight, bias, *options)


# --- gated layers -------------------------------------------------------------------------------


def later(function, /, *args, **named):
    """In place of ``act(h)`` whose result only a product gets."""
    h, more, options = _parts(args, named)
    if is_a(Begun, h) or is_a(Half, h):
        kind = None if more else plain_kind(function, options)
        if kind is not None and not (is_a(Half, h) and _is_in_place(function, options)):
            return (Factor, h, kind, function, more, options)
        args, named = _with(_value(h), args, named)
    return function(*args, **named)


def halves(chunk, h, /, *args, **named):
    """In place of ``chunk(h, 2, dim=-1)``."""
    if not is_a(Begun, h):
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


def last_product(left, right):
    """The same where the result may go anywhere."""
    return end(product(left, right))


def _gated(factor, other) -> tuple | None:
    """A begun gated layer of both layers or of one for both; None where one is not plain."""
    if not is_a(Factor, factor):
        return None
    h, kind = factor[1:3]
    up = up_bias = None
    if is_a(Begun, h) and is_a(Begun, other):
        begun, (_, layer, input, up, up_bias, dropouts) = h, other
        if layer is glu or input is not begun[2] or dropouts or up.shape != begun[3].shape:
            return None
    elif is_a(Half, h) and is_a(Half, other) and other[1] is h[1] and other[2] != h[2]:
        begun = h[1][0]
        if not is_a(Begun, begun) or begun[3].shape[0] % 2:  # its halves were made, or are unequal
            return None
    else:
        return None
    _, layer, input, gate, gate_bias, dropouts = begun
    weights = (gate,) if up is None else (gate, up)
    if dropouts or layer is glu or any(t.dim() != 2 or type(t) not in PLAIN for t in weights):
        return None
    if is_a(Half, h) and h[2] == 1:
        up, gate = gate.chunk(2)
        if gate_bias is not None:
            up_bias, gate_bias = gate_bias.chunk(2)
    memory = memory_of(layer) or "default"
    return Begun, glu, (input, gate, up, gate_bias, up_bias, kind, memory), None, None, ()


def _down(layer, h) -> Tensor | None:
    """The layer after a begun gated layer, as one operator with it."""
    if h[1] is not glu or h[5] or type(layer) is nn.Conv2d or memory_of(layer) is None:
        return None
    held = plain.parameters(layer)
    if held is None or not _fits_glu(h[2], *held):
        return None
    (x, gate, up, gate_bias, up_bias, *options), (weight, bias) = h[2], held
    return gated_mlp(x, gate, up, weight, gate_bias, up_bias, bias, *options)


def _fits_glu(given, weight, bias) -> bool:
    """False where torch's own function would raise an error, or autocast has to decide."""
    _, gate, up, *_ = given
    hidden = gate.shape[0] // (2 if up is None else 1)
    tensors = (weight,) if bias is None else (weight, bias)
    return (
        type(weight) in PLAIN
        and weight.dim() == 2
        and weight.shape[1] == hidden
        and all(t.dtype == gate.dtype and t.device == gate.device for t in tensors)
    )


def _value(h):
    """The value of whatever waits for a product."""
    if is_a(Factor, h):
        _, inner, _, function, more, options = h
        return last(function, _value(inner) if is_a(Half, inner) else inner, *more, **options)
    if not is_a(Half, h):
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
