"""Autocast: the user's dtype, as nn.Linear has it, with weights cast once."""

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DEVICES,
    OPS,
    RELU,
    Case,
    CountCasts,
    device_param,
    op_param,
    random_case,
    run,
    without_kinks,
)

FLOAT32, LOW = torch.float32, [torch.bfloat16, torch.float16]
low_param = pytest.mark.parametrize("low", LOW, ids=["bf16", "fp16"])


def layer_case(device, dtype=torch.float32):
    return without_kinks(random_case((5,), 16, 24, dtype, device))


@device_param
@op_param
@low_param
def test_dtype_and_values_are_those_of_nn_linear(low, op, device):
    case = layer_case(device)
    with torch.autocast(device, dtype=low):
        y, want = op.call(*case.inputs), op.eager(*case.inputs)
    assert y.dtype == want.dtype == low
    tolerance = 4 * torch.finfo(low).eps
    torch.testing.assert_close(y, want, rtol=tolerance, atol=tolerance)


@device_param
@op_param
@low_param
def test_gradients_come_back_in_the_dtype_of_the_parameters(low, op, device):
    case = layer_case(device)

    def gradients(fn):
        leaves = [t.clone().requires_grad_() for t in case.inputs]
        with torch.autocast(device, dtype=low):
            y = fn(*leaves)
        return torch.autograd.grad(y, leaves, case.g.to(low))  # outside, as is recommended

    for ours, eager in zip(gradients(op.call), gradients(op.eager)):
        assert ours.dtype == torch.float32
        tolerance = 8 * torch.finfo(low).eps
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance * 4)


@device_param
@op_param
def test_nested_regions(op, device):
    case = layer_case(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert op.call(*case.inputs).dtype == torch.bfloat16
        with torch.autocast(device, enabled=False):
            inner = op.call(*case.inputs)
            assert inner.dtype == torch.float32
            torch.testing.assert_close(inner, op.eager(*case.inputs))
        with torch.autocast(device, dtype=torch.float16):
            assert op.call(*case.inputs).dtype == torch.float16
        assert op.call(*case.inputs).dtype == torch.bfloat16
    assert op.call(*case.inputs).dtype == torch.float32


@device_param
@op_param
def test_mixed_dtypes_are_fine_only_inside(op, device):
    """fp32 parameters with bf16 activations: what a network under autocast looks like."""
    case = layer_case(device)
    half = case.x.bfloat16()
    with torch.autocast(device, dtype=torch.bfloat16):
        y = op.call(half, case.w, case.b)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, op.eager(half, case.w, case.b), rtol=2e-2, atol=2e-2)
        assert op.call(half, case.w, None).dtype == torch.bfloat16
    with pytest.raises((RuntimeError, ValueError, TypeError), match=op.name):
        op.call(half, case.w, case.b)


@device_param
@op_param
def test_double_is_left_alone(op, device):
    """Autocast does not touch fp64, as nn.Linear under it shows."""
    case = layer_case(device, torch.float64)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, want = op.call(*case.inputs), op.eager(*case.inputs)
    assert y.dtype == want.dtype == torch.float64
    torch.testing.assert_close(y, want)


@device_param
@op_param
def test_the_other_device_type_is_not_affected(op, device):
    case = layer_case(device)
    other = "cuda" if device == "cpu" else "cpu"
    if other == "cuda" and not torch.cuda.is_available():
        torch.set_autocast_enabled("cuda", True)  # the switch alone needs no GPU
        try:
            assert op.call(*case.inputs).dtype == torch.float32
        finally:
            torch.set_autocast_enabled("cuda", False)
    else:
        with torch.autocast(other, dtype=torch.bfloat16):
            assert op.call(*case.inputs).dtype == torch.float32


@device_param
@op_param
def test_weight_is_cast_once_per_region(op, device):
    """The cast of a parameter is cached for the whole region; that of an activation is not."""
    case = layer_case(device)
    x, w, b = case.x, case.w.clone().requires_grad_(), case.b.clone().requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16), CountCasts() as casts:
        for _ in range(3):
            op.call(x, w, b)
    assert casts.shapes.count(tuple(w.shape)) == 1
    assert casts.shapes.count(tuple(b.shape)) == 1
    assert casts.shapes.count(tuple(x.shape)) == 3
    with torch.autocast(device, dtype=torch.bfloat16), CountCasts() as casts:
        op.call(x, w, b)
        F.linear(x, w, b)  # and shared with torch's own layers
    assert casts.shapes.count(tuple(w.shape)) == 1


