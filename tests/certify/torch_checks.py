"""torch's own generic checks, over an OpInfo for each operator and a ModuleInfo for each layer.

A unit is one check of one operator or layer. It needs expecttest. torch.testing._internal freezes
cuDNN's flags where it is imported, in a process that therefore does nothing else.
"""

from __future__ import annotations

import copy
import math
import pickle
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch._subclasses.fake_utils import CrossRefFakeMode
from torch.testing import assert_close
from torch.testing._internal.common_dtype import floating_types_and
from torch.testing._internal.common_modules import FunctionInput, ModuleInfo, ModuleInput
from torch.testing._internal.common_utils import (
    GRADCHECK_NONDET_TOL,
    gradcheck,
    gradgradcheck,
    noncontiguous_like,
)
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.testing._internal.optests import aot_autograd_check, fake_check
from torch.utils._pytree import tree_map

import torch_fused_linear as tfl
from certify.parts import Found

FLOATS = floating_types_and(torch.float16, torch.bfloat16)
SHAPES = (((5,), 7, 9), ((2, 3), 8, 16), ((), 4, 12), ((0,), 3, 2), ((1,), 1, 1))


# --- operators -----------------------------------------------------------------------------------


def random_tensors(shapes, device, dtype, requires_grad, scale=1.0):
    return [
        (torch.randn(*shape, dtype=torch.float64) * scale)
        .to(device=device, dtype=dtype)
        .requires_grad_(requires_grad)
        for shape in shapes
    ]


def samples_of_linear(op, device, dtype, requires_grad, **kwargs) -> Iterator[SampleInput]:
    for lead, i, o in SHAPES:
        for bias in (True, False):
            x, w, *b = random_tensors(
                [(*lead, i), (o, i), *([(o,)] if bias else [])], device, dtype, requires_grad
            )
            yield SampleInput(x, args=(w, *(b or [None])))


def samples_of_mlp(op, device, dtype, requires_grad, **kwargs) -> Iterator[SampleInput]:
    for lead, i, o in SHAPES:
        shapes = [(*lead, i), (6, i), (o, 6), (6,), (o,)]
        x, *parameters = random_tensors(shapes, device, dtype, requires_grad)
        for activation in ("gelu_tanh", "gelu_erf", "relu"):
            yield SampleInput(x, args=(parameters[:2], parameters[2:], activation))


def samples_of_glu(op, device, dtype, requires_grad, **kwargs) -> Iterator[SampleInput]:
    for lead, i, o in SHAPES:
        shapes = [(*lead, i), (o, i), (o, i), (o,), (o,)]
        x, *parameters = random_tensors(shapes, device, dtype, requires_grad)
        yield SampleInput(x, args=(*parameters, "silu"))
        x, stacked = random_tensors([(*lead, i), (2 * o, i)], device, dtype, requires_grad)
        yield SampleInput(x, args=(stacked, None, None, None, "gelu_tanh"))


def samples_of_gated_mlp(op, device, dtype, requires_grad, **kwargs) -> Iterator[SampleInput]:
    for lead, i, o in SHAPES:
        shapes = [(*lead, i), (6, i), (6, i), (o, 6), (6,), (6,), (o,)]
        x, *parameters = random_tensors(shapes, device, dtype, requires_grad)
        yield SampleInput(x, args=(*parameters, "silu"))
        shapes = [(*lead, i), (12, i), (o, 6)]
        x, stacked, down = random_tensors(shapes, device, dtype, requires_grad)
        yield SampleInput(x, args=(stacked, None, down, None, None, None, "gelu_erf"))


