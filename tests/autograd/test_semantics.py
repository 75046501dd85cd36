"""Torch's semantics at the edges: zero, NaN, infinities, overflow, and the two forms of GELU."""

import itertools
import math

import pytest
import torch
from helpers import (
    DTYPES,
    ERRORS,
    GELU_ERF,
    GELU_TANH,
    LINEAR,
    LOW_DTYPES,
    OPS,
    RELU,
    SILU,
    device_param,
    policy,
    run,
)
from helpers import Case as C

dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
NAN, INF = math.nan, math.inf


def specials(dtype):
    tiny = torch.finfo(dtype).tiny
    return [0.0, -0.0, NAN, INF, -INF, 1.0, -1.0, tiny, -tiny, tiny / 2, -tiny / 2]


def column(values, dtype, device):
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)


def assert_same(ours, eager, label=""):
    for name, a, b in zip(("output", "grad_input", "grad_weight", "grad_bias"), ours, eager):
        same_nan = torch.equal(a.isnan(), b.isnan())
        assert same_nan, f"{label} {name}: NaN in other places than eager"
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=f"{label} {name}")


# --- zero, NaN, infinities --------------------------------------------------------------------


@device_param
@dtype_param
@pytest.mark.parametrize("op", [LINEAR, RELU], ids=repr)
@pytest.mark.parametrize("where", ["input", "bias", "weight", "grad_output"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_special_values_match_torch(size, where, op, dtype, device):
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
        case = C(x, w, b, g)
        label = f"{where} {n}x{depth}->{width}"
        assert_same(run(op.call, case), run(op.eager, case), label)
        with torch.no_grad():  # inference is another path
            assert_same([op.call(x, w, b)], [op.eager(x, w, b)], label)


@device_param
@dtype_param
def test_relu_gradient_at_exactly_zero(dtype, device):
    """torch's rule by default; the mask's rule, as documented, under the policy 'cublaslt'."""
    for width in (1, 3, 8, 129):
        x = torch.ones(4, 2, dtype=dtype, device=device)
        w = torch.tensor([[1.0, -1.0]], dtype=dtype, device=device).repeat(width, 1)
        b = torch.zeros(width, dtype=dtype, device=device)
        g = torch.full((4, width), 3.0, dtype=dtype, device=device)
        for name, slope in (("auto", 0.0), ("eager", 0.0), ("cublaslt", 1.0)):
            with policy(name):
                y, dx, dw, db = run(RELU.call, C(x, w, b, g))
            assert not y.any()
            assert torch.equal(db, torch.full_like(b, 12 * slope)), name
            assert torch.equal(dw, torch.full_like(w, 12 * slope)), name
            assert torch.equal(dx, (3 * slope * w.sum(0)).expand(4, 2)), name


def test_set_policy_is_call_and_context_manager():
    import torch_fused_linear as tfl

    x = torch.zeros(1, 1, requires_grad=True)
    w, b = torch.ones(1, 1), torch.zeros(1)

    def slope():
        return torch.autograd.grad(RELU.call(x, w, b), x)[0].item()

    assert slope() == 0.0
    try:
        tfl.set_policy("cublaslt")
        assert slope() == 1.0
        with tfl.set_policy("eager"):
            assert slope() == 0.0
            with pytest.raises(ZeroDivisionError), tfl.set_policy("cublaslt"):
                1 / 0  # noqa: B018
            assert slope() == 0.0
        assert slope() == 1.0
    finally:
        tfl.set_policy("auto")
    assert slope() == 0.0
    with pytest.raises(ERRORS, match="fastest"):
        tfl.set_policy("fastest")
    assert slope() == 0.0


@device_param
@dtype_param
@pytest.mark.parametrize("op", [GELU_TANH, GELU_ERF, SILU], ids=repr)
def test_gelu_at_the_edges(op, dtype, device):
    """0, NaN, +inf and large magnitudes as in eager (-inf is 0 * inf: eager's own NaN or 0)."""
    big = 1e4 if dtype != torch.float16 else 1e3
    values = [0.0, -0.0, NAN, INF, big, -big, 30.0, -30.0, torch.finfo(dtype).tiny]
    w = torch.ones(8, 1, dtype=dtype, device=device)
    b = torch.zeros(8, dtype=dtype, device=device)
    x = column(values, dtype, device)
    y = op.call(x, w, b)
    want = op.act(x.double()).to(dtype)
    close = {"rtol": 1e-2, "atol": 1e-6, "equal_nan": True}
    as_eager = torch.isclose(y, op.eager(x, w, b), **close)  # oneDNN's erf gives NaN at +inf
    assert (as_eager | torch.isclose(y, want, **close)).all()
    many = torch.nn.functional.pad(x, (0, 159)).repeat(64, 1)  # as a library's own epilogue has it
    wide = torch.nn.functional.pad(w, (0, 159)).repeat(16, 1)
    large = op.call(many, wide)[: len(values)]
    as_eager = torch.isclose(large, op.eager(x, w).repeat(1, 16), **close)
    assert (as_eager | torch.isclose(large, want.expand_as(large), **close)).all()
    finite = x[~x.isnan() & ~x.isinf()].unsqueeze(1)
    leaf = finite.clone().requires_grad_()
    op.call(leaf, w[:1], b[:1]).sum().backward()
    wide = finite.double().requires_grad_()
    op.act(wide).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-2, atol=1e-6)


@device_param
def test_gelu_forms_are_never_swapped(device):
    """tanh and erf differ by up to 4.7e-4; each must be within fp32 rounding of its own, calls
    alternating on one shape (a cache that forgets the activation would answer with the other)."""
    x = torch.linspace(-10, 10, 4001, device=device).unsqueeze(1)
    w, b = torch.ones(1, 1, device=device), torch.zeros(1, device=device)
    exact = {op: op.act(x.double()) for op in (GELU_TANH, GELU_ERF)}
    assert (exact[GELU_TANH] - exact[GELU_ERF]).abs().max() > 4e-4
    for name in ("auto", "cublaslt", "eager") * 2:
        for op in (GELU_TANH, GELU_ERF):
            with policy(name):
                leaf = x.clone().requires_grad_()
                inference, trained = op.call(x, w, b), op.call(leaf, w, b)
                (grad,) = torch.autograd.grad(trained.sum(), leaf)
            wide = x.double().requires_grad_()
            (slope,) = torch.autograd.grad(op.act(wide).sum(), wide)
            assert (inference.double() - exact[op]).abs().max() < 6e-6
            assert (trained.double() - exact[op]).abs().max() < 6e-6
            assert (grad.double() - slope).abs().max() < 2e-5


@device_param
def test_alternating_operators_on_one_shape(device):
    """Same sizes, other epilogue, bias or dtype: each call gets its own kernel."""
    for _ in range(2):
        for dtype, bias, op in itertools.product([torch.float32, torch.bfloat16], [1, 0], OPS):
            x, w = (torch.randn(s, 16, device=device).to(dtype) for s in (8, 24))
            b = torch.randn(24, device=device).to(dtype) if bias else None
            tolerance = 1e-5 if dtype == torch.float32 else 5e-2
            torch.testing.assert_close(
                op.call(x, w, b), op.eager(x, w, b), rtol=tolerance, atol=tolerance
            )


@device_param
def test_fp16_overflow_is_that_of_an_fp32_accumulator(device):
    """90000 - 90000 is 0 and not inf - inf; 90000 is inf; ReLU of -inf is 0."""
    half = {"dtype": torch.float16, "device": device}
    x = torch.tensor([[300.0] * 2], **half)
    w = torch.tensor([[300.0, -300.0], [300.0, 300.0], [-300.0, -300.0]], **half)
    for op in (LINEAR, RELU):
        y = op.call(x, w)
        want = torch.tensor([[0.0, INF, -INF if op is LINEAR else 0.0]], **half)
        assert torch.equal(y, want), op
    # gradients that overflow fp16 become inf, as in eager, and not NaN
    case = C(x, w.abs(), None, torch.full((1, 3), 6e4, **half))
    for ours, eager in zip(run(LINEAR.call, case), run(LINEAR.eager, case)):
        assert torch.equal(ours.isinf(), eager.isinf()) and not ours.isnan().any()


@device_param
def test_zero_times_infinity_is_nan(device):
    """A library may skip products with 0; torch does not, and neither may we."""
    for dtype in LOW_DTYPES:
        x = torch.tensor([[0.0, 1.0]], dtype=dtype, device=device)
        w = torch.tensor([[INF, 1.0]], dtype=dtype, device=device)
        for op in OPS:
            assert op.call(x, w).isnan().all(), (op, dtype)
            wide = x.repeat(256, 80), w.repeat(128, 80)
            assert op.call(*wide).isnan().all(), (op, dtype, "large")
