"""What runs where ``act(gate(x)) * up(x)`` stood, and the layer after it.

The layers and the activation are called here, where the product stood, though they may have stood
in statements before it. Where one of them is not plain all are called as they were written, and in
that order.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ..functional import gated_mlp, linear_glu
from .call import METHODS, Begun, call, follow, is_begun, parameters, plain_kind, ready, value


def gated(order, act, gate, up, left, right):
    """In place of ``act(gate(x)) * up(x)``; `left` and `right` are what the factors' layers get.

    `order` says which call comes first, gate, activation or up, and of which each factor is.
    """
    kind = plain_kind(act) if left is right else None
    first = ready(gate, left) if kind else None
    second = ready(up, left) if first else None
    if second and first[3].dim() == 2 and first[3].shape == second[3].shape:
        return _begun(left, first[3], second[3], first[4], second[4], kind)
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


def gated_halves(order, act, layer, chunk, left, right, /, *args, **kwargs):
    """In place of ``act(g) * u`` with ``g, u = chunk(layer(x), ...)``.

    `order` says which half is gate's, and of which each factor is.
    """
    half, factors = order.split()
    kind = plain_kind(act) if left is right and not _is_in_place(act) else None
    begun = ready(layer, left) if kind else None
    is_known = chunk is method_chunk or chunk is torch.chunk
    if begun and is_known and _is_in_two(begun, *args, **kwargs):
        weight, bias = begun[3:5]
        if half == "0":
            return _begun(left, weight, None, bias, None, kind)
        up, weight = weight.chunk(2)
        up_bias, bias = (None, None) if bias is None else bias.chunk(2)
        return _begun(left, weight, up, bias, up_bias, kind)
    g, u = chunk(layer(left), *args, **kwargs)
    g, u = (g, u) if half == "0" else (u, g)
    return act(g) * u if factors == "gu" else u * act(g)


def _is_in_place(act):
    """Whether it writes into a half, which torch forbids where there are gradients."""
    given = act.keywords if type(act) is partial else getattr(act, "__dict__", {})
    return given.get("inplace", False) or act in (torch.relu_, METHODS["relu_"])


def method_chunk(h, /, *args, **kwargs):
    return h.chunk(*args, **kwargs)


def _is_in_two(begun, chunks, dim=0):
    _, _, x, weight, *_ = begun
    return (
        weight.dim() == 2
        and weight.shape[0] % 2 == 0
        and chunks == 2
        and (dim == -1 or dim == x.dim() - 1)
    )


def _begun(x, gate, up, gate_bias, up_bias, kind):
    """As `begin` of call.py has it: what runs it is in the place of the layer."""
    named = {"gate": gate, "up": up, "gate_bias": gate_bias, "up_bias": up_bias}
    return Begun, partial(linear_glu, **named, activation=kind), x, None, None, ()


def down(layer, h=None, /, **named):
    """In place of ``layer(h)`` where h may be such a product, not yet computed."""
    given = named["input"] if named else h
    if is_begun(given):
        held = None if given[5] or type(layer) is nn.Conv2d else parameters(layer)
        if held and _fits(given[1].keywords, *held):
            weight, bias = held
            return gated_mlp(given[2], **given[1].keywords, down=weight, down_bias=bias)
        given = value(given)
    return follow(layer, input=given) if named else follow(layer, given)


def _fits(gate, weight, bias):
    """False where torch's own function would raise an error, or autocast has to decide."""
    like, stacked = gate["gate"], gate["up"] is None
    hidden = like.shape[0] // 2 if stacked else like.shape[0]
    given = (weight,) if bias is None else (weight, bias)
    return (
        weight.dim() == 2
        and weight.shape[1] == hidden
        and all(t.dtype == like.dtype and t.device == like.device for t in given)
    )


def both(x):
    """In place of ``layer(x).chunk(2, -1)``, which runs later."""
    return x, x
