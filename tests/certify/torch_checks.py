"""torch's own generic checks, over an OpInfo for each operator.

A unit is one check of one operator. It needs expecttest. torch.testing._internal freezes cuDNN's
flags where it is imported, in a process that therefore does nothing else.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator

import torch
from operators import CHAINS, CONV, OPS, Op, conv, gated
from torch._subclasses.fake_utils import CrossRefFakeMode
from torch.testing import assert_close
from torch.testing._internal.common_dtype import floating_types_and
from torch.testing._internal.common_utils import GRADCHECK_NONDET_TOL, gradcheck, gradgradcheck
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.testing._internal.optests import aot_autograd_check, fake_check

from certify import parts
from certify.parts import Found

FLOATS = floating_types_and(torch.float16, torch.bfloat16)
SHAPES = (((5,), 7, 9), ((2, 3), 8, 16), ((), 4, 12), ((0,), 3, 2), ((1,), 1, 1))
ROWS = (
    *OPS,
    *(row for row in CHAINS if row.label in ("mlp relu of 3", "mlp relu2 of 2")),
    *(gated(f, a, d) for d in (False, True) for f, a in (("apart", "silu"), ("stacked", "relu2"))),
    *(CONV, conv("strided", size=(6, 5), stride=(2, 2), padding=(1, 1))),
)


def info(row: Op) -> OpInfo:
    """Of an operator, which is called with its tensors."""
    is_conv = row.name == "conv2d_relu"

    def samples(op, device, dtype, requires_grad, **kwargs) -> Iterator[SampleInput]:
        for lead, i, o in SHAPES[:1] if is_conv else SHAPES:
            for bias in (True, False):
                seed = int(torch.randint(1 << 31, ()))
                case = row.case(lead, i, o, dtype, device, bias, seed)
                x, *others = (t.requires_grad_(requires_grad) for t in case.inputs)
                yield SampleInput(x, args=tuple(others))

    return OpInfo(
        f"fused.{row.name}",
        variant_test_name=row.label,
        op=row.function,
        ref=row.eager,
        dtypes=FLOATS,
        dtypesIfCUDA=FLOATS,
        sample_inputs_func=samples,
        supports_forward_ad=True,
        supports_fwgrad_bwgrad=True,
        supports_out=False,
        # as torch's own entry of F.conv2d
        gradcheck_nondet_tol=GRADCHECK_NONDET_TOL if is_conv else 0.0,
    )


OPERATORS = tuple(map(info, ROWS))


def tensors_of(sample: SampleInput) -> list[torch.Tensor]:
    return [sample.input, *sample.args]


def results_of(call: Callable, sample: SampleInput) -> list[torch.Tensor]:
    """The output and all gradients."""
    leaves = [t.detach().requires_grad_() for t in tensors_of(sample)]
    y = call(*leaves)
    g = torch.linspace(-1, 1, y.numel(), device=y.device).to(y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def sampled(op: OpInfo, device: str, dtype: torch.dtype, grad=False) -> list[SampleInput]:
    return list(op.sample_inputs(device, dtype, requires_grad=grad))


def reference(op: OpInfo, device: str) -> None:
    """Every dtype that is claimed, forward and backward, against plain torch."""
    for dtype in op.supported_dtypes(device):
        for sample in sampled(op, device, dtype):
            level = 64 * torch.finfo(dtype).eps
            ours, theirs = (results_of(call, sample) for call in (op.op, op.ref))
            assert_close(ours, theirs, rtol=level, atol=level)


def dtypes(op: OpInfo, device: str) -> None:
    """What is not claimed is refused, or does what torch does."""

    def outcome(call: Callable, args: list[torch.Tensor]):
        try:
            return call(*args)
        except Exception as error:
            return error

    for dtype in (torch.int64, torch.bool, torch.complex64):
        args = [t.to(dtype) for t in tensors_of(sampled(op, device, torch.float32)[0])]
        ours, theirs = (outcome(call, args) for call in (op.op, op.ref))
        assert type(ours) is type(theirs), f"{dtype}: {ours!r}, torch {theirs!r}"


def noncontiguous(op: OpInfo, device: str) -> None:
    for sample in sampled(op, device, torch.float64):
        assert_close(results_of(op.op, sample.noncontiguous()), results_of(op.ref, sample))


def fake(op: OpInfo, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for sample in sampled(op, device, dtype):
            fake_check(op.op, tensors_of(sample), {})
            with CrossRefFakeMode():
                op.op(*tensors_of(sample))


def gradients(op: OpInfo, device: str) -> None:
    """First, second, forward and batched derivatives, by finite differences."""
    options = {"check_batched_grad": True, "nondet_tol": op.gradcheck_nondet_tol}
    for sample in sampled(op, device, torch.float64, grad=True)[:4]:
        assert gradcheck(op.op, tensors_of(sample), check_forward_ad=True, **options)
        assert gradgradcheck(op.op, tensors_of(sample), **options)


def traced(op: OpInfo, device: str) -> None:
    """AOTAutograd with dynamic shapes, against eager."""
    for sample in sampled(op, device, torch.float32, grad=True)[:2]:
        aot_autograd_check(op.op, tensors_of(sample), {}, dynamic=True)


def devices(op: OpInfo, device: str) -> None:
    """The GPU gives what the CPU gives."""
    for sample in sampled(op, "cpu", torch.float64):
        there = sample.transform(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t)
        found = [t.cpu() for t in results_of(op.op, there)]
        assert_close(found, results_of(op.op, sample))


CHECKS = (reference, dtypes, noncontiguous, fake, gradients, traced)


class Trial(parts.Trial):
    @staticmethod
    def units(device: str) -> list[tuple[Callable, OpInfo]]:
        checks = (*CHECKS, devices) if device == "cuda" else CHECKS
        return [(check, op) for op in OPERATORS for check in checks]

    def one(self, seed: int, unit: int) -> Found:
        """Beyond the last, the first again, with other numbers."""
        units = self.units(self.device)
        check, op = units[unit % len(units)]
        torch.manual_seed(seed * 1000 + unit)
        try:
            check(op, self.device)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            name = f"{check.__name__} of {op.full_name}"
            what = f"{name}: {type(error).__name__}: {text} ({place.line})"
            return {"failures": [what], "checks": {check.__name__: 1}}
        return {"checks": {check.__name__: 1}}
