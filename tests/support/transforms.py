"""Transforms of torch.func on an operator and on its definition."""

import torch


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else [t for r in result for t in tensors(r)]


def assert_both(op, transform, *args):
    """transform(fn)(*args) for our operator equals that for the eager definition."""
    ours, eager = tensors(transform(op.call)(*args)), tensors(transform(op.eager)(*args))
    assert len(ours) == len(eager)
    for a, b in zip(ours, eager):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b)


def scalar(fn):
    return lambda *args: fn(*args).square().sum()