def steps(lead, features, dtype, device):
    """Every private operator's call with tensors of one dtype."""
    gen = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=gen).to(dtype=dtype, device=device)

    g, x, z = normal(lead, features), normal(lead, features), normal(lead, features)
    w, b, image = normal(features, features), normal(features), normal(2, 3, 4, 4)
    fused, wanted = torch.ops.fused, [True, True, True]
    return {
        "_linear_aux": lambda: fused._linear_aux(x, w, b, "gelu_tanh"),
        "_linear_relu_bits": lambda: fused._linear_relu_bits(x, w, b),
        "_linear_glu_aux": lambda: fused._linear_glu_aux(x, w, w, b, b, "silu", True),
        "_relu_mask": lambda: fused._relu_mask(z),
        "_activation_backward": lambda: fused._activation_backward(g, z, "gelu_erf", True),
        "_channels_relu_backward": lambda: fused._channels_relu_backward(image, image, True),
        "_linear_backward": lambda: fused._linear_backward(g, x, w, z, "gelu_tanh", wanted),
        "_linear_backward_across": lambda: fused._linear_backward_across(
            g, x, w, z, "relu", wanted, z, "gelu_tanh", True
        ),
    }


@pytest.mark.parametrize("where", [*DEVICES, "meta"])
@pytest.mark.parametrize("size", [8, 512])
def test_steps_keep_the_dtypes_they_are_given(size, where):
    """Of every size and on every path, though ATen's products within them would be cast."""
    device = "cuda" if where == "cuda" else "cpu"
    for name, call in steps(size, size, torch.float32, where).items():
        want = call()
        with torch.autocast(device, dtype=torch.bfloat16):
            got = call()
        if isinstance(got, torch.Tensor):
            got, want = [got], [want]
        assert [t.dtype for t in got] == [t.dtype for t in want], name
        if where != "meta":
            for a, b in zip(got, want):
                torch.testing.assert_close(a, b, msg=f"{name} computes in another dtype")


def test_a_step_that_is_differentiated_keeps_its_dtypes():
    """The formula takes over there, whose products autocast would cast."""
    g, x, w, z = (torch.randn(8, 8).requires_grad_() for _ in range(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.ops.fused._linear_backward(g, x, w, z, "gelu_erf", [True] * 3)
    want = torch.ops.fused._linear_backward(g, x, w, z, "gelu_erf", [True] * 3)
    for a, b in zip(got, want):
        assert a.dtype == torch.float32 and a.requires_grad
        torch.testing.assert_close(a, b)


@device_param
def test_training_under_autocast_learns(device):
    """A few steps of SGD with fp32 parameters: the loss falls as it does for eager layers."""
    import torch_fused_linear as tfl

    torch.manual_seed(0)
    fused = torch.nn.Sequential(tfl.FusedLinearReLU(8, 32), tfl.FusedLinear(32, 1)).to(device)
    eager = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    eager = eager.to(device)
    eager.load_state_dict({k.replace("1.", "2."): v for k, v in fused.state_dict().items()})
    x = torch.randn(64, 8, device=device)
    target = x[:, :1] * x[:, 1:2]

    def losses(model):
        optimizer, out = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(20):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = F.mse_loss(model(x).float(), target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    ours, theirs = losses(fused), losses(eager)
    assert ours[-1] < 0.8 * ours[0]
    assert ours == pytest.approx(theirs, rel=0.1)


@device_param
def test_gradients_under_autocast_against_fp64(device):
    case = layer_case(device)
    low = Case(*(t.bfloat16() for t in (case.x, case.w, case.b, case.g)))
    for op in OPS:
        with torch.autocast(device, dtype=torch.bfloat16):
            got = run(op.call, Case(case.x, case.w, case.b, low.g))
        want = run(op.call, low)
        for a, b in zip(got, want):
            torch.testing.assert_close(a.bfloat16(), b, rtol=2e-2, atol=2e-2)
    assert RELU in OPS and "cpu" in DEVICES
