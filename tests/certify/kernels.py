"""Runs our CUDA kernels at awkward sizes, for compute-sanitizer: `kernels.py SEED`."""

import itertools
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(ROOT)]

import torch  # noqa: E402

from certify import fuzz, fuzz_cases  # noqa: E402
from torch_fused_linear import plans  # noqa: E402

SIZES = (1, 3, 8, 31, 64, 65, 127, 128, 129, 257)
CASES = 60


def calls(seed: int) -> int:
    """Own kernels alone, at sizes around those of tiles and warps; then cases of the fuzz."""
    ops, count = torch.ops.fused, 0
    for rows, width in itertools.product(SIZES, SIZES):
        for dtype in (torch.float32, torch.bfloat16):
            g, y = (torch.randn(rows, width, device="cuda", dtype=dtype) for _ in range(2))
            for activation in ("relu", "gelu_tanh", "gelu_erf"):
                ops._activation_backward(g, y, activation, True)
                count += 1
            ops._relu_mask(y)
            count += 1
    for unit in range(CASES):
        fuzz.of_ours(fuzz_cases.Draw(seed, unit, "cuda").case())
        count += 1
    torch.cuda.synchronize()
    return count


if __name__ == "__main__":
    plans.budget(0)
    number = calls(random.Random(sys.argv[1]).randrange(2**31))
    print(f"{number} calls")
