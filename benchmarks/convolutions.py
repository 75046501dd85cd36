"""Convolutions with bias and ReLU: which are measured, and what runs for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_fused_linear as tfl
from benchmarks.pages.results import convolution


@dataclass(frozen=True)
class Convolution:
    """A layer of a convolutional network: square kernel and image, zeros around the image so that
    a stride of 1 keeps its size. `last`: image and kernel are channels-last in memory."""

    channels: int
    out: int
    kernel: int
    size: int
    stride: int = 1
    groups: int = 1
    last: bool = True

    @property
    def is_stem(self) -> bool:
        """Returns whether it reads the images themselves, which need no gradient."""
        return self.channels == 3

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def out_size(self) -> int:
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    def __str__(self) -> str:
        return convolution(**vars(self))


# Those of a ResNet-50 for images of 224x224, and what networks beside it are made of.
CONVOLUTIONS = (
    Convolution(3, 64, 7, 224, stride=2),
    Convolution(64, 64, 3, 56),
    Convolution(128, 128, 3, 28),
    Convolution(256, 256, 3, 14),
    Convolution(512, 512, 3, 7),
    Convolution(128, 128, 3, 56, stride=2),
    Convolution(64, 256, 1, 56),
    Convolution(256, 64, 1, 56),
    Convolution(1024, 256, 1, 14),
    Convolution(512, 2048, 1, 7),
    Convolution(128, 128, 3, 28, groups=128),
)
TINY_CONVOLUTIONS = (
    Convolution(3, 8, 7, 16, stride=2),
    Convolution(8, 8, 3, 6),
    Convolution(8, 16, 1, 6),
    Convolution(8, 8, 3, 6, groups=8),
)


# ------------------------------------------------------------------------------------ contenders


def random_layer(conv: Convolution, **options: Any) -> nn.Conv2d:
    sizes = conv.channels, conv.out, conv.kernel, conv.stride, conv.padding
    layer = nn.Conv2d(*sizes, groups=conv.groups, **options)
    return layer.to(memory_format=memory_format(conv))


def random_images(conv: Convolution, batch: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Input, and gradient of the output."""
    shapes = (batch, conv.channels, conv.size), (batch, conv.out, conv.out_size)
    return tuple(
        torch.randn(*lead, size, size, **options).to(memory_format=memory_format(conv))
        for *lead, size in shapes
    )


def memory_format(conv: Convolution) -> torch.memory_format:
    return torch.channels_last if conv.last else torch.contiguous_format


def eager(layers: Sequence[nn.Conv2d], activation: str) -> Callable[[Tensor], Tensor]:
    """As ResNets have it: ReLU writes over the convolution's result."""
    (layer,), relu = layers, nn.ReLU(inplace=True)
    return lambda x: relu(layer(x))


def ours(layers: Sequence[nn.Conv2d], activation: str) -> nn.Module:
    return tfl.FusedConv2dReLU.from_conv(*layers)


LAYERS = {"ours": ours, "eager": eager}


def bare(case: Any, data: Any) -> Callable[[], None]:
    """The convolution alone, without bias and ReLU: what no fusing can be faster than."""
    conv, backward = case.conv, case.mode != "forward"
    x, weight, grad = data.input.detach(), data.layers[0].weight.detach(), data.grad_output
    stride, padding, one = [conv.stride] * 2, [conv.padding] * 2, [1, 1]
    gradient = torch.ops.aten.convolution_backward

    def run() -> None:
        F.conv2d(x, weight, None, stride, padding, one, conv.groups)
        if backward:
            wanted = [not conv.is_stem, True, False]
            gradient(
                grad, x, weight, None, stride, padding, one, False, [0, 0], conv.groups, wanted
            )

    return run
