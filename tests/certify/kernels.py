"""Runs our CUDA kernels at awkward sizes, for compute-sanitizer: `kernels.py SEED`."""

import itertools
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(ROOT)]

import torch  # noqa: E402

import torch_fused_linear as tfl  # noqa: E402
from certify import fuzz, fuzz_cases  # noqa: E402
from torch_fused_linear import plans  # noqa: E402

# Of tokens and widths: so many that the rule takes our own products, where they are built.
PRODUCTS = ((4096, 64), (4103, 136), (4161, 72))
SIZES = (1, 3, 8, 31, 64, 65, 127, 128, 129, 257)
CASES = 60


def calls(seed: int) -> int:
    """Own kernels alone, at sizes around those of tiles and warps; own products; then cases of the
    fuzz."""
    ops, count = torch.ops.fused, 0
    for rows, width in itertools.product(SIZES, SIZES):
        for dtype in (torch.float32, torch.bfloat16):
            g, y = (torch.randn(rows, width, device="cuda", dtype=dtype) for _ in range(2))
            for activation in ("relu", "gelu_tanh", "gelu_erf"):
                ops._activation_backward(g, y, activation, True)
                count += 1
            ops._relu_mask(y)
            count += 1
    for tokens, width in PRODUCTS:
        for activation in ("relu", "gelu_tanh", "gelu_erf", "silu"):
            x, w, v, down = (
                torch.randn(n, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for n in (tokens, width, width, width)
            )
            tfl.mlp(x, [w, down], [None, w[0]], activation=activation).sum().backward()
            tfl.gated_mlp(x, w, v, down, activation=activation).sum().backward()
            count += 2
    for unit in range(CASES):
        fuzz.of_ours(fuzz_cases.Draw(seed, unit, "cuda").case())
        count += 1
    torch.cuda.synchronize()
    return count


if __name__ == "__main__":
    plans.budget(0)
    number = calls(random.Random(sys.argv[1]).randrange(2**31))
    print(f"{number} calls")
