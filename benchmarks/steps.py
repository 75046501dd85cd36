"""Parts of a backward by themselves: the gradient of an activation in one pass over memory, and
that of a ReLU layer through the layer after it; and a block's steps over several micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fused_linear as tfl
from benchmarks.cases import DTYPES, KINDS, Case
from benchmarks.rivals import nvmath
from torch_fused_linear.activations import ACTIVATIONS, NUMBERS
from torch_fused_linear.timing import Call

aten = torch.ops.aten


def random_mask(rows: int, columns: int, device: torch.device) -> Tensor:
    """One bit an element, rows padded to whole 16 bytes, as RELU_AUX writes it."""
    padded = -columns % 128 + columns
    return torch.randint(0, 256, (rows, padded // 8), dtype=torch.uint8, device=device)


# ------------------------------------------------------------------- gradient of an activation


class OnePass:
    """A gradient, and what the backward reads beside it: eager, which has no masks, the values."""

    def __init__(self, case: Case, device: torch.device) -> None:
        rows, columns = case.tokens, case.sizes[0]
        self.values = torch.randn(rows, columns, dtype=DTYPES[case.dtype], device=device)
        if case.mode != "from input":
            self.values.relu_()
        is_mask = case.mode == "from mask"
        self.saved = random_mask(rows, columns, device) if is_mask else self.values
        self.grad = torch.randn_like(self.values)
        self.nbytes = 3 * self.grad.nbytes


def ours_in_one_pass(case: Case, data: OnePass) -> Call:
    run = torch.ops.fused._activation_backward
    return lambda: run(data.grad, data.saved, NUMBERS[KINDS[case.activation]], True)


def eager_in_passes(case: Case, data: OnePass) -> Call:
    kind = KINDS[case.activation]

    def run() -> Tensor:
        if kind == "relu":
            dz = aten.threshold_backward(data.grad, data.values, 0)
        else:
            dz = aten.gelu_backward(data.grad, data.values, **ACTIVATIONS[kind].options)
        return dz.sum(0)

    return run


def copy(case: Case, data: OnePass) -> Call:
    target = torch.empty_like(data.grad)
    return lambda: target.copy_(data.grad)


ONE_PASS = {"ours": ours_in_one_pass, "eager": eager_in_passes, "copy": copy}


# --------------------------------------------------------------------------- through a layer


class Edge:
    """The later layer's dz and weight, and the earlier one's output and its mask.

    One product, ReLU's derivative and the sum of the bias gradient: what cuBLASLt's DRELU_BGRAD is
    made for, and nvmath-python's example of a backward.
    """

    nbytes = float("inf")  # no cache holds it

    def __init__(self, case: Case, device: torch.device) -> None:
        inner, features = case.sizes
        normal = partial(torch.randn, device=device, dtype=DTYPES[case.dtype])
        self.dz, self.weight = normal(case.tokens, inner), normal(inner, features)
        self.output = normal(case.tokens, features).relu_()
        self.mask = random_mask(case.tokens, features, device)


def ours_through(case: Case, data: Edge, of_mask: bool) -> Call:
    across, wanted = torch.ops.fused._linear_backward_across, [True, False, False]
    saved = data.mask if of_mask else data.output
    none, relu = NUMBERS["none"], NUMBERS["relu"]
    layers = (data.dz, data.output, data.weight, None, none, wanted, saved, relu, True)
    return lambda: across(*layers)


def eager_through(case: Case, data: Edge) -> Call:
    def call() -> tuple[Tensor, Tensor]:
        grad = aten.threshold_backward(data.dz @ data.weight, data.output, 0)
        return grad, grad.sum(0)

    return call


def nvmath_through(case: Case, data: Edge) -> Call:
    return nvmath(data.weight.t(), data.dz.t(), "DRELU_BGRAD", relu_aux=data.mask.t())


def product_alone(case: Case, data: Edge) -> Call:
    return lambda: torch.mm(data.dz, data.weight)


EDGE = {
    "ours": partial(ours_through, of_mask=False),
    "cublaslt": partial(ours_through, of_mask=True),
    "eager": eager_through,
    "mm": product_alone,
    "nvmath": nvmath_through,
}


# ---------------------------------------------------------------------- over micro-batches


class MicroBatches:
    """A block's parameters, and of each micro-batch the input and the gradient of the output."""

    def __init__(self, case: Case, device: torch.device) -> None:
        normal = partial(torch.randn, device=device, dtype=DTYPES[case.dtype])
        ends = [*itertools.pairwise(case.sizes)]
        self.parameters = [p for i, o in ends for p in (normal(o, i) / i**0.5, normal(o))]
        sizes = case.sizes[0], case.sizes[-1]
        self.batches = [[normal(case.tokens, n) for n in sizes] for _ in range(4)]
        tensors = itertools.chain(self.parameters, *self.batches)
        self.nbytes = sum(tensor.nbytes for tensor in tensors)


def torchs_block(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w, b), approximate="tanh"), v, c)


def our_block(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return tfl.linear(tfl.linear_gelu(x, w, b), v, c)


def accumulated(
    case: Case, data: MicroBatches, block: Callable[..., Tensor], by_products: bool
) -> Call:
    """Steps as after ``zero_grad()``: the first makes ``.grad``, the others add to it."""
    # the same memory, gradients of their own
    parameters = [p.detach().requires_grad_() for p in data.parameters]
    for p in parameters:
        p.grad_dtype = torch.float32 if case.mode == "fp32 grad" else p.dtype
    if by_products:
        tfl.accumulate_gradients(parameters)  # for as long as they are there

    def run() -> list[Tensor]:
        for p in parameters:
            p.grad = None
        for x, grad in data.batches:  # the input's gradient is made as well
            block(x.detach().requires_grad_(), *parameters).backward(grad)
        return [p.grad for p in parameters]

    return run
