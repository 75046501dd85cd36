"""Gated blocks of language models, ``down(silu(gate(x)) * up(x))``: what runs for one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
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


def quack(layers: Sequence[nn.Linear], activation: str, tuned: bool) -> nn.Module:
    """With weights of its own: the rows of gate and up take turns in one; `tuned`: as in rivals."""
    from quack.mlp import MLP

    gate, up, down = (layer.weight.detach() for layer in layers)
    sizes = (gate.shape[1], gate.shape[0], down.shape[0])
    options = {"device": gate.device, "dtype": gate.dtype, "tuned": tuned}
    block = MLP(*sizes, activation="swiglu", **options)
    with torch.no_grad():
        block.fc1.weight.copy_(torch.stack([gate, up], 1).flatten(0, 1))
        block.fc2.weight.copy_(down)
    return block.requires_grad_(layers[0].weight.requires_grad)


BLOCKS: dict[str, Callable[[Sequence[nn.Linear], str], nn.Module]] = {
    "ours": ours,
    "low": partial(ours, memory="low"),
    "fused": fused,
    "eager": Block,
    "liger": liger,
    "quack": partial(quack, tuned=False),
    "quack-tuned": partial(quack, tuned=True),
}
OTHERS = ("liger", "quack", "quack-tuned")  # which need a GPU
