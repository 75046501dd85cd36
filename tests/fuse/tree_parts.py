"""Modules and functions by hand that the generated classes and trees are made of."""

import functools

import torch
from torch import nn
from torch.nn import functional as F


class Lora(nn.Linear):
    """A linear layer that computes more than its base class."""

    def __init__(self, i, o, bias=True):
        super().__init__(i, o, bias)
        self.down, self.up = nn.Linear(i, 2, bias=False), nn.Linear(2, o, bias=False)

    def forward(self, input):
        return super().forward(input) + self.up(self.down(input))


class Wrapped(nn.Module):
    """A layer inside another module, as adapters and quantisers put it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input):
        return self.inner(input) * 2


class LoudReLU(nn.ReLU):
    def forward(self, input):
        return super().forward(input) + 1


class LoudGELU(nn.GELU):
    def forward(self, input):
        return super().forward(input) * 2


def twice(function):
    @functools.wraps(function)
    def run(*args, **kwargs):
        return function(*args, **kwargs) * 2

    return run


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


class Positive(nn.Module):
    """A parametrisation that changes the value."""

    def forward(self, weight):
        return torch.abs(weight)


class Named(nn.Sequential):
    """A Sequential under another name, as torchvision has many."""
