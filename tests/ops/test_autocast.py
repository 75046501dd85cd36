"""Autocast: the user's dtype, as torch's own layers have it, with weights cast once."""

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_same, run
from operators import (
    EVERY,
    OPS,
    Case,
    every_op,
    op_param,
    rows,
    without_kinks,
)
from torch import nn
from watching import Calls

import torch_fused_linear as tfl

LOW = [torch.bfloat16, torch.float16]
low_param = pytest.mark.parametrize("low", LOW, ids=["bf16", "fp16"])
ERRORS = (RuntimeError, ValueError, TypeError)


def case_in(low, op, device):
    """fp32, with kinks as wide as the rounding of what is computed in."""
    case = without_kinks(op, op.case((5,), 16, 24, low, device))
    return Case([t.float() for t in op.case((5,), 16, 24, torch.float32, device).inputs], case.g)


@every_op
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


@op_param
def test_gradients_are_those_of_narrow_tensors(op, device):
    case = without_kinks(op, op.case((5,), 16, 24, torch.float32, device))
    low = case.map(lambda t: t.bfloat16())
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = run(op.call, Case(case.inputs, low.g))
    for a, b in zip(got, run(op.call, low)):
        torch.testing.assert_close(a.bfloat16(), b, rtol=2e-2, atol=2e-2)


@every_op
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


@every_op
def test_mixed_dtypes_are_fine_only_inside(op, device):
    """fp32 parameters with bf16 activations: what a network under autocast looks like."""
    x, *parameters = op.case((5,), 16, 24, torch.float32, device).inputs
    half = x.bfloat16()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = op.call(half, *parameters)
        assert y.dtype == torch.bfloat16
        eager = op.eager(half, *parameters).bfloat16()  # on a GPU torch squares in fp32
        torch.testing.assert_close(y, eager, rtol=3e-2, atol=3e-2)
        without_biases = op.call(half, *parameters[: len(parameters) - op.biases])
        assert without_biases.dtype == torch.bfloat16
    with pytest.raises(ERRORS, match=op.name):
        op.call(half, *parameters)


@every_op
def test_double_and_the_other_kind_of_device_are_left_alone(op, device):
    wide = op.case((5,), 16, 24, torch.float64, device).inputs
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y, want = op.call(*wide), op.eager(*wide)
    assert_same([y], [want])
    single = [t.float() for t in wide]
    other = "cuda" if device.type == "cpu" else "cpu"
    before = torch.is_autocast_enabled(other)
    torch.set_autocast_enabled(other, True)  # the switch alone needs no GPU
    try:
        assert op.call(*single).dtype == torch.float32
    finally:
        torch.set_autocast_enabled(other, before)


@rows([op for op in EVERY if op.name not in ("linear_glu", "gated_mlp")])
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
    if op in OPS:  # and shared with torch's own layers
        assert casts(op.call, F.linear).count(tuple(leaves[1].shape)) == 1


def steps(lead, features, dtype, device):
    """Every private operator's call with tensors of one dtype."""
    gen = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=gen).to(dtype=dtype, device=device)

    g, x, z = (normal(lead, features) for _ in "gxz")
    w, b, image = normal(features, features), normal(features), normal(2, 3, 4, 4)
    fused, wanted = torch.ops.fused, [True, True, True]
    return {
        "_linear_aux": lambda: fused._linear_aux(x, w, b, "gelu_tanh"),
        "_linear_relu_bits": lambda: fused._linear_relu_bits(x, w, b),
        "_linear_glu_aux": lambda: fused._linear_glu_aux(x, w, w, b, b, "silu", True),
        "_glu_backward": lambda: fused._glu_backward(g, x, z, "silu", [True] * 5),
        "_relu_mask": lambda: [fused._relu_mask(z)],
        "_activation_backward": lambda: fused._activation_backward(g, z, "gelu_erf", True),
        "_channels_relu_backward": lambda: fused._channels_relu_backward(image, image, True),
        "_linear_backward": lambda: fused._linear_backward(g, x, w, z, "gelu_tanh", wanted),
        "_linear_backward_across": lambda: fused._linear_backward_across(
            g, x, w, z, "relu", wanted, z, "gelu_tanh", True
        ),
    }


@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
@pytest.mark.parametrize("size", [8, 512])
def test_steps_keep_the_dtypes_they_are_given(size, meta, device):
    """Of every size and on every path, though ATen's products within them would be cast."""
    for name, call in steps(size, size, torch.float32, "meta" if meta else device).items():
        want = call()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            got = call()
        assert [t.dtype for t in got] == [t.dtype for t in want], name
        for a, b in zip(got, want) if not meta else ():
            torch.testing.assert_close(a, b, msg=f"{name} computes in another dtype")


def test_a_step_that_is_differentiated_keeps_its_dtypes():
    """The formula takes over there, whose products autocast would cast."""
    g, x, w, z = (torch.randn(8, 8).requires_grad_() for _ in range(4))

    def step():
        return torch.ops.fused._linear_backward(g, x, w, z, "gelu_erf", [True] * 3)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = step()
    assert all(t.requires_grad for t in got)
    assert_same(got, step())


def test_training_under_autocast_learns(device):
    """A few steps of SGD with fp32 parameters: the loss falls as it does for eager layers."""
    fused = nn.Sequential(tfl.FusedLinearReLU(8, 32), tfl.FusedLinear(32, 1)).to(device)
    plain = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    plain.load_state_dict({k.replace("1.", "2."): v for k, v in fused.state_dict().items()})
    x = torch.randn(64, 8, device=device)
    target = x[:, :1] * x[:, 1:2]

    def losses(model):
        optimizer, out = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(20):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = F.mse_loss(model(x).float(), target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    ours, theirs = losses(fused), losses(plain)
    assert ours[-1] < 0.8 * ours[0]
    assert ours == pytest.approx(theirs, rel=0.1)
