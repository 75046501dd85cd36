"""Runs our CUDA kernels at awkward sizes, for compute-sanitizer: `kernels.py SEED`, and
`without-hopper` after it for all but those for Hopper GPUs."""

import itertools
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(ROOT)]

import plan_files  # noqa: E402
import torch  # noqa: E402

import torch_fused_linear as tfl  # noqa: E402
from certify import fuzz, fuzz_cases  # noqa: E402
from torch_fused_linear import plans  # noqa: E402

# Of tokens and widths: so many that the rule takes our own products, where they are built.
MANY = 4096
PRODUCTS = ((MANY, 64), (4103, 136), (4161, 72))
SMALL = ((1, 8), (31, 17), (300, 72))  # of tokens and widths
SIZES = (1, 8, 31, 65, 128, 257)
CASES = 30


def small(tokens: int, width: int, activation: str) -> None:
    x, w, v, b = (
        torch.randn(*sizes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for sizes in ((tokens, width), (width, width), (width, width), (width,))
    )

    def step() -> None:
        tfl.mlp(x, [w, v], [b, b], activation=activation).sum().backward()

    with tempfile.TemporaryDirectory() as folder, plans.budget(2), plans.patience(0):
        _, paths = plan_files.run_forced(step, Path(folder), "small", lambda plan: not plan.mask)
        assert paths[0] == "own small kernel", paths
    plans.clear()


def calls(seed: int, hopper: bool) -> int:
    """Own kernels alone, at sizes around those of tiles and warps; own products; those of small
    networks; then cases of the fuzz."""
    ops, count = torch.ops.fused, 0
    for rows, width in itertools.product(SIZES, SIZES):
        for dtype in (torch.float32, torch.bfloat16):
            g, y = (torch.randn(rows, width, device="cuda", dtype=dtype) for _ in range(2))
            for activation in ("relu", "gelu_tanh", "gelu_erf"):
                ops._activation_backward(g, y, activation, True)
                count += 1
            ops._relu_mask(y)
            count += 1
    for tokens, width in PRODUCTS if hopper else ():
        for activation in ("relu", "gelu_tanh", "gelu_erf", "silu"):
            x, w, v, down = (
                torch.randn(n, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for n in (tokens, width, width, width)
            )
            tfl.mlp(x, [w, down], [None, w[0]], activation=activation).sum().backward()
            tfl.gated_mlp(x, w, v, down, activation=activation).sum().backward()
            count += 2
    for (tokens, width), activation in itertools.product(SMALL, ("relu", "gelu_erf")):
        small(tokens, width, activation)
        count += 1
    for unit in range(CASES):
        case = fuzz_cases.Draw(seed, unit, "cuda").case()
        if hopper or case.x.numel() < MANY * case.x.shape[-1]:
            fuzz.of_ours(case)
            count += 1
    torch.cuda.synchronize()
    return count


if __name__ == "__main__":
    plans.budget(0)
    number = calls(random.Random(sys.argv[1]).randrange(2**31), "without-hopper" not in sys.argv)
    print(f"{number} calls")
