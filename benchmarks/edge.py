"""The gradient of a ReLU layer through the layer after it: one product, ReLU's derivative and the
sum of the bias gradient. It is what cuBLASLt's DRELU_BGRAD is made for, and nvmath-python's example
of a backward."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import Case
from torch_fused_linear.timing import Call

NAMES = ("ours", "cublaslt", "eager", "mm", "nvmath")


class Edge:
    """What each contender works on: of the later layer dz and weight, of the earlier its output."""

    def __init__(self, case: Case, device: torch.device) -> None:
        inner, features = case.sizes
        options = {"dtype": torch.float16 if case.dtype == "fp16" else torch.bfloat16}
        normal = partial(torch.randn, device=device, **options)
        self.dz = normal(case.tokens, inner)
        self.weight = normal(inner, features)
        self.output = normal(case.tokens, features).relu_()

    def mask(self) -> Tensor:
        """One bit an element, lowest first, rows padded to 128 bits, as RELU_AUX writes it."""
        place = torch.arange(8, device=self.output.device, dtype=torch.uint8)
        bytes_of_rows = []
        for rows in self.output.split(4096):  # a byte for each bit is a lot
            bits = (rows > 0).to(torch.uint8)
            bits = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 128))
            bytes_of_rows.append((bits.view(len(rows), -1, 8) << place).sum(-1, dtype=torch.uint8))
        return torch.cat(bytes_of_rows)


def ours(edge: Edge, saved: Tensor) -> Call:
    across = torch.ops.fused._linear_backward_across
    wanted = [True, False, False]
    return lambda: across(
        edge.dz, edge.output, edge.weight, None, "none", wanted, saved, "relu", True
    )


def eager(edge: Edge) -> Call:
    def call() -> tuple[Tensor, Tensor]:
        grad = torch.ops.aten.threshold_backward(edge.dz @ edge.weight, edge.output, 0)
        return grad, grad.sum(0)

    return call


def nvmath(edge: Edge) -> Call:
    from nvmath.linalg.advanced import Matmul, MatmulEpilog

    # NVIDIA's form: columns are the batch.
    product = Matmul(edge.weight.t(), edge.dz.t())
    inputs = {"relu_aux": edge.mask().t()}
    product.plan(epilog=MatmulEpilog.DRELU_BGRAD, epilog_inputs=inputs)
    product.autotune(iterations=5)
    return lambda: product.execute()


def call_of(name: str, case: Case, device: torch.device) -> Call:
    edge = Edge(case, device)
    if name == "ours":
        return ours(edge, edge.output)
    if name == "cublaslt":
        return ours(edge, edge.mask())
    if name == "eager":
        return eager(edge)
    if name == "nvmath":
        return nvmath(edge)
    return lambda: torch.mm(edge.dz, edge.weight)
