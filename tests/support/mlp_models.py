"""Comparisons of FusedMLP with plain models."""

import torch
from helpers import one_thread, policy  # noqa: F401

import torch_fused_linear as tfl


def gradients(model, x):
    x = x.detach().clone().requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def assert_equal_models(one, other, x):
    for a, b in zip(gradients(one, x), gradients(other, x), strict=True):
        torch.testing.assert_close(a, b)


def runs_as_one(model, x):
    with tfl.explain() as report, torch.no_grad():
        model(x)
    return bool(report.calls) and all(call.operator == "mlp" for call in report.calls)
