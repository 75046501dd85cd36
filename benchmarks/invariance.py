"""Times the policy "batch_invariant" beside "auto", and beside a Triton product with one tile.

    python -m benchmarks.invariance --json FILE     on a Hopper GPU, a minute
    python -m benchmarks.invariance --tiny          on a CPU, too: does it run?

Blocks (GELU by tanh) and gated blocks (SiLU) in bf16: the forward without gradients, with few
tokens in a CUDA graph as well, and with many the training step. Both policies take turns in one
process on the same data. The product alone is compared with `benchmarks.triton_product`. A CPU has
no batch-invariant products, so that its rows say why and have "auto" alone. Numbers are written
after each row; `--limit` begins none after so many seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, where not installed

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fused_linear as tfl
from benchmarks import suite
from benchmarks.contenders import graph_of, in_turns, step_of
from benchmarks.operands import sets_needed
from benchmarks.results import result
from torch_fused_linear.timing import Call, Contender, Number, clock_for, in_one_line, measure

SIZES = ((768, 3072), (1024, 4096), (4096, 14336))
FEW, MANY = (1, 64, 512), (4096, 8192)  # tokens
PRODUCT = 4096  # tokens, and features on both sides
POLICIES = ("auto", "batch_invariant")
TRITON = ("triton 128x128", "triton 128x256")

# ------------------------------------------------------------------------------------- the data


class Data:
    """A layer, a block or a gated block, and what it reads."""

    def __init__(self, case: dict[str, Any], device: torch.device) -> None:
        make = partial(torch.randn, device=device, dtype=torch.bfloat16)

        def weight(outputs: int, inputs: int) -> Tensor:
            return make(outputs, inputs).div_(inputs**0.5).requires_grad_()

        inputs, hidden = case["sizes"][:2]
        self.activation = case["activation"]
        self.x = make(case["tokens"], inputs).requires_grad_()
        self.weights, self.biases = [weight(hidden, inputs)], []
        if self.activation == "silu":
            self.weights.append(weight(hidden, inputs))
        if self.activation != "none":
            self.weights.append(weight(inputs, hidden))
        if self.activation == "gelu":
            self.biases = [make(n).requires_grad_() for n in (hidden, inputs)]
        self.grad = make(case["tokens"], case["sizes"][-1])
        self.leaves = [self.x, *self.weights, *self.biases]

    @property
    def nbytes(self) -> int:
        return self.grad.nbytes + sum(leaf.nbytes for leaf in self.leaves)

    def forward(self) -> Tensor:
        if self.activation == "none":
            return tfl.linear(self.x, *self.weights)
        if self.activation == "silu":
            return tfl.gated_mlp(self.x, *self.weights)
        return tfl.mlp(self.x, self.weights, self.biases, "gelu_tanh")

    def triton(self, name: str) -> Call:
        """The layer by Triton's product of this name, which has been compared with torch's."""
        from benchmarks.triton_product import product

        x, (weight,) = self.x, self.weights
        got, want = product(x, weight, name), F.linear(x, weight)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        return lambda: product(x, weight, name)


# -------------------------------------------------------------------------------- the contenders


@contextlib.contextmanager
def conditions_of(name: str, mode: str) -> Iterator[None]:
    policy = name if name in POLICIES else "auto"
    with tfl.set_policy(policy), torch.set_grad_enabled(mode == "step"):
        yield


def call_of(name: str, mode: str, data: Data) -> Call:
    if name in TRITON:
        return data.triton(name)
    if mode == "step":
        return step_of(data.forward, data.leaves, data.grad)
    return data.forward if mode == "forward" else graph_of(data.forward)


def contender(name: str, mode: str, sets: list[Data]) -> Contender:
    conditions = partial(conditions_of, name, mode)
    with conditions():
        calls = [call_of(name, mode, data) for data in sets]
    return Contender(name, in_turns(calls), conditions)


# ----------------------------------------------------------------------------------- the command


def cases(tiny: bool, device: torch.device) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yields each case, and the modes in which it runs."""
    about = {"suite": "invariance", "dtype": "bf16"}
    size = 32 if tiny else PRODUCT
    yield {**about, "sizes": [size, size], "tokens": size, "activation": "none"}, ["forward"]
    few, many = ((1,), (16,)) if tiny else (FEW, MANY)
    captured = ["forward, captured"] if device.type == "cuda" else []
    for inputs, hidden in ((32, 64),) if tiny else SIZES:
        for activation in ("gelu", "silu"):
            for tokens in (*few, *many):
                case = {"sizes": [inputs, hidden, inputs], "tokens": tokens}
                more = captured if tokens in few else ["step"]
                yield {**about, **case, "activation": activation}, ["forward", *more]


def numbers_of(
    mode: str, names: tuple[str, ...], sets: list[Data], device: torch.device, seconds: float
) -> tuple[dict[str, Number], dict[str, str]]:
    """Returns the numbers of each contender, and in words why others have none."""
    made, failed = [], {}
    for name in names:
        try:
            made.append(contender(name, mode, sets))
        except Exception as failure:
            failed[name] = in_one_line(failure)
    numbers, more = measure(made, clock_for(device), seconds)
    return numbers, failed | more


def rows(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    begin = time.perf_counter()
    for case, modes in cases(given.tiny, device):
        names = POLICIES + TRITON if case["activation"] == "none" else POLICIES
        torch.manual_seed(0)
        first = Data(case, device)
        more = range(sets_needed(first.nbytes, device) - 1)
        sets = [first, *(Data(case, device) for _ in more)]
        for mode in modes:
            if given.limit and time.perf_counter() - begin > given.limit:
                return
            numbers, failed = numbers_of(mode, names, sets, device, given.seconds)
            row = result({**case, "mode": mode}, "us", numbers)
            yield {**row, "failed": failed} if failed else row


def in_words(row: dict[str, Any]) -> str:
    case, medians = row["case"], {n: v["median"] for n, v in row["numbers"].items()}
    parts = [f"{name} {value:,.1f}" for name, value in medians.items()]
    if set(POLICIES) <= set(medians):
        parts.append(f"of auto's speed {medians['auto'] / medians['batch_invariant']:.2f}")
    parts += [f"{name} failed: {why}" for name, why in row.get("failed", {}).items()]
    what = f"{'→'.join(map(str, case['sizes']))} {case['activation']}, T={case['tokens']}"
    return f"{what}, {case['mode']}, us: " + ", ".join(parts)


def main(arguments: list[str]) -> list[dict[str, Any]]:
    given = suite.parser(__doc__, seconds=0.2).parse_args(arguments)
    return suite.run(rows, in_words, given, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
