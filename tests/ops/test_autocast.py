"""Autocast: the user's dtype, as torch's own layers have it, with weights cast once."""

from functools import partial

import operators as ops
import pytest
import torch
import torch.nn.functional as F
from helpers import setting
from numerics import assert_same
from steps import STEPS
from torch.utils._pytree import tree_leaves
from watching import Calls

from torch_fused_linear.activations import NUMBERS

LOW = [torch.bfloat16, torch.float16]
low_param = pytest.mark.parametrize("low", LOW, ids=["bf16", "fp16"])


def case_in(low, op, device):
    """fp32, with kinks as wide as the rounding of what is computed in."""
    case = ops.without_kinks(op, op.case((5,), 16, 24, low, device))
    return ops.Case(op.case((5,), 16, 24, torch.float32, device).inputs, case.g)


@ops.every_op
@low_param
def test_dtype_values_and_gradients_are_those_of_torchs_layers(low, op, device):
    """Gradients come back in the dtype of the parameters, whether asked for inside or outside."""
    case = case_in(low, op, device)

    def both(call):
        leaves = case.leaves()
        with torch.autocast(device.type, dtype=low):
            y = call(*leaves)
        return [y, *torch.autograd.grad(y, leaves, case.g)]

    ours, eager = both(op.call), both(op.eager)
    eager[0] = eager[0].to(low)  # on a GPU torch squares in fp32
    with torch.autocast(device.type, dtype=low), torch.no_grad():
        inference = op.call(*case.inputs)
    assert [t.dtype for t in (*ours, inference)] == [low, *[torch.float32] * len(case.inputs), low]
    level = 16 * torch.finfo(low).eps
    for a, b in zip([*ours, inference], [*eager, eager[0]]):
        torch.testing.assert_close(a, b, rtol=level, atol=level * (1 + b.abs().max().item()))


@ops.every_op
def test_nested_regions(op, device):
    inputs = op.case((5,), 16, 24, torch.float32, device).inputs
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert op.call(*inputs).dtype == torch.bfloat16
        with torch.autocast(device.type, enabled=False):
            inner = op.call(*inputs)
            assert inner.dtype == torch.float32
            assert_same([inner], [op.eager(*inputs)])
        with torch.autocast(device.type, dtype=torch.float16):
            assert op.call(*inputs).dtype == torch.float16
        assert op.call(*inputs).dtype == torch.bfloat16
    assert op.call(*inputs).dtype == torch.float32


@ops.every_op
def test_mixed_dtypes_are_fine_only_inside(op, device):
    """fp32 parameters with bf16 activations: what a network under autocast looks like."""
    x, *parameters = op.case((5,), 16, 24, torch.float32, device).inputs
    half = x.bfloat16()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = op.call(half, *parameters)
        assert y.dtype == torch.bfloat16
        eager = op.eager(half, *parameters).bfloat16()  # on a GPU torch squares in fp32
        torch.testing.assert_close(y, eager, rtol=3e-2, atol=3e-2)
        assert op.call(half, *parameters[: len(parameters) - op.biases]).dtype == torch.bfloat16
    with pytest.raises(ops.ERRORS, match=op.name):
        op.call(half, *parameters)


@ops.every_op
def test_double_and_the_other_kind_of_device_are_left_alone(op, device):
    wide = op.case((5,), 16, 24, torch.float64, device).inputs
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y, want = op.call(*wide), op.eager(*wide)
    assert_same([y], [want])
    single = [t.float() for t in wide]
    other = "cuda" if device.type == "cpu" else "cpu"
    with setting(partial(torch.set_autocast_enabled, other), True, False):  # which needs no GPU
        assert op.call(*single).dtype == torch.float32


@ops.rows([op for op in ops.EVERY if op.name not in ("linear_glu", "gated_mlp")])
def test_a_parameter_is_cast_once_per_region(op, device):
    """The cast of a parameter is cached for the whole region; that of an activation is not."""
    leaves = op.case((5,), 16, 24, torch.float32, device).leaves()
    x = leaves[0].detach()

    def casts(*calls):
        with torch.autocast(device.type, dtype=torch.bfloat16), Calls() as seen:
            for call in calls:
                call(x, *leaves[1:])
        return seen.shapes_of("aten::_to_copy")

    shapes = casts(op.call, op.call, op.call)
    alike = [tuple(leaf.shape) for leaf in leaves[1:]]
    for shape in alike:
        assert shapes.count(shape) == alike.count(shape)
    assert shapes.count(tuple(x.shape)) == 3
    if op in ops.OPS:  # and shared with torch's own layers
        assert casts(op.call, F.linear).count(tuple(leaves[1].shape)) == 1


@pytest.mark.parametrize("place", ["real", "meta"])
@pytest.mark.parametrize("name", sorted({*STEPS} - {"_ensemble_linear"}))  # which is below it
def test_steps_keep_the_dtypes_they_are_given(name, place, device):
    """Steps of every size and path keep their dtypes, though autocast casts ATen's products."""
    place = device if place == "real" else place

    def results(args):
        given = getattr(torch.ops.fused, name)(*args)
        return tree_leaves(args[2] if name == "_weight_gradient" else given)

    for size in (8, 512):
        case = ops.LINEAR.case((size,), size, size, torch.float32, place)
        given = [list(STEPS[name](case.x, case.w, case.b, case.g)) for _ in "ab"]
        for (args, _), (again, _) in list(zip(*given))[:: 1 if size == 8 else 4]:
            want = results(args)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                got = results(again)
            assert [t.dtype for t in got] == [t.dtype for t in want], name
            for a, b in zip(got, want) if place != "meta" else ():
                torch.testing.assert_close(a, b, msg=f"{name} computes in another dtype")


def test_a_step_that_is_differentiated_keeps_its_dtypes():
    """The formula takes over there, whose products autocast would cast."""
    g, x, w, z = (torch.randn(8, 8).requires_grad_() for _ in range(4))

    def step():
        return torch.ops.fused._linear_backward(g, x, w, z, NUMBERS["gelu_erf"], [True] * 3)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = step()
    assert all(t.requires_grad for t in got)
    assert_same(got, step())
