"""Torch's semantics at the edges: zero, NaN, infinities, overflow, and the two forms of GELU."""

import math

import operators as ops
import pytest
import torch
from numerics import assert_same, run, with_inference

import torch_fused_linear as tfl
from torch_fused_linear.activations import NUMBERS

NAN, INF = math.nan, math.inf


def specials(dtype):
    tiny = torch.finfo(dtype).tiny
    return [0.0, -0.0, NAN, INF, -INF, 1.0, -1.0, tiny, -tiny, tiny / 2, -tiny / 2]


def column(values, dtype, device):
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)


def assert_same_bits(ours, eager, label=""):
    for k, (a, b) in enumerate(zip(ours, eager, strict=True)):
        where = f"{label} result {k}"
        assert torch.equal(a.isnan(), b.isnan()), f"{where}: NaN in other places than eager"
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=where)


@ops.dtype_param
@ops.rows([ops.LINEAR, ops.RELU])
@pytest.mark.parametrize("where", ["input", "bias", "weight", "grad_output"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_special_values(size, where, op, dtype, device):
    """One special value per token or feature, so that each is seen alone: the other products are
    0 * 0. Large: where a library (oneDNN) takes over, with an activation of its own that eats
    NaN."""
    repeats, depth, widths = (1, 1, (1, 8, 129)) if size == "small" else (24, 160, (129,))
    values = specials(dtype) * repeats
    n = len(values)
    for width in widths:
        x = torch.zeros(n, depth, dtype=dtype, device=device)
        w = torch.zeros(width, depth, dtype=dtype, device=device)
        b = torch.zeros(width, dtype=dtype, device=device)
        g = torch.full((n, width), 2.0, dtype=dtype, device=device)
        x[:, 0] = w[:, 0] = 1.0
        per_feature = column(specials(dtype) * width, dtype, device)[:width]
        if where == "input":
            x[:, :1] = column(values, dtype, device)
        elif where == "bias":
            b = per_feature[:, 0].contiguous()
            x.zero_()
        elif where == "weight":
            w[:, :1] = per_feature
        else:
            x[::2, 0] = -1.0
            g = column(values, dtype, device).repeat(1, width)
        case = ops.Case([x, w, b], g)
        ours, eager = with_inference(op.call, case), with_inference(op.eager, case)
        assert_same_bits(ours, eager, f"{where} {n}x{depth}->{width}")


@ops.every_op
def test_nan_goes_where_it_goes_in_eager(op, device):
    """From every input and the gradient, in both directions, all else staying equal."""
    for where in range(len(op.case().inputs) + 1):
        case = op.case((4,), 6, 8, device=device)
        tensor = (*case.inputs, case.g)[where]
        tensor[(0,) * tensor.dim()] = NAN
        ours, eager = with_inference(op.call, case), with_inference(op.eager, case)
        for k, (a, b) in enumerate(zip(ours, eager, strict=True)):
            assert torch.equal(a.isnan(), b.isnan()), f"{op!r}, NaN in {where}: result {k}"
        assert where == len(case.inputs) or any(t.isnan().any() for t in ours)
        assert_same([t.nan_to_num() for t in ours], [t.nan_to_num() for t in eager])


@ops.dtype_param
@pytest.mark.parametrize("layout", ["", "xw"])
@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_nan_in_a_convolution(where, layout, dtype, device):
    op = ops.conv(channels=8, out=16, padding=(1, 1))
    case = ops.without_kinks(op, ops.channels_last(op.case(dtype=dtype, device=device), layout))
    tensor = (*case.inputs, case.g)[where]
    tensor[(0,) * tensor.dim()] = NAN
    for ours, eager in zip(with_inference(op.call, case), with_inference(op.eager, case)):
        assert torch.equal(ours.isnan(), eager.isnan())
        torch.testing.assert_close(ours, eager, rtol=3e-2, atol=3e-2, equal_nan=True)


def test_zero_times_infinity_is_nan(device):
    """A library may skip products with 0; torch does not, and neither may we."""
    for dtype in ops.LOW_DTYPES:
        x = torch.tensor([[0.0, 1.0]], dtype=dtype, device=device)
        w = torch.tensor([[INF, 1.0]], dtype=dtype, device=device)
        for op in ops.OPS:
            assert op.call(x, w).isnan().all(), (op, dtype)
            assert op.call(x.repeat(256, 80), w.repeat(128, 80)).isnan().all(), (op, dtype, "large")


def test_fp16_overflow_is_that_of_an_fp32_accumulator(device):
    """90000 - 90000 is 0 and not inf - inf; 90000 is inf; ReLU of -inf is 0."""
    half = {"dtype": torch.float16, "device": device}
    x = torch.tensor([[300.0] * 2], **half)
    w = torch.tensor([[300.0, -300.0], [300.0, 300.0], [-300.0, -300.0]], **half)
    for op, last in ((ops.LINEAR, -INF), (ops.RELU, 0.0)):
        assert torch.equal(op.call(x, w), torch.tensor([[0.0, INF, last]], **half)), op
    # gradients that overflow fp16 become inf, as in eager, and not NaN
    case = ops.Case([x, w.abs()], torch.full((1, 3), 6e4, **half))
    for ours, eager in zip(run(ops.LINEAR.call, case), run(ops.LINEAR.eager, case)):
        assert torch.equal(ours.isinf(), eager.isinf()) and not ours.isnan().any()


@ops.dtype_param
def test_relu_gradient_at_exactly_zero(dtype, device):
    """torch's rule by default; the mask's rule, as documented, under the policy 'cublaslt', in a
    layer and in a block."""
    for width in (1, 3, 8, 129):
        x = torch.ones(4, 2, dtype=dtype, device=device)
        w = torch.tensor([[1.0, -1.0]], dtype=dtype, device=device).repeat(width, 1)
        b = torch.zeros(width, dtype=dtype, device=device)
        g = torch.full((4, width), 3.0, dtype=dtype, device=device)
        eye = torch.eye(width, dtype=dtype, device=device)
        for policy, slope in zip(ops.POLICIES, (0.0, 1.0, 0.0), strict=True):
            with tfl.set_policy(policy):
                y, dx, dw, db = run(
                    lambda *t, e=eye: tfl.mlp(t[0], [t[1], e], [t[2], None]), ops.Case([x, w, b], g)
                )
                assert_same(run(ops.RELU.call, ops.Case([x, w, b], g)), [y, dx, dw, db])
            assert not y.any()
            assert torch.equal(db, torch.full_like(b, 12 * slope)), policy
            assert torch.equal(dw, torch.full_like(w, 12 * slope)), policy
            assert torch.equal(dx, (3 * slope * w.sum(0)).expand(4, 2)), policy


@ops.dtype_param
@ops.rows([op for op in ops.EVERY if op.activation == "relu" and op.label != "mlp relu of 1"])
def test_nothing_passes_where_all_is_zero(op, dtype, device):
    """Every policy and layout: the gradient at exactly 0 is 0 for all that ReLU was applied to."""
    for layout in ("", "xw") if op.name == "conv2d_relu" else ("",):
        case = ops.channels_last(op.case(dtype=dtype, device=device, bias=False), layout)
        case.x.zero_()
        for result in run(op.call, case)[:2]:
            assert not result.any()


@ops.dtype_param
@ops.rows([ops.GELU_TANH, ops.GELU_ERF, ops.SILU])
def test_smooth_activations_at_the_edges(op, dtype, device):
    """0, NaN, +inf and large magnitudes as in eager (-inf is 0 * inf: eager's own NaN or 0)."""
    big = 1e4 if dtype != torch.float16 else 1e3
    values = [0.0, -0.0, NAN, INF, big, -big, 30.0, -30.0, torch.finfo(dtype).tiny]
    w, b = torch.ones(8, 1, dtype=dtype, device=device), torch.zeros(8, dtype=dtype, device=device)
    x = column(values, dtype, device)
    want = op.act(x.double()).to(dtype)
    many = torch.nn.functional.pad(x, (0, 159)).repeat(64, 1)  # as a library's own epilogue has it
    wide = torch.nn.functional.pad(w, (0, 159)).repeat(16, 1)
    close = {"rtol": 1e-2, "atol": 1e-6, "equal_nan": True}
    for y in (op.call(x, w, b), op.call(many, wide)[: len(values)]):
        as_eager = torch.isclose(y, op.eager(x, w[:1]), **close)  # oneDNN's erf has NaN at +inf
        assert (as_eager | torch.isclose(y, want.expand_as(y), **close)).all()
    finite = x[~x.isnan() & ~x.isinf()].unsqueeze(1)
    leaf, wide = finite.clone().requires_grad_(), finite.double().requires_grad_()
    op.call(leaf, w[:1], b[:1]).sum().backward()
    op.act(wide).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("activation", ops.ACTS)
def test_gates_at_the_edges(activation, device):
    """Every product of infinity and 0 is NaN, in a row of one number."""
    one = torch.ones(1, 1, dtype=torch.float64, device=device)
    for value in (NAN, INF, -INF, -200.0, 200.0, 0.0, -0.0):
        x = one * value
        got = tfl.linear_glu(x, one, one, activation=activation)
        torch.testing.assert_close(got, ops.ACTS[activation](x) * x, equal_nan=True)


@pytest.mark.parametrize("rows_, features", [(513, 64), (3, 32768)])
def test_the_last_row_is_as_in_torch(rows_, features):
    """A lone row of a half is contiguous, and torch computes it in another way than many rows."""
    both = torch.linspace(-4, 4, rows_ * 2 * features).view(rows_, -1)
    both[-1, ::7] = INF
    gate, up = both.chunk(2, -1)
    fused = torch.ops.fused
    forward = fused._glu(both, None, NUMBERS["gelu_erf"])
    wanted = [True, False, False, False, True]
    backward = fused._glu_backward(up, both, None, NUMBERS["gelu_erf"], wanted)
    want = ops.GELU_ERF.act(gate) * up
    grad_gate = torch.ops.aten.gelu_backward(up * up, gate)
    assert_same_bits([forward, backward[4], backward[0][:, :features]], [want, want, grad_gate])
