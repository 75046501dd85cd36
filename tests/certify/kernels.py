"""Runs our CUDA kernels at awkward sizes, for compute-sanitizer. `kernels.py plan FOLDER` measures
plans of the small kernels, outside the sanitizer; `kernels.py run FOLDER SEED PART...` runs them
and other parts."""

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(ROOT)]

import plan_files  # noqa: E402
import torch  # noqa: E402

import torch_fused_linear as tfl  # noqa: E402
from certify import fuzz, fuzz_cases  # noqa: E402
from torch_fused_linear import plans  # noqa: E402
from torch_fused_linear.activations import NUMBERS  # noqa: E402

MANY, FEW = 4096, 512  # tokens: rules take our own products from these, and never below those
PRODUCTS = ((MANY, 64), (4103, 136), (4161, 72))
SMALL = ((1, 8), (31, 17), (300, 72))  # of tokens and widths
SIZES = (1, 31, 64, 257)
CASES = 30


def operands(*shapes: Sequence[int], dtype=torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]


def small_networks(folder: Path) -> Iterator[tuple[Callable[[], None], Path]]:
    """A step and the file of its plans, for each size and activation."""
    for (tokens, width), activation in itertools.product(SMALL, ("relu", "gelu_erf")):
        x, w, v, b = operands((tokens, width), (width, width), (width, width), (width,))

        def step(x=x, w=w, v=v, b=b, activation=activation) -> None:
            tfl.mlp(x, [w, v], [b, b], activation=activation).sum().backward()

        yield step, folder / f"{tokens}_{width}_{activation}"


def plan(folder: Path) -> None:
    with plans.budget(2), plans.patience(0):
        for step, path in small_networks(folder):
            plan_files.write_forced(step, path, "small", lambda plan: not plan.mask)


# --- parts, which stop after each call to be counted ---------------------------------------------


def alone() -> Iterator[None]:
    """Kernels of activations, at sizes around those of tiles and warps."""
    for *size, dtype in itertools.product(SIZES, SIZES, (torch.float32, torch.bfloat16)):
        g, y = (t.detach() for t in operands(size, size, dtype=dtype))
        for activation in ("relu", "gelu_tanh", "gelu_erf"):
            yield torch.ops.fused._activation_backward(g, y, NUMBERS[activation], True)
        yield torch.ops.fused._relu_mask(y)


def small(folder: Path) -> Iterator[None]:
    for step, path in small_networks(folder):
        _, paths = plan_files.run_with(path, step)
        assert paths[0] == "own small kernel", paths
        yield
    plans.clear()


def hopper() -> Iterator[None]:
    """Our own products for Hopper GPUs."""
    for tokens, width in PRODUCTS:
        for activation in ("relu", "gelu_tanh", "gelu_erf", "silu"):
            x, w, v, down = operands((tokens, width), *[(width, width)] * 3)
            yield tfl.mlp(x, [w, down], [None, w[0]], activation=activation).sum().backward()
            yield tfl.gated_mlp(x, w, v, down, activation=activation).sum().backward()
        yield torch.ops.fused._linear_relu_bits(x, w, down[0])


def cases(seed: int, below: float) -> Iterator[None]:
    """Cases of the fuzz with fewer tokens."""
    for unit in range(CASES):
        case = fuzz_cases.Draw(seed, unit, "cuda").case()
        if case.x.numel() < below * case.x.shape[-1]:
            yield fuzz.of_ours(case)


def run(folder: Path, seed: int, parts: list[str]) -> int:
    calls = {
        "alone": alone,
        "small": lambda: small(folder),
        "hopper": hopper,
        "cases": lambda: cases(seed, math.inf if "hopper" in parts else FEW),
    }
    count = sum(1 for part in parts for _ in calls[part]())
    torch.cuda.synchronize()
    return count


if __name__ == "__main__":
    plans.budget(0)
    what, folder, *rest = sys.argv[1:]
    if what == "plan":
        plan(Path(folder))
    else:
        seed, *parts = rest
        print(f"{run(Path(folder), random.Random(seed).randrange(2**31), parts)} calls")
