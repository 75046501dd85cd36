"""Results beside fp64: run alike, and held to the library's promises of accuracy."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from operators import Case, Op
from torch import Tensor


def run(call: Callable[..., Tensor], case: Case) -> list[Tensor]:
    """[output, gradients of all inputs]; layouts of the inputs are kept."""
    leaves = [t.detach().requires_grad_() for t in case.inputs]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, case.g)]


def with_inference(call: Callable[..., Tensor], case: Case) -> list[Tensor]:
    """The same, and the output without gradients, which takes another path."""
    results = run(call, case)
    with torch.no_grad():
        return [*results, call(*case.inputs)]


def names(case: Case) -> list[str]:
    return ["output", *(f"gradient of input {k}" for k in range(len(case.inputs))), "inference"]


def plain(case: Case) -> Case:
    """Returns the numbers contiguous, because eager cannot take every layout (gelu's backward in
    oneDNN refuses overlapping strides)."""
    return case.map(lambda t: t.contiguous())


def in_double(case: Case) -> Case:
    return case.map(lambda t: t.double().contiguous())


# --- equal ---------------------------------------------------------------------------------------


def assert_same(
    got: Sequence[Tensor | None], want: Sequence[Tensor | None], label="", exact: float = 1e-12
) -> None:
    """fp64 to `exact`; narrower types to their rounding, at the size of what is compared."""
    assert len(got) == len(want), label
    for k, (a, b) in enumerate(zip(got, want)):
        where = f"{label} result {k}"
        assert (a is None) == (b is None), where
        if a is None:
            continue
        a, b = a.detach(), b.detach()
        assert a.shape == b.shape and a.dtype == b.dtype, where
        rounding = exact if a.dtype == torch.float64 else 32 * torch.finfo(a.dtype).eps
        size = float(b.double().abs().max()) if b.numel() else 0.0
        error = float((a.double() - b.double()).abs().max()) if b.numel() else 0.0
        assert error <= rounding * (1 + size), f"{where}: off by {error}, of {size}"


def assert_bits(got, want, label="") -> None:
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"{label} result {k} differs"


def assert_exact(op: Op, case: Case, label="") -> None:
    """Output and every gradient equal the fp64 result exactly (for exact_case data)."""
    truth, ours = with_inference(op.eager, in_double(case)), with_inference(op.call, case)
    for name, mine, want in zip(names(case), ours, truth, strict=True):
        where = f"{op!r} {label} {name}"
        assert mine.dtype == case.g.dtype, f"{where}: dtype {mine.dtype}"
        assert torch.equal(want.to(mine.dtype).double(), want), "test data is not exact"
        assert torch.equal(mine.double(), want), f"{where} is not exact"


def assert_near(op: Op, case: Case, label="", ulps=32) -> None:
    """Output and every gradient within some ulps of fp64: for data whose rounding errors are not
    independent (repeated rows), where slack decides the comparison with eager."""
    truth, ours = with_inference(op.eager, in_double(case)), with_inference(op.call, case)
    columns = names(case), ours, truth, typical_sizes(op, case)
    for name, mine, want, size in zip(*columns, strict=True):
        tolerance = ulps * torch.finfo(mine.dtype).eps
        message = f"{op!r} {label} {name} is not near the fp64 result"
        near = {"rtol": tolerance, "atol": tolerance * size}
        torch.testing.assert_close(mine.double(), want, **near, msg=message)


# --- as exact as eager ---------------------------------------------------------------------------


def typical_sizes(op: Op, case: Case) -> list[float]:
    """How large each result is where nothing cancels: what a rounding error is to be held against
    where a result of few elements happens to be near 0."""
    d = in_double(case)
    if op.product is None:
        return [1 + float(t.abs().mean().nan_to_num()) for t in with_inference(op.eager, d)]
    z = op.product(*d.inputs).detach().requires_grad_()
    (dz,) = torch.autograd.grad(op.act(z), z, d.g)
    squares = [t.square().requires_grad_() for t in d.inputs]
    z = op.product(*squares)
    results = [z.detach(), *torch.autograd.grad(z, squares, dz.square())]
    sizes = [float(t.max().sqrt()) if t.numel() else 0.0 for t in results]
    return [*sizes, sizes[0]]


def ulp(dtype: torch.dtype, magnitude: float) -> float:
    """The distance between neighbouring numbers of this dtype at this magnitude."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(magnitude, info.tiny)))


