"""torch's own generic checks, over an OpInfo for each operator and over every layer.

A unit is one check of one operator or layer. It needs expecttest. torch.testing._internal freezes
cuDNN's flags where it is imported, in a process that therefore does nothing else.
"""

from __future__ import annotations

import copy
import math
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._subclasses.fake_utils import CrossRefFakeMode
from torch.testing import assert_close
from torch.testing._internal.common_dtype import floating_types_and
from torch.testing._internal.common_utils import (
    GRADCHECK_NONDET_TOL,
    gradcheck,
    gradgradcheck,
    noncontiguous_like,
)
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.testing._internal.optests import aot_autograd_check, fake_check
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_fused_linear as tfl
from certify.fuzz_cases import eager_step
from certify.fuzz_operators import GATED, Layer, weight_shapes
from certify.fuzz_operators import OPERATORS as FORMS
from certify.parts import Found

FLOATS = floating_types_and(torch.float16, torch.bfloat16)
SHAPES = (((5,), 7, 9), ((2, 3), 8, 16), ((), 4, 12), ((0,), 3, 2), ((1,), 1, 1))
HIDDEN = 6


# --- operators -----------------------------------------------------------------------------------


def random_tensors(shapes, device, dtype, requires_grad=False) -> list[torch.Tensor | None]:
    return [
        None
        if shape is None
        else torch.randn(*shape, dtype=torch.float64)
        .to(device=device, dtype=dtype)
        .requires_grad_(requires_grad)
        for shape in shapes
    ]


