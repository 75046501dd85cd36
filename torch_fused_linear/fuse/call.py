"""What stands in rewritten code in the place of calls: it looks at what it gets, and decides then.

Each is called where the call was, with what was called and what that got. ``step`` runs nothing yet
where it meets a marked plain layer with fitting tensors: it returns a *begun* call, which only the
next of these functions gets to see and runs as one operator with the activation. Whatever is not
plain is called at once, as it was.

The functions are in Python for torch.compile, which traces them, and for what is not simple;
csrc/python/expression.cpp has them in C.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from .._torch_internals import parallel_plan
from ..activations import ACTIVATIONS
from ..functional import gated_mlp, linear, linear_glu
from ..nn.conv import FusedConv2dReLU
from ..subclasses import PLAIN
from . import plain
from .plain import METHODS, dropped_share, memory_of, plain_kind


class Begun:
    """A begun call: (Begun, layer, input, weight, bias, behind).

    ``behind`` are the calls after it that wait too, (what, function, what else that is given by
    position, and by name): a dropout, which is the share that it drops, or the activation of a
    gate, which is its kind.
    """


class Half:
    """One half of a begun layer's result: (Half, list of the begun call and the chunk's function
    and arguments, or of both halves when they were made, number, behind)."""


def glu(*given) -> Tensor:
    """In the place of a begun call's layer: its input is all that linear_glu takes."""
    *tensors, activation, memory = given
    return linear_glu(*tensors, activation=activation, memory=memory)


def is_a(kind: type, value: object) -> bool:
    """Whether it is a begun call or a half of one."""
    return type(value) is tuple and len(value) > 0 and value[0] is kind


# --- one call after another ---------------------------------------------------------------------


def step(function, /, *args, **named):
    """In place of ``function(h, ...)`` whose result only the next of these calls gets."""
    h, more, options = _parts(args, named)
    if is_a(Begun, h):
        is_activated = h[5] and isinstance(h[5][-1][0], str)
        share = None if is_activated else dropped_share(function, more, options)
        if share is not None:
            return _behind(h, share, function, more, options) if share else h
        result = (_squared if is_activated else _activated)(function, h, more, options)
        if result is None and not more and not options:
            result = _down(function, h)
        if result is not None:
            return result
        h = end(h)
        args, named = _with(h, args, named)
    begun = None if more or options else _begun(function, h)
    return function(*args, **named) if begun is None else begun


def drawn(function, /, *args, **named):
    """The same where others run before the next of these calls, and may draw random numbers: a
    dropout draws its own here."""
    h = step(function, *args, **named)
    return end(h) if is_a(Begun, h) and not all(isinstance(b[0], str) for b in h[5]) else h


def last(function, /, *args, **named):
    """The same where the result may go anywhere."""
    return end(step(function, *args, **named))


def first(path, function, h, /, *args, **named):
    """In place of ``function(h, ...)``, the last that is done with a layer before another one runs,
    that of the path, whose result it is multiplied by. It waits only where that one will."""
    other, *names = path
    for name in names:  # no property is asked
        own = other.__dict__ if isinstance(other, nn.Module) else {}
        other = own.get(name, own.get("_modules", {}).get(str(name)))
    if memory_of(other) is None or plain.parameters(other) is None:
        return last(function, h, *args, **named)
    return (later if is_a(Begun, h) else step)(function, h, *args, **named)


def end(h):
    """What a begun call, or a half of one, would have returned; anything else as it is."""
    if is_a(Half, h):
        _, cell, number, behind = h
        if len(cell) != 2:
            begun, chunk, args, named = cell
            cell[:] = chunk(end(begun), *args, **named)
        value = cell[number]
        for _, function, more, options in behind:
            value = function(value, *more, **options)
        return value
    if not is_a(Begun, h):
        return h
    layer, behind = h[1], h[5]
    if behind:
        *_, (what, function, more, options) = behind
        begun = (*h[:5], behind[:-1])
        if isinstance(what, str):
            return last(function, begun, *more, **options)
        return function(end(begun), *more, **options)
    if layer is glu:
        return glu(*h[2])
    return layer(h[2]) if type(layer) is nn.Conv2d else _run(linear, h)


def _behind(h, what, function, more, options) -> tuple:
    return (*h[:-1], (*h[-1], (what, function, more, options)))


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
    if h[1] is glu or len(more) > 1 or (more and options):
        return None
    return _as_one(plain_kind(function, {"inplace": more[0]} if more else options), h)


def _squared(function, h, more, options) -> Tensor | None:
    """The square of a begun layer with ReLU behind it; None where it must be called as it is."""
    is_relu = h[1] is not glu and len(h[5]) == 1 and h[5][0][0] == "relu"
    is_wide = torch.is_autocast_enabled("cuda")  # in which torch squares in fp32
    if not is_relu or options or not plain.is_square(function, more) or is_wide:
        return None
    return _as_one("relu2", (*h[:5], ()))


def _as_one(kind, h) -> Tensor | None:
    """A begun layer with an activation of this kind; None where no operator does both."""
    _, layer, input, weight, _, behind = h
    is_convolution = type(layer) is nn.Conv2d
    if kind is None or (kind != "relu" and (behind or is_convolution)):
        return None
    if is_convolution and not plain.has_known_geometry(layer):
        return None
    if type(weight) not in PLAIN:
        style, layouts = parallel_plan(layer)
        if style != "ColwiseParallel" or any(layout.is_partial() for layout in layouts):
            return None  # which is no whole sum yet
    if is_convolution:
        result = FusedConv2dReLU.forward(layer, input)
    else:
        activation = ACTIVATIONS[kind]
        operator = getattr(functional, activation.operator)
        memory = memory_of(layer) or "default"
        result = _run(operator, h, **activation.options, memory=memory)
    for share, *_ in behind:
        result = F.dropout(result, share)
    return result


