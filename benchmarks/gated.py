"""Gated blocks of language models, ``down(silu(gate(x)) * up(x))``: what runs for one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_fused_linear as tfl

# Width and hidden features of LLaMA-like models of 0.5, 1 and 8 billion parameters.
SIZES = ((1024, 2816, 1024), (2048, 5632, 2048), (4096, 14336, 4096))


def random_layers(sizes: Sequence[int], **options: Any) -> list[nn.Linear]:
    """Gate, up and down, without biases."""
    width, hidden, out = sizes
    pairs = ((width, hidden), (width, hidden), (hidden, out))
    return [nn.Linear(i, o, bias=False, **options) for i, o in pairs]


class Block(nn.Module):
    """As transformers' LlamaMLP is written."""

    def __init__(self, layers: Sequence[nn.Linear], activation: str = "silu") -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = layers
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def ours(layers: Sequence[nn.Linear], activation: str, memory: str = "default") -> nn.Module:
    return tfl.FusedGatedMLP.from_modules(*layers, activation=activation, memory=memory)


def fused(layers: Sequence[nn.Linear], activation: str) -> nn.Module:
    block = Block(copy.deepcopy(layers))  # as marks are on layers, which others here share
    if not tfl.fuse_(block).fused:
        raise RuntimeError("fuse_ has not found the block")
    return block


def liger(layers: Sequence[nn.Linear], activation: str) -> nn.Module:
    from liger_kernel.transformers import LigerSwiGLUMLP

    hidden, width = layers[0].weight.shape
    sizes = {"hidden_size": width, "intermediate_size": hidden, "hidden_act": "silu"}
    with torch.device("meta"):
        block = LigerSwiGLUMLP(SimpleNamespace(**sizes))
    block.gate_proj, block.up_proj, block.down_proj = layers
    return block


def in_turns(layers: Sequence[nn.Linear]) -> list[nn.Parameter]:
    """Weights of its own: one in which the rows of gate and up take turns, and that of down."""
    gate, up, down = (layer.weight.detach() for layer in layers)
    weights = (torch.stack([gate, up], 1).flatten(0, 1), down.clone())
    return [nn.Parameter(weight, layers[0].weight.requires_grad) for weight in weights]


def quack(layers: Sequence[nn.Linear], activation: str, tuned: bool) -> nn.Module:
    """`tuned`: as in rivals."""
    from quack.mlp import MLP

    both, down = in_turns(layers)
    sizes = (both.shape[1], both.shape[0] // 2, down.shape[0])
    options = {"device": "meta", "dtype": both.dtype, "tuned": tuned}
    block = MLP(*sizes, activation="swiglu", **options)
    block.fc1.weight, block.fc2.weight = both, down
    return block


class CodaBlock(nn.Module):
    def __init__(self, layers: Sequence[nn.Linear], activation: str) -> None:
        from coda.kernels.functional.swiglu import linear_swiglu

        super().__init__()
        self.linear_swiglu = linear_swiglu
        self.both, self.down = in_turns(layers)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.linear_swiglu(x, self.both), self.down)


BLOCKS: dict[str, Callable[[Sequence[nn.Linear], str], nn.Module]] = {
    "ours": ours,
    "low": partial(ours, memory="low"),
    "fused": fused,
    "eager": Block,
    "liger": liger,
    "quack": partial(quack, tuned=False),
    "quack-tuned": partial(quack, tuned=True),
    "coda": CodaBlock,
}
OTHERS = ("liger", "quack", "quack-tuned", "coda")  # which need a GPU
