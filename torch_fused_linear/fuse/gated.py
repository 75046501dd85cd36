"""What runs where ``act(gate(x)) * up(x)`` stood, and the layer after it.

The layers and the activation are called here, where the product stood, though they may have stood
in statements before it. Where one of them is not plain all are called as they were written, and in
that order.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from .._library import direct
from ..functional import gated_mlp
from ..subclasses import PLAIN
from .call import METHODS, Begun, call, follow, glu, is_begun, parameters, plain_kind, ready, value


def gated(order, act, gate, up, left, right, memory="default"):
    """In place of ``act(gate(x)) * up(x)``; `left` and `right` are what the factors' layers get.

    `order` says which call comes first, gate, activation or up, and of which each factor is.
    """
    if left is right and (begun := _begun(act, gate, up, left, memory)):
        return begun
    calls, factors = order.split()
    x, y = (left, right) if factors == "gu" else (right, left)
    if calls == "gau":
        g, u = call(act, gate, x), up(y)
    elif calls == "uga":
        u, g = up(y), call(act, gate, x)
    else:
        g, u = gate(x), up(y)
        g = act(g)
    return g * u if factors == "gu" else u * g


def gated_halves(order, act, layer, chunk, left, right, /, *args, memory="default", **kwargs):
    """In place of ``act(g) * u`` with ``g, u = chunk(layer(x), ...)``.

    `order` says which half is gate's, and of which each factor is.
    """
    half, factors = order.split()
    is_known = left is right and (chunk is method_chunk or chunk is torch.chunk)
    if is_known and not _is_in_place(act) and _is_in_two(left, *args, **kwargs):
        begun = _begun(act, layer, None, left, memory, half == "1")
        if begun:
            return begun
    g, u = chunk(layer(left), *args, **kwargs)
    g, u = (g, u) if half == "0" else (u, g)
    return act(g) * u if factors == "gu" else u * act(g)


def _is_in_place(act):
    """Whether it writes into a half, which torch forbids where there are gradients."""
    given = act.keywords if type(act) is partial else getattr(act, "__dict__", {})
    return given.get("inplace", False) or act in (torch.relu_, METHODS["relu_"])


def method_chunk(h, /, *args, **kwargs):
    return h.chunk(*args, **kwargs)


def _is_in_two(x, chunks, dim=0):
    return chunks == 2 and (dim == -1 or (type(x) in PLAIN and dim == x.dim() - 1))


def _begun(act, layer, other, x, memory, up_first=False):
    """A begun gated layer of both layers or of one for both; None where one is not plain."""
    if not is_dynamo_compiling():
        begun = direct.gated(act, layer, other, x, memory, up_first)
        if begun is not None:
            return begun
    kind = plain_kind(act)
    begun = kind and ready(layer, x)
    if not begun or begun[3].dim() != 2:
        return None
    gate, up, gate_bias, up_bias = begun[3], None, begun[4], None
    if other is not None:
        begun = ready(other, x)
        if begun is None or begun[3].shape != gate.shape:
            return None
        up, up_bias = begun[3:5]
    elif gate.shape[0] % 2:
        return None
    elif up_first:
        up, gate = gate.chunk(2)
        if gate_bias is not None:
            up_bias, gate_bias = gate_bias.chunk(2)
    return Begun, glu, (x, gate, up, gate_bias, up_bias, kind, memory), None, None, ()


def down(layer, h=None, /, **named):
    """In place of ``layer(h)`` where h may be a begun gated layer."""
    given = named["input"] if named else h
    if is_begun(given):
        result = None if is_dynamo_compiling() else direct.down(layer, given)
        if result is not None:
            return result
        held = None if given[5] or type(layer) is nn.Conv2d else parameters(layer)
        if held and _fits(given[2], *held):
            (x, gate, up, gate_bias, up_bias, *options), (weight, bias) = given[2], held
            return gated_mlp(x, gate, up, weight, gate_bias, up_bias, bias, *options)
        given = value(given)
    return follow(layer, input=given) if named else follow(layer, given)


def _fits(glu, weight, bias):
    """False where torch's own function would raise an error, or autocast has to decide."""
    _, gate, up, *_ = glu
    hidden = gate.shape[0] // (2 if up is None else 1)
    given = (weight,) if bias is None else (weight, bias)
    return (
        weight.dim() == 2
        and weight.shape[1] == hidden
        and all(t.dtype == gate.dtype and t.device == gate.device for t in given)
    )


def both(x):
    """In place of ``layer(x).chunk(2, -1)``, which runs later."""
    return x, x
