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


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Loop(nn.ModuleList):
    """A list that runs: each child by itself or, with peek, also its first part."""

    def __init__(self, modules=(), peek=False):
        super().__init__(modules)
        self.peek = peek

    def forward(self, x):
        for block in self:
            extra = block[0](x).sum() if self.peek and isinstance(block, nn.Sequential) else 0
            x = block(x) + extra
        return x


class Table(nn.Module):
    def __init__(self, modules):
        super().__init__()
        self.table = nn.ModuleDict({f"k{i}": m for i, m in enumerate(modules)})

    def forward(self, x):
        return sum(m(x) for m in self.table.values())


class Parts(nn.Module):
    """Runs a Sequential in slices, or child by child."""

    def __init__(self, seq, at, way):
        super().__init__()
        self.seq, self.at, self.way = seq, at, way

    def forward(self, x):
        if self.way == "slices":
            hidden = self.seq[: self.at](x)
            return self.seq[self.at :](hidden) + hidden.sum()
        for child in self.seq if self.way == "iterate" else self.seq._modules.values():
            x = child(x)
        return x


class Images(nn.Module):
    """Convolutions over the rows as over an image of one channel."""

    def __init__(self, seq):
        super().__init__()
        self.seq = seq

    def forward(self, x):
        return self.seq(x.reshape(1, 1, -1, x.shape[-1])).mean(1).reshape(x.shape)


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
