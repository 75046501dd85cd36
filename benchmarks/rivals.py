"""Feed-forward blocks ``fc2(act(fc1(x)))`` of other libraries, on the same layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

Network = Callable[[Tensor], Tensor]


def quack(layers: Sequence[nn.Linear], activation: str, tuned: bool) -> Network:
    """`tuned`: it measures its configurations at the first call; else it takes its own default."""
    from quack.mlp import mlp_func

    fc1, fc2 = layers
    kind = {"relu": "relu", "gelu": "gelu_tanh_approx"}[activation]
    options = {"bias1": fc1.bias, "bias2": fc2.bias, "tuned": tuned}
    return lambda x: mlp_func(x, fc1.weight, fc2.weight, kind, **options)


def flash_attn(layers: Sequence[nn.Linear], activation: str, fused: bool) -> nn.Module:
    """`fused`: GELU too is in the product on Hopper, where its own rule leaves it out."""
    from flash_attn.ops.fused_dense import FusedMLP

    kind = {"relu": "relu", "gelu": "gelu_approx"}[activation]
    options = {"activation": kind, "heuristic": 0 if fused else "auto"}
    with torch.device("meta"):
        block = FusedMLP(layers[0].in_features, layers[0].out_features, **options)
    block.fc1, block.fc2 = layers
    return block


def apex(layers: Sequence[nn.Linear], activation: str) -> nn.Module:
    from apex.fused_dense import FusedDenseGeluDense

    width, hidden = layers[0].in_features, layers[0].out_features
    with torch.device("meta"):
        block = FusedDenseGeluDense(width, hidden, layers[1].out_features)
    block.weight1, block.bias1 = layers[0].weight, layers[0].bias
    block.weight2, block.bias2 = layers[1].weight, layers[1].bias
    return block


def nvmath(a: Tensor, b: Tensor, epilog: str, **inputs: Tensor) -> Callable[[], object]:
    """NVIDIA's form of a product: columns are the batch, so a bias goes by rows."""
    from nvmath.linalg.advanced import Matmul, MatmulEpilog

    product = Matmul(a, b)
    product.plan(epilog=MatmulEpilog[epilog], epilog_inputs=inputs)
    product.autotune(iterations=5)
    return product.execute


BLOCKS: dict[str, Callable[[Sequence[nn.Linear], str], Network]] = {
    "quack": partial(quack, tuned=False),
    "quack-tuned": partial(quack, tuned=True),
    "flash-attn": partial(flash_attn, fused=False),
    "flash-attn-fused": partial(flash_attn, fused=True),
    "apex": apex,
}


def fits(name: str, sizes: Sequence[int], activation: str) -> bool:
    known = ("gelu",) if name in ("flash-attn-fused", "apex") else ("relu", "gelu")
    is_block = len(sizes) == 3 and sizes[0] == sizes[-1]
    return name in BLOCKS and is_block and activation in known
