"""torch's own checks, over every operator: a unit is one check of one operator."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
from numerics import run
from operators import CHAINS, CONV, DTYPES, OPS, Case, Op, conv, gated
from steps import SHAPES, arguments_of
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from torch.testing import assert_close, make_tensor

from certify import parts
from certify.parts import Found

ROWS = (
    *OPS,
    *(row for row in CHAINS if row.label in ("mlp relu of 3", "mlp relu2 of 2")),
    *(gated(f, a, d) for d in (False, True) for f, a in (("apart", "silu"), ("stacked", "relu2"))),
    *(CONV, conv("strided", size=(6, 5), stride=(2, 2), padding=(1, 1))),
)


def samples(row: Op, device: str, dtype: torch.dtype) -> list[Case]:
    sizes = SHAPES[:1] if row.name == "conv2d_relu" else (*SHAPES, ((0,), 3, 2))
    seed = int(torch.randint(1 << 31, ()))
    return [row.case(*size, dtype, device, bias, seed) for size in sizes for bias in (True, False)]


def reference(row: Op, device: str) -> None:
    """Every dtype, forward and backward, against plain torch."""
    for dtype in DTYPES:
        for case in samples(row, device, dtype):
            level = 64 * torch.finfo(dtype).eps
            ours, theirs = (run(call, case) for call in (row.function, row.eager))
            assert_close(ours, theirs, rtol=level, atol=level)


def dtypes(row: Op, device: str) -> None:
    """Other dtypes are refused, or do what torch does."""

    def outcome(call: Callable, args: list[torch.Tensor]):
        try:
            return call(*args)
        except Exception as error:
            return error

    for dtype in (torch.int64, torch.bool, torch.complex64):
        args = [t.to(dtype) for t in samples(row, device, torch.float32)[0].inputs]
        ours, theirs = (outcome(call, args) for call in (row.function, row.eager))
        assert type(ours) is type(theirs), f"{dtype}: {ours!r}, torch {theirs!r}"


def noncontiguous(row: Op, device: str) -> None:
    def spread(t: torch.Tensor) -> torch.Tensor:
        return make_tensor(t.shape, dtype=t.dtype, device=device, noncontiguous=True).copy_(t)

    for case in samples(row, device, torch.float64):
        assert_close(run(row.function, case.map(spread)), run(row.eager, case))


def registered(row: Op, device: str) -> None:
    """Schema, fake tensors, and AOTAutograd with dynamic shapes."""
    for case in samples(row, device, torch.float32)[:4]:
        args, kwargs = arguments_of(row, case.leaves())
        opcheck(getattr(torch.ops.fused, row.name).default, args, kwargs)


def gradients(row: Op, device: str) -> None:
    """First, second, forward and batched derivatives, by finite differences."""
    # as torch's own entry of F.conv2d
    options = {"check_batched_grad": True, "nondet_tol": 1e-12 * (row.name == "conv2d_relu")}
    for case in samples(row, device, torch.float64)[:4]:
        assert gradcheck(row.function, case.leaves(), check_forward_ad=True, **options)
        assert gradgradcheck(row.function, case.leaves(), **options)


def devices(row: Op, device: str) -> None:
    """The GPU gives what the CPU gives."""
    for case in samples(row, "cpu", torch.float64):
        found = run(row.function, case.map(lambda t: t.to(device)))
        assert_close([t.cpu() for t in found], run(row.function, case))


CHECKS = (reference, dtypes, noncontiguous, registered, gradients)


class Trial(parts.Trial):
    @staticmethod
    def units(device: str) -> list[tuple[Callable, Op]]:
        checks = (*CHECKS, devices) if device == "cuda" else CHECKS
        return [(check, row) for row in ROWS for check in checks]

    def one(self, seed: int, unit: int) -> Found:
        """Beyond the last, the first again, with other numbers."""
        units = self.units(self.device)
        check, row = units[unit % len(units)]
        torch.manual_seed(seed * 1000 + unit)
        try:
            check(row, self.device)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            name = f"{check.__name__} of {row.name} {row}"
            what = f"{name}: {type(error).__name__}: {text} ({place.line})"
            return {"failures": [what], "checks": {check.__name__: 1}}
        return {"checks": {check.__name__: 1}}
