"""A persistent Triton product, x Wᵀ, with one tile for every size: `benchmarks.invariance`'s rival.

A row's bits do not depend on the batch either, because tile and order of the sum are fixed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Tile (rows, features, inner size), stages and warps; shared memory holds the stages and a result.
TILES = {"triton 128x128": (128, 128, 64, 4, 8), "triton 128x256": (128, 256, 64, 3, 8)}
GROUP = 8  # rows of tiles that share the weight's part in the cache


@triton.jit
def persistent(
    x,
    w,
    y,
    rows,
    features,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Each program takes every PROGRAMS-th tile; TMA fills what lies outside with zeros."""
    down = tl.cdiv(rows, BLOCK_M)
    across = tl.cdiv(features, BLOCK_N)
    in_group = GROUP * across
    for tile in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=True):
        first = tile // in_group * GROUP
        height = min(down - first, GROUP)
        m = (first + tile % in_group % height) * BLOCK_M
        n = tile % in_group // height * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(tl.cdiv(inner, BLOCK_K)):
            total = tl.dot(x.load([m, k * BLOCK_K]), w.load([n, k * BLOCK_K]).T, total)
        y.store([m, n], total.to(y.dtype))


def programs_for(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # Triton's interpreter, for tests
    return torch.cuda.get_device_properties(device).multi_processor_count


def product(x: Tensor, w: Tensor, name: str) -> Tensor:
    """x Wᵀ of contiguous matrices, by the tile of this name."""
    block_m, block_n, block_k, stages, warps = TILES[name]
    y = x.new_empty(x.shape[0], w.shape[0])
    blocks = ((x, [block_m, block_k]), (w, [block_n, block_k]), (y, [block_m, block_n]))
    described = [TensorDescriptor.from_tensor(tensor, block) for tensor, block in blocks]
    sizes, programs = (x.shape[0], w.shape[0], x.shape[1]), programs_for(x.device)
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    how = {"GROUP": GROUP, "PROGRAMS": programs, "num_stages": stages, "num_warps": warps}
    persistent[(programs,)](*described, *sizes, **tile, **how)
    return y