def samples_of_conv(op, device, dtype, requires_grad, **kwargs) -> Iterator[SampleInput]:
    for stride, padding, groups in ((1, 0, 1), (2, 1, 1), (1, 1, 2)):
        shapes = [(2, 4, 6, 5), (6, 4 // groups, 3, 3), (6,)]
        x, w, b = random_tensors(shapes, device, dtype, requires_grad)
        yield SampleInput(x, args=(w, b, [stride] * 2, [padding] * 2, [1, 1], groups))


ACTIVATIONS = {
    "relu": F.relu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def plain_mlp(x, weights, biases, activation):
    for w, b in zip(weights[:-1], biases[:-1]):
        x = ACTIVATIONS[activation](F.linear(x, w, b))
    return F.linear(x, weights[-1], biases[-1])


def plain_glu(x, gate, up, gate_bias, up_bias, activation):
    if up is None:
        g, u = F.linear(x, gate, gate_bias).chunk(2, -1)
    else:
        g, u = F.linear(x, gate, gate_bias), F.linear(x, up, up_bias)
    return ACTIVATIONS[activation](g) * u


def plain_gated_mlp(x, gate, up, down, gate_bias, up_bias, down_bias, activation):
    return F.linear(plain_glu(x, gate, up, gate_bias, up_bias, activation), down, down_bias)


def info(
    name: str,
    plain: Callable,
    samples: Callable,
    variant: str = "",
    nondet_tol: float = 0.0,
    **kwargs,
) -> OpInfo:
    def call(*args):
        return getattr(tfl, name)(*args, **kwargs)

    return OpInfo(
        f"fused.{name}",
        variant_test_name=variant,
        op=call,
        ref=plain,
        dtypes=FLOATS,
        dtypesIfCUDA=FLOATS,
        sample_inputs_func=samples,
        supports_forward_ad=True,
        supports_fwgrad_bwgrad=True,
        supports_out=False,
        gradcheck_nondet_tol=nondet_tol,
    )


OPERATORS = (
    info("linear", F.linear, samples_of_linear),
    info("linear_relu", lambda *a: F.relu(F.linear(*a)), samples_of_linear),
    info("linear_gelu", lambda *a: F.gelu(F.linear(*a)), samples_of_linear, approximate="none"),
    info(
        "linear_gelu",
        lambda *a: F.gelu(F.linear(*a), approximate="tanh"),
        samples_of_linear,
        "tanh",
    ),
    info("linear_silu", lambda *a: F.silu(F.linear(*a)), samples_of_linear),
    info("linear_glu", plain_glu, samples_of_glu),
    info("gated_mlp", plain_gated_mlp, samples_of_gated_mlp),
    info("mlp", plain_mlp, samples_of_mlp),
    info(
        "conv2d_relu",
        lambda *a: F.relu(F.conv2d(*a)),
        samples_of_conv,
        nondet_tol=GRADCHECK_NONDET_TOL,  # as torch's own entry of F.conv2d
    ),
)


def results_of(call: Callable, sample: SampleInput) -> list[torch.Tensor]:
    """The output and all gradients."""
    args = (sample.input, *sample.args)
    leaves: list[torch.Tensor] = []

    def leaf(t):
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            leaves.append(t.detach().requires_grad_())
            return leaves[-1]
        return t

    y = call(*tree_map(leaf, args))
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
    for dtype in (torch.int64, torch.bool, torch.complex64):
        for sample in sampled(op, device, torch.float32)[:1]:
            args = tree_map(
                lambda t, to=dtype: t.to(to) if isinstance(t, torch.Tensor) else t,
                (sample.input, *sample.args),
            )
            ours, theirs = (outcome(call, args) for call in (op.op, op.ref))
            assert type(ours) is type(theirs), f"{dtype}: {ours!r}, torch {theirs!r}"


def outcome(call: Callable, args: tuple):
    try:
        return call(*args)
    except Exception as error:
        return error


def noncontiguous(op: OpInfo, device: str) -> None:
    for sample in sampled(op, device, torch.float64):
        strided = sample.noncontiguous()
        assert_close(results_of(op.op, strided), results_of(op.ref, sample))


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
        tensors: list[torch.Tensor] = []

        def keep(t, tensors=tensors):
            if isinstance(t, torch.Tensor):
                tensors.append(t)
            return t

        args = (sample.input, *sample.args)
        tree_map(keep, args)

        def call(*given, args=args):
            left = iter(given)
            return op.op(
                *tree_map(lambda t: next(left) if isinstance(t, torch.Tensor) else t, args)
            )

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


def inputs_of_linear(module_info, device, dtype, requires_grad, training, **kwargs):
    for lead, i, o in SHAPES:
        (x,) = random_tensors([(*lead, i)], device, dtype, requires_grad)
        yield ModuleInput(FunctionInput(i, o), FunctionInput(x), desc=f"{lead} {i} {o}")
        yield ModuleInput(FunctionInput(i, o, bias=False), FunctionInput(x), desc="no bias")


def inputs_of_conv(module_info, device, dtype, requires_grad, training, **kwargs):
    (x,) = random_tensors([(2, 4, 6, 5)], device, dtype, requires_grad)
    yield ModuleInput(FunctionInput(4, 6, 3, padding=1), FunctionInput(x))


def inputs_of_mlp(module_info, device, dtype, requires_grad, training, **kwargs):
    (x,) = random_tensors([(3, 5)], device, dtype, requires_grad)
    for activation in ("relu", "gelu_tanh"):
        yield ModuleInput(FunctionInput(5, 7, 4, activation=activation), FunctionInput(x))


def inputs_of_gated_mlp(module_info, device, dtype, requires_grad, training, **kwargs):
    (x,) = random_tensors([(3, 5)], device, dtype, requires_grad)
    for bias in (True, False):
        yield ModuleInput(FunctionInput(5, 7, 4, bias=bias), FunctionInput(x))


LAYERS = (
    ModuleInfo(tfl.FusedLinear, module_inputs_func=inputs_of_linear, dtypes=FLOATS),
    ModuleInfo(tfl.FusedLinearReLU, module_inputs_func=inputs_of_linear, dtypes=FLOATS),
    ModuleInfo(tfl.FusedLinearGELU, module_inputs_func=inputs_of_linear, dtypes=FLOATS),
    ModuleInfo(tfl.FusedLinearSiLU, module_inputs_func=inputs_of_linear, dtypes=FLOATS),
    ModuleInfo(
        tfl.FusedConv2dReLU,
        module_inputs_func=inputs_of_conv,
        dtypes=FLOATS,
        gradcheck_nondet_tol=GRADCHECK_NONDET_TOL,
    ),
    ModuleInfo(tfl.FusedMLP, module_inputs_func=inputs_of_mlp, dtypes=FLOATS),
    ModuleInfo(tfl.FusedGatedMLP, module_inputs_func=inputs_of_gated_mlp, dtypes=FLOATS),
)


def built(layer: ModuleInfo, device: str, dtype=torch.float32, **more):
    """Each layer with what it is called with."""
    for given in layer.module_inputs_func(layer, device, dtype, False, True):
        make = given.constructor_input
        module = layer.module_cls(*make.args, **make.kwargs, **more).to(device, dtype)
        yield module, given.forward_input.args[0], make


def factory(layer: ModuleInfo, device: str) -> None:
    """`device` and `dtype` reach every parameter; so does the meta device."""
    for dtype in FLOATS:
        for _, _, make in built(layer, device):
            module = layer.module_cls(*make.args, **make.kwargs, device=device, dtype=dtype)
            assert {(p.device.type, p.dtype) for p in module.parameters()} == {(device, dtype)}
    for _, _, make in built(layer, device):
        module = layer.module_cls(*make.args, **make.kwargs, device="meta")
        assert all(p.is_meta for p in module.parameters())
        assert not any(p.is_meta for p in module.to_empty(device=device).parameters())


def state(layer: ModuleInfo, device: str) -> None:
    """state_dict, deepcopy and pickle give the same layer again, bit for bit."""
    for module, x, make in built(layer, device):
        want = module(x)
        other = layer.module_cls(*make.args, **make.kwargs).to(device)
        other.load_state_dict(module.state_dict(), strict=True)
        for again in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(again(x), want) and repr(again) == repr(module)


def layer_inputs(layer: ModuleInfo, device: str) -> None:
    """Strided inputs and other memory formats give the same, and gradients reach all parameters."""
    for dtype in FLOATS:
        for module, x, _ in built(layer, device, dtype):
            want = module(x)
            forms = [noncontiguous_like(x)] if x.numel() else []
            forms += [x.to(memory_format=torch.channels_last)] if x.dim() == 4 else []
            for form in forms:
                assert_close(module(form), want, **tolerance(dtype))
            want.sum().backward()
            assert all(p.grad is not None and p.grad.dtype == dtype for p in module.parameters())


def layer_gradients(layer: ModuleInfo, device: str) -> None:
    for module, x, _ in built(layer, device, torch.float64):
        if math.prod(x.shape):
            parameters = dict(module.named_parameters())

            def call(x, *values, module=module, names=tuple(parameters)):
                return torch.func.functional_call(module, dict(zip(names, values)), (x,))

            tensors = (x.requires_grad_(), *parameters.values())
            assert gradcheck(call, tensors, nondet_tol=layer.gradcheck_nondet_tol)


OF_OPERATORS = (reference, dtypes, noncontiguous, fake, autocast, gradients, traced)
OF_LAYERS = (factory, state, layer_inputs, layer_gradients)


class Trial:
    def __init__(self, device: str, measured: bool) -> None:
        torch.set_num_threads(1)
        self.device = device
        checks = (*OF_OPERATORS, *((devices,) if device == "cuda" else ()))
        self.units = [(check, op) for op in OPERATORS for check in checks]
        self.units += [(check, layer) for layer in LAYERS for check in OF_LAYERS]

    def one(self, seed: int, unit: int) -> Found:
        """Beyond the last, the first again, with other numbers."""
        check, entry = self.units[unit % len(self.units)]
        torch.manual_seed(seed * 1000 + unit)
        name = entry.module_cls.__name__ if isinstance(entry, ModuleInfo) else entry.full_name
        try:
            check(entry, self.device)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            what = f"{check.__name__} of {name}: {type(error).__name__}: {text} ({place.line})"
            return {"failures": [what], "checks": {check.__name__: 1}}
        return {"checks": {check.__name__: 1}}

    def verdict(self, found: Found) -> list[str]:
        return []