def forms_of(name: str) -> Iterator[tuple[tuple, list[tuple], list, tuple, bool]]:
    """Shapes of the input, weights and biases, the convolution's geometry, and whether gate and up
    are in one weight."""
    if name == "conv2d_relu":
        for stride, padding, groups in ((1, 0, 1), (2, 1, 1), (1, 1, 2)):
            geometry = ([stride] * 2, [padding] * 2, [1, 1], groups)
            yield (2, 4, 6, 5), [(6, 4 // groups, 3, 3)], [(6,)], geometry, False
        return
    inner = [HIDDEN] * (name in ("mlp", "gated_mlp"))
    for lead, i, o in SHAPES:
        for is_plain in (True, False):  # else without biases, of gated layers with one weight
            stacked = name in GATED and not is_plain
            weights = weight_shapes(name, [i, *inner, o], stacked)
            yield (*lead, i), weights, [(w[0],) if is_plain else None for w in weights], (), stacked


def info(name: str, activation: str) -> OpInfo:
    """Of an operator with one activation, called with a list of weights and one of biases."""

    def layer(weights, biases, conv, stacked) -> Layer:
        return Layer(name, weights, biases, activation, "default", conv, stacked)

    def samples(op, device, dtype, requires_grad, **kwargs) -> Iterator[SampleInput]:
        for x, weights, biases, conv, stacked in forms_of(name):
            shapes = [[x], weights, biases]
            tensors = [random_tensors(s, device, dtype, requires_grad) for s in shapes]
            yield SampleInput(tensors[0][0], args=(*tensors[1:], conv, stacked))

    return OpInfo(
        f"fused.{name}",
        variant_test_name=activation,
        op=lambda x, *args: FORMS[name].ours(tfl, x, layer(*args)),
        ref=lambda x, *args: FORMS[name].plain(eager_step, x, layer(*args)),
        dtypes=FLOATS,
        dtypesIfCUDA=FLOATS,
        sample_inputs_func=samples,
        supports_forward_ad=True,
        supports_fwgrad_bwgrad=True,
        supports_out=False,
        # as torch's own entry of F.conv2d
        gradcheck_nondet_tol=GRADCHECK_NONDET_TOL if name == "conv2d_relu" else 0.0,
    )


OPERATORS = tuple(info(name, a) for name, form in FORMS.items() for a in form.activations[:2])


def results_of(call: Callable, sample: SampleInput) -> list[torch.Tensor]:
    """The output and all gradients."""
    leaves: list[torch.Tensor] = []

    def leaf(t):
        if t.is_floating_point():
            leaves.append(t.detach().requires_grad_())
            return leaves[-1]
        return t

    y = call(*tree_map_only(torch.Tensor, leaf, (sample.input, *sample.args)))
    g = torch.linspace(-1, 1, y.numel(), device=y.device).to(y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    level = 64 * torch.finfo(dtype).eps
    return {"rtol": level, "atol": level}


def sampled(op: OpInfo, device: str, dtype: torch.dtype, grad=False) -> list[SampleInput]:
    return list(op.sample_inputs(device, dtype, requires_grad=grad))


def reference(op: OpInfo, device: str) -> None:
    """Every dtype that is claimed, forward and backward, against plain torch."""
    for dtype in op.supported_dtypes(device):
        for sample in sampled(op, device, dtype):
            assert_close(results_of(op.op, sample), results_of(op.ref, sample), **tolerance(dtype))


def dtypes(op: OpInfo, device: str) -> None:
    """What is not claimed is refused, or does what torch does."""

    def outcome(call: Callable, args: tuple):
        try:
            return call(*args)
        except Exception as error:
            return error

    for dtype in (torch.int64, torch.bool, torch.complex64):
        for sample in sampled(op, device, torch.float32)[:1]:
            args = (sample.input, *sample.args)
            args = tree_map_only(torch.Tensor, lambda t, to=dtype: t.to(to), args)
            ours, theirs = (outcome(call, args) for call in (op.op, op.ref))
            assert type(ours) is type(theirs), f"{dtype}: {ours!r}, torch {theirs!r}"


def noncontiguous(op: OpInfo, device: str) -> None:
    for sample in sampled(op, device, torch.float64):
        assert_close(results_of(op.op, sample.noncontiguous()), results_of(op.ref, sample))


def fake(op: OpInfo, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for sample in sampled(op, device, dtype):
            fake_check(op.op, (sample.input, *sample.args), {})
            with CrossRefFakeMode():
                op.op(sample.input, *sample.args)


def autocast(op: OpInfo, device: str) -> None:
    for sample in sampled(op, device, torch.float32):
        with torch.autocast(device, torch.bfloat16):
            ours, theirs = (call(sample.input, *sample.args) for call in (op.op, op.ref))
        assert ours.dtype == theirs.dtype == torch.bfloat16
        assert_close(ours, theirs, **tolerance(torch.bfloat16))


def gradients(op: OpInfo, device: str) -> None:
    """First, second, forward and batched derivatives, by finite differences."""
    for sample in sampled(op, device, torch.float64, grad=True)[:4]:
        args = (sample.input, *sample.args)
        tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]

        def call(*given, args=args):
            left = iter(given)
            return op.op(*tree_map_only(torch.Tensor, lambda t: next(left), args))

        options = {"check_batched_grad": True, "nondet_tol": op.gradcheck_nondet_tol}
        assert gradcheck(call, tensors, check_forward_ad=True, **options)
        assert gradgradcheck(call, tensors, **options)


def traced(op: OpInfo, device: str) -> None:
    """AOTAutograd with dynamic shapes, against eager."""
    for sample in sampled(op, device, torch.float32, grad=True)[:2]:
        aot_autograd_check(op.op, (sample.input, *sample.args), {}, dynamic=True)


def devices(op: OpInfo, device: str) -> None:
    """The GPU gives what the CPU gives."""
    for sample in sampled(op, "cpu", torch.float64):
        there = sample.transform(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t)
        found = [t.cpu() for t in results_of(op.op, there)]
        assert_close(found, results_of(op.op, sample))


# --- layers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A layer, what it is made with, and the shape of its input."""

    cls: type[nn.Module]
    args: tuple
    shape: tuple[int, ...]
    options: dict = field(default_factory=dict)

    def built(self, device: str, dtype=torch.float32, **more) -> tuple[nn.Module, torch.Tensor]:
        module = self.cls(*self.args, **self.options, **more).to(device, dtype)
        return module, torch.randn(self.shape).to(device, dtype)


LINEAR = tfl.FusedLinear, tfl.FusedLinearReLU, tfl.FusedLinearGELU, tfl.FusedLinearSiLU
LAYERS = {
    **{
        cls: [
            Case(cls, (i, o), (*lead, i), options)
            for lead, i, o in SHAPES
            for options in ({}, {"bias": False})
        ]
        for cls in (*LINEAR, tfl.FusedLinearReLU2)
    },
    tfl.FusedConv2dReLU: [Case(tfl.FusedConv2dReLU, (4, 6, 3), (2, 4, 6, 5), {"padding": 1})],
    tfl.FusedMLP: [
        Case(tfl.FusedMLP, (5, 7, 4), (3, 5), {"activation": a}) for a in ("relu", "gelu_tanh")
    ],
    tfl.FusedGatedMLP: [
        Case(tfl.FusedGatedMLP, (5, 7, 4), (3, 5), {"bias": bias}) for bias in (True, False)
    ],
}


def factory(case: Case, device: str) -> None:
    """`device` and `dtype` reach every parameter; so does the meta device."""
    for dtype in FLOATS:
        module = case.cls(*case.args, **case.options, device=device, dtype=dtype)
        assert {(p.device.type, p.dtype) for p in module.parameters()} == {(device, dtype)}
    module = case.cls(*case.args, **case.options, device="meta")
    assert all(p.is_meta for p in module.parameters())
    assert not any(p.is_meta for p in module.to_empty(device=device).parameters())


def state(case: Case, device: str) -> None:
    """state_dict, deepcopy and pickle give the same layer again, bit for bit."""
    (module, x), (other, _) = case.built(device), case.built(device)
    other.load_state_dict(module.state_dict(), strict=True)
    for again in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(x), module(x)) and repr(again) == repr(module)


def layer_inputs(case: Case, device: str) -> None:
    """Strided inputs and other memory formats give the same, and gradients reach all parameters."""
    for dtype in FLOATS:
        module, x = case.built(device, dtype)
        want = module(x)
        forms = [noncontiguous_like(x)] if x.numel() else []
        forms += [x.to(memory_format=torch.channels_last)] if x.dim() == 4 else []
        for form in forms:
            assert_close(module(form), want, **tolerance(dtype))
        want.sum().backward()
        assert all(p.grad is not None and p.grad.dtype == dtype for p in module.parameters())


def layer_gradients(case: Case, device: str) -> None:
    module, x = case.built(device, torch.float64)
    if math.prod(x.shape):
        parameters = dict(module.named_parameters())

        def call(x, *values):
            return torch.func.functional_call(module, dict(zip(parameters, values)), (x,))

        tensors = (x.requires_grad_(), *parameters.values())
        assert gradcheck(call, tensors, nondet_tol=GRADCHECK_NONDET_TOL * (x.dim() == 4))


OF_OPERATORS = (reference, dtypes, noncontiguous, fake, autocast, gradients, traced)
OF_LAYERS = (factory, state, layer_inputs, layer_gradients)


class Trial:
    def __init__(self, device: str, measured: bool) -> None:
        torch.set_num_threads(1)
        self.device = device
        checks = (*OF_OPERATORS, *((devices,) if device == "cuda" else ()))
        self.units = [(check, op.full_name, [op]) for op in OPERATORS for check in checks]
        self.units += [
            (check, cls.__name__, cases) for cls, cases in LAYERS.items() for check in OF_LAYERS
        ]

    def one(self, seed: int, unit: int) -> Found:
        """Beyond the last, the first again, with other numbers."""
        check, name, entries = self.units[unit % len(self.units)]
        torch.manual_seed(seed * 1000 + unit)
        try:
            for entry in entries:
                check(entry, self.device)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            what = f"{check.__name__} of {name}: {type(error).__name__}: {text} ({place.line})"
            return {"failures": [what], "checks": {check.__name__: 1}}
        return {"checks": {check.__name__: 1}}

    def verdict(self, found: Found) -> list[str]:
        return []
