"""Parts of a backward by themselves: the gradient of an activation in one pass over memory, that of
a ReLU layer through the layer after it, and a weight's over several micro-batches."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fused_linear as tfl
from benchmarks.cases import DTYPES, KINDS, Case
from benchmarks.rivals import nvmath
from torch_fused_linear.activations import ACTIVATIONS
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
    return lambda: run(data.grad, data.saved, KINDS[case.activation], True)


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
    """Of the later layer dz and weight, of the earlier its output and the mask of that.

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
    layers = (data.dz, data.output, data.weight, None, "none", wanted, saved, "relu", True)
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
    """A weight, and of each micro-batch the input and the gradient of the output."""

    def __init__(self, case: Case, device: torch.device) -> None:
        i, o = case.sizes
        normal = partial(torch.randn, device=device, dtype=DTYPES[case.dtype])
        self.weight = normal(o, i)
        self.batches = [(normal(case.tokens, i), normal(case.tokens, o)) for _ in range(4)]
        self.nbytes = self.weight.nbytes + sum(x.nbytes + g.nbytes for x, g in self.batches)


def accumulated(case: Case, data: MicroBatches, by_product: bool) -> Call:
    """As after ``zero_grad()``: the first micro-batch makes ``.grad``, the others add to it."""
    weight = data.weight.detach().requires_grad_()  # the same memory, a gradient of its own
    weight.grad_dtype = torch.float32 if case.mode == "fp32 grad" else weight.dtype
    if by_product:
        tfl.accumulate_gradients(weight)  # for as long as there is the weight
    layer = tfl.linear if by_product else F.linear
    outputs = [layer(x, weight) for x, _ in data.batches]

    def run() -> Tensor:
        weight.grad = None
        for y, (_, grad) in zip(outputs, data.batches):
            y.backward(grad, retain_graph=True)
        return weight.grad

    return run


ACCUMULATION = {
    "ours": partial(accumulated, by_product=True),
    "eager": partial(accumulated, by_product=False),
}
