"""What the tests of the convolution share: its parameters beside the definition, and accuracy."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from helpers import Case, Tally, add_checked, names, run, with_inference
from torch import Tensor

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def full_precision():
    """For the files that import it: cuDNN uses TF32 for fp32 unless told not to, in eager too."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def assert_near(results, wanted, level: float) -> None:
    """Equal up to a part of the largest element: for sums that were taken in another order."""
    for k, (got, want) in enumerate(zip(results, wanted, strict=True)):
        tolerance = level * float(want.detach().abs().max()) if want.numel() else 0
        message = f"result {k}"
        torch.testing.assert_close(
            got, want, rtol=0, atol=tolerance, msg=lambda m, n=message: f"{n}: {m}"
        )


@dataclass(frozen=True)
class Conv:
    """One problem; called with (input, weight, bias), as the operators of helpers.py are."""

    batch: int | None = 2  # None: an image without a batch
    channels: int = 4
    out: int = 6
    size: tuple[int, int] = (7, 6)
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def options(self) -> tuple:
        return self.stride, self.padding, self.dilation, self.groups

    def call(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return torch.ops.fused.conv2d_relu(x, w, b, *self.options)

    def eager(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.relu(self.z(x, w, b))

    def z(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.conv2d(x, w, b, *self.options)

    def case(self, dtype=torch.float64, device="cpu", bias=True, last="", seed=0) -> Case:
        """Normal data, z of magnitude 1; `last` names what is channels-last of "x", "w" and "g"."""
        gen = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=gen, dtype=torch.float64)

        per_group = self.channels // self.groups
        lead = () if self.batch is None else (self.batch,)
        x = normal(*lead, self.channels, *self.size)
        w = normal(self.out, per_group, *self.kernel) / math.sqrt(
            per_group * math.prod(self.kernel)
        )
        b = normal(self.out)
        g = normal(*self.z(x, w, b).shape)
        x, w, b, g = (t.to(device=device, dtype=dtype) for t in (x, w, b, g))
        tensors = {"x": x, "w": w, "g": g}
        for name in last:
            tensors[name] = tensors[name].to(memory_format=LAST)
        return Case(tensors["x"], tensors["w"], b if bias else None, tensors["g"])

    def smooth_case(self, **kwargs) -> Case:
        """fp64 data clear of ReLU's kink, so that finite differences mean something."""
        for seed in range(1000):
            case = self.case(seed=seed, **kwargs)
            if self.z(*case.inputs).abs().min() > 1e-3:
                return case
        raise AssertionError("no such data")


# Each way in which a convolution can be odd; the last ones as they stand in ResNets, but small.
ODD = {
    "plain": Conv(),
    "padded": Conv(padding=(1, 2)),
    "strided": Conv(size=(9, 8), stride=(2, 3), padding=(1, 1)),
    "stride beyond the kernel": Conv(size=(11, 12), kernel=(2, 3), stride=(4, 5)),
    "dilated": Conv(size=(9, 10), dilation=(2, 3)),
    "1x1": Conv(kernel=(1, 1)),
    "1x1 strided": Conv(kernel=(1, 1), stride=(2, 2)),
    "kernel as large as the image": Conv(kernel=(7, 6)),
    "uneven kernel": Conv(kernel=(1, 4), padding=(0, 2)),
    "padding beyond the kernel": Conv(kernel=(2, 2), padding=(3, 3)),
    "groups": Conv(channels=6, groups=3),
    "depthwise": Conv(channels=6, groups=6, out=12, padding=(1, 1)),
    "one channel": Conv(channels=1, out=1),
    "odd channels": Conv(channels=3, out=7),
    "one pixel": Conv(size=(1, 1), kernel=(1, 1)),
    "one image": Conv(batch=1, padding=(1, 1)),
    "no batch": Conv(batch=None, padding=(1, 1)),
    "groups, strided, dilated": Conv(
        size=(12, 11), groups=2, stride=(2, 1), padding=(2, 3), dilation=(2, 1)
    ),
    "stem": Conv(channels=3, out=16, size=(16, 16), kernel=(7, 7), stride=(2, 2), padding=(3, 3)),
    "block": Conv(batch=4, channels=16, out=16, size=(8, 8), padding=(1, 1)),
    "wide": Conv(batch=3, channels=32, out=64, size=(7, 7), kernel=(1, 1)),
}
LAYOUTS = ["", "x", "w", "xw", "xwg", "g"]


def in_double(case: Case) -> Case:
    parts = (case.x, case.w, case.b, case.g)
    return Case(*(None if t is None else t.double() for t in parts))


def without_kinks(conv: Conv, case: Case) -> Case:
    """The same case with a zero gradient where z is within rounding of 0: there the sign of z, and
    with it ReLU's derivative, is a matter of rounding and no error."""
    z = conv.z(*in_double(case).inputs)
    near = z.abs() <= 4 * torch.finfo(case.x.dtype).eps * (1 + z.abs().mean())
    return Case(case.x, case.w, case.b, case.g.masked_fill(near, 0))


def typical_sizes(conv: Conv, case: Case) -> list[float]:
    """How large each result is where nothing cancels: the root of the sum of squares."""
    d = in_double(case)
    squares = [t.square().requires_grad_() for t in d.inputs]
    dz = d.g.masked_fill(conv.z(*d.inputs) <= 0, 0)
    z = conv.z(*squares)
    results = [z, *torch.autograd.grad(z, squares, dz.square())]
    return [float(r.detach().max().sqrt()) if r.numel() else 0.0 for r in results]


def assert_contract(conv: Conv, cases, tallies=None) -> dict[str, Tally]:
    """docs/numerics.md, as helpers.assert_contract has it for linear layers: errors against fp64 at
    most 1.1 times eager's plus one output ulp, over all cases together; fp64 at rounding level."""
    tallies = defaultdict(Tally) if tallies is None else tallies
    for label, case in cases:
        wide = in_double(case)
        columns = (
            [*names(case), "inference"],
            with_inference(run(conv.call, case), case, conv.call),
            with_inference(run(conv.eager, case), case),
            with_inference(run(conv.eager, wide), case),
            with_inference(typical_sizes(conv, case), case),
        )
        for name, mine, theirs, truth, size in zip(*columns, strict=True):
            where = f"{label} {name}"
            assert mine.dtype == case.x.dtype and mine.shape == theirs.shape, where
            assert mine.device == theirs.device, where
            add_checked(tallies[f"{mine.dtype} {name}"], mine, theirs, truth, size, where)
    return tallies