def _run(operator, h, **options):
    """An operator in the place of the begun call's layer; of one under a plan of tensor parallelism
    between its hooks, which distribute the input and give the output its layout."""
    _, layer, input, weight, bias, _ = h
    if type(weight) in PLAIN:
        return operator(input, weight, bias, **options)
    (before,), (after,) = layer._forward_pre_hooks.values(), layer._forward_hooks.values()
    prepared = before(layer, (input,))
    return after(layer, (prepared,), operator(prepared, weight, bias, **options))


# --- gated layers -------------------------------------------------------------------------------


def later(function, /, *args, **named):
    """In place of ``act(h)`` whose result only a product or a square gets."""
    h, more, options = _parts(args, named)
    if is_a(Begun, h) or is_a(Half, h):
        is_free = not more and (is_a(Half, h) or not h[5])
        kind = plain_kind(function, options) if is_free else None
        if kind is not None and not (is_a(Half, h) and _is_in_place(function, options)):
            return _behind(h, kind, function, more, options)
        args, named = _with(end(h), args, named)
    return function(*args, **named)


def halves(chunk, h, /, *args, **named):
    """In place of ``chunk(h, 2, dim=-1)``."""
    if not is_a(Begun, h):
        return chunk(h, *args, **named)
    is_known = chunk is method_chunk or chunk is torch.chunk
    is_single = h[1] is not glu and not h[5] and type(h[1]) is not nn.Conv2d
    if is_known and is_single and h[3].dim() == 2 and _is_in_two(h[2], *args, **named):
        cell = [h, chunk, args, named]
        return (Half, cell, 0, ()), (Half, cell, 1, ())
    return chunk(end(h), *args, **named)


def method_chunk(h, /, *args, **named):
    return h.chunk(*args, **named)


def product(left, right):
    """In place of ``left * right`` whose result only a layer of ours gets."""
    begun = _gated(left, right) or _gated(right, left)
    return begun or end(left) * end(right)


def last_product(left, right):
    """The same where the result may go anywhere."""
    return end(product(left, right))


def _gated(gate, up) -> tuple | None:
    """A begun gated layer of an activated gate and the other factor; None if one is not plain."""
    are_alike = any(is_a(kind, gate) and is_a(kind, up) for kind in (Begun, Half))
    if not are_alike or len(gate[-1]) != 1 or up[-1]:
        return None
    kind = gate[-1][0][0]
    given = _of_two(gate, up) if gate[0] is Begun else _of_one(gate, up)
    if given is None or not isinstance(kind, str):
        return None
    layer = gate[1] if gate[0] is Begun else gate[1][0][1]
    return Begun, glu, (*given, kind, memory_of(layer) or "default"), None, None, ()


def _of_two(gate, up) -> tuple | None:
    """What linear_glu takes of two layers."""
    (layer, input, weight, bias), (other, its_input, its_weight, its_bias) = gate[1:5], up[1:5]
    if layer is glu or other is glu or input is not its_input or weight.shape != its_weight.shape:
        return None
    is_plain = all(t.dim() == 2 and type(t) in PLAIN for t in (weight, its_weight))
    return (input, weight, its_weight, bias, its_bias) if is_plain else None


def _of_one(gate, up) -> tuple | None:
    """The same of the halves of one."""
    (cell, number), (other_cell, other_number) = gate[1:3], up[1:3]
    if cell is not other_cell or number == other_number or len(cell) == 2:
        return None  # or the halves were made
    input, weight, bias = cell[0][2:5]
    if weight.shape[0] % 2 or type(weight) not in PLAIN:
        return None
    if number == 0:
        return input, weight, None, bias, None
    other, activated = weight.chunk(2)
    other_bias, activated_bias = (None, None) if bias is None else bias.chunk(2)
    return input, activated, other, activated_bias, other_bias


def _down(layer, h) -> Tensor | None:
    """The layer after a begun gated layer, as one operator with it."""
    if h[1] is not glu or h[5] or type(layer) is nn.Conv2d or memory_of(layer) is None:
        return None
    x, gate, up, gate_bias, up_bias, activation, memory = h[2]
    held, features = plain.parameters(layer), gate.shape[0] // (2 if up is None else 1)
    if held is None or type(held[0]) not in PLAIN or not plain.agree(gate, *held):
        return None
    if held[0].dim() != 2 or held[0].shape[1] != features:
        return None
    tensors = x, gate, up, held[0], gate_bias, up_bias, held[1]
    return gated_mlp(*tensors, activation=activation, memory=memory)


def _is_in_place(function, options) -> bool:
    """Whether it writes into a half, which torch forbids where there are gradients."""
    given = function.keywords if type(function) is functools.partial else options
    is_set = given.get("inplace") or getattr(function, "inplace", False)
    return bool(is_set) or function is torch.relu_ or function is METHODS["relu_"]


def _is_in_two(x, chunks=None, dim=0):
    return chunks == 2 and (dim == -1 or (type(x) in PLAIN and dim == x.dim() - 1))
