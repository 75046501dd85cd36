"""Tensors of one shape in every layout: strides, offsets, repeats, overlaps."""

import math

import torch
from torch import Tensor


def nan_buffer(t: Tensor, shape) -> Tensor:
    """Room around a view is NaN: reading outside the view then shows in the result."""
    return torch.full(shape, math.nan, dtype=t.dtype, device=t.device)


def _transposed(t):
    out = nan_buffer(t, (*t.shape[:-2], t.shape[-1], t.shape[-2])).transpose(-1, -2)
    return out.copy_(t)


def _column_strided(t):
    return nan_buffer(t, (*t.shape[:-1], 2 * t.shape[-1]))[..., ::2].copy_(t)


def _offset(t):
    """Contiguous but starting one element in: 2, 4 or 8 bytes from an aligned address."""
    return nan_buffer(t, (t.numel() + 1,))[1:].view(t.shape).copy_(t)


def _same_everywhere(t):
    return t.flatten()[:1].view([1] * t.dim()).expand_as(t)


# Layouts in which the values stay, and those in which they change; both keep the shape.
MATRIX_LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": _transposed,
    "row_strided": lambda t: (
        nan_buffer(t, (*t.shape[:-1], t.shape[-1] + 3)).narrow(-1, 2, t.shape[-1]).copy_(t)
    ),
    "column_strided": _column_strided,
    "offset": _offset,
    "flipped": lambda t: t.flip(-1).flip(-1),
    "same_rows": lambda t: t[..., :1, :].expand_as(t),
    "same_columns": lambda t: t[..., :1].expand_as(t),
    "same_everywhere": _same_everywhere,
    # windows over one row: a row stride smaller than the width
    "overlapping": lambda t: t.flatten().as_strided(t.shape[-2:], (1, 1)).expand(t.shape),
}
VECTOR_LAYOUTS = {
    "contiguous": lambda t: t,
    "offset": _offset,
    "strided": _column_strided,
    "same_everywhere": _same_everywhere,
}
ND_LAYOUTS = {
    **MATRIX_LAYOUTS,
    # leading dimensions out of order, so that they do not merge into one (3-D and up)
    "outer_swapped": lambda t: t.transpose(0, -2).contiguous().transpose(0, -2),
}
