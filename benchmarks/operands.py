"""The data of a case: what every contender runs on."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import convolutions, gated
from benchmarks.cases import DTYPES, Case

# In a real network other layers run between two calls of this one, and a GPU's cache holds little
# of it. So small cases take turns with several sets of operands, of this many caches' size.
CACHES_TO_FILL = 4
MAX_SETS = 16
CPU_CACHE = 32 << 20


@dataclass
class Operands:
    """One set of data; every contender runs on the same sets, and shares the parameters."""

    input: Tensor
    layers: list[nn.Linear] | list[nn.Conv2d]
    grad_output: Tensor

    @classmethod
    def random(cls, case: Case, device: torch.device) -> Operands:
        options = {"dtype": DTYPES[case.dtype], "device": device}
        grad = case.mode != "forward"
        if case.conv:
            layers = [convolutions.random_layer(case.conv, **options)]
            x, grad_output = convolutions.random_images(case.conv, case.tokens, **options)
        else:
            if case.is_gated:
                layers = gated.random_layers(case.sizes, **options)
            else:
                layers = [nn.Linear(i, o, **options) for i, o in itertools.pairwise(case.sizes)]
            x, grad_output = (
                torch.randn(case.tokens, n, **options) for n in (case.sizes[0], case.sizes[-1])
            )
        for layer in layers:
            layer.requires_grad_(grad)
        is_stem = case.conv is not None and case.conv.is_stem
        return cls(x.requires_grad_(grad and not is_stem), layers, grad_output)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.input, *(p for layer in self.layers for p in layer.parameters())]

    @property
    def nbytes(self) -> int:
        return self.grad_output.nbytes + sum(leaf.nbytes for leaf in self.leaves)


def cache_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_CACHE
    return torch.cuda.get_device_properties(device).L2_cache_size


def sets_needed(bytes_each: float, device: torch.device) -> int:
    return max(1, min(MAX_SETS, math.ceil(CACHES_TO_FILL * cache_bytes(device) / bytes_each)))