class Tally:
    """Errors of one kind of result over many cases, in ulps of each case's magnitude."""

    def __init__(self) -> None:
        self.count, self.totals, self.worst = 0, [0.0, 0.0], [0.0, 0.0]

    def add(self, ours: Tensor, eager: Tensor, truth: Tensor, unit: float) -> None:
        self.count += truth.numel()
        for k, result in enumerate((ours, eager)):
            error = (result.double() - truth).abs() / unit
            self.totals[k] += float(error.sum())
            self.worst[k] = max(self.worst[k], float(error.max()))

    def check(self, label: str, worst: bool = True) -> None:
        """`worst`: also of the largest error, where there are enough of them."""
        if self.count:
            (ours, eager), (w_ours, w_eager) = self.totals, self.worst
            # the mean of so many elements is not a matter of slack: a quarter ulp will do there
            message = f"{label}: mean error {ours / self.count} ulp, eager's {eager / self.count}"
            assert ours <= 1.1 * eager + 0.25 * self.count, message
            # the worst of them is: a loose gate
            message = f"{label}: worst error {w_ours} ulp, {w_eager}"
            assert not worst or w_ours <= 2 * w_eager + 1, message


def add_checked(
    tally: Tally,
    mine: Tensor,
    theirs: Tensor,
    truth: Tensor,
    size: float,
    where: str,
    slack: float = 1,
) -> None:
    """Adds the errors of one result to the tally, held to the looser bound of one case at once;
    fp64 is held to its rounding level instead."""
    if not truth.numel():
        return
    unit = ulp(mine.dtype, max(float(truth.abs().max()), size))
    if mine.dtype == torch.float64:
        error = float((mine - truth).abs().max()) / unit
        assert error <= 64, f"{where}: error {error} ulp"
        return
    one = Tally()
    one.add(mine, theirs, truth, unit)
    # a handful of numbers says little: their largest error may be anywhere
    limit = 1.5 * one.worst[1] + slack * (3 if truth.numel() >= 16 else 5)
    assert one.worst[0] <= limit, f"{where}: error {one.worst[0]} ulp, {one.worst[1]}"
    tally.add(mine, theirs, truth, unit)


def assert_contract(cases: Iterable[tuple[Op, str, Case]]) -> None:
    """docs/numerics.md for the output and every gradient: error against fp64 at most 1.1 times
    eager's plus one output ulp, worst case and mean.

    It is a statement about many numbers, so it is held against all cases of a kind of operator
    together; for one case, where slack may have eager's few errors small, a looser bound keeps an
    outlier from drowning. fp64, for which no better reference is at hand, is held to its rounding
    level. Of operators of several layers the worst error is left to slack.
    """
    tallies: dict[tuple, Tally] = defaultdict(Tally)
    for op, label, case in cases:
        columns = (
            names(case),
            with_inference(op.call, case),
            # the layout decides how torch sums up a convolution's gradients
            with_inference(op.eager, case if op.name == "conv2d_relu" else plain(case)),
            with_inference(op.eager, in_double(case)),
            typical_sizes(op, case),
        )
        # each square doubles the relative error that it is given
        slack = 2 if op.activation == "relu2" and op.product is None else 1
        for name, mine, theirs, truth, size in zip(*columns, strict=True):
            where = f"{op!r} {label} {name}"
            assert mine.dtype == theirs.dtype == case.g.dtype, f"{where}: dtype {mine.dtype}"
            assert mine.shape == theirs.shape, f"{where}: shape {mine.shape}"
            assert mine.device == theirs.device, where
            is_layer = op.product is not None
            kind = name if is_layer or name == "output" else "other results"
            key = op.name, op.activation, mine.dtype, kind, is_layer
            add_checked(tallies[key], mine, theirs, truth, size, where, slack)
    for (*label, is_layer), tally in tallies.items():
        tally.check(str(label), worst=is_layer)
