"""Inputs, weights, biases and gradients of any strides and alignment give the same results."""

import itertools

import pytest
import torch
from helpers import (
    DTYPES,
    GELU_ERF,
    GELU_TANH,
    LINEAR,
    OPS,
    RELU,
    RELU2,
    SILU,
    Case,
    assert_contract,
    assert_exact,
    assert_near,
    device_param,
    exact_case,
    one_thread,  # noqa: F401
    op_param,
    policy,
    random_case,
    run,
    without_kinks,
)
from layouts import MATRIX_LAYOUTS, ND_LAYOUTS, VECTOR_LAYOUTS

import torch_fused_linear as tfl

dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
policy_param = pytest.mark.parametrize("policy_name", ["auto", "cublaslt"])
SHAPES = [(5, 7, 9), (16, 64, 128)]  # nothing aligned; everything aligned but for the layout

# Activations whose slope makes no error larger.
moderate_param = pytest.mark.parametrize("op", [op for op in OPS if op is not RELU2], ids=repr)


def laid_out(case, x="contiguous", w="contiguous", b="contiguous", g="contiguous"):
    bias = None if case.b is None else VECTOR_LAYOUTS[b](case.b)
    return Case(ND_LAYOUTS[x](case.x), MATRIX_LAYOUTS[w](case.w), bias, ND_LAYOUTS[g](case.g))


@device_param
@dtype_param
@policy_param
@pytest.mark.parametrize("op", [LINEAR, RELU], ids=repr)
def test_every_pair_of_layouts_is_exact(op, policy_name, dtype, device):
    """Input x weight x gradient layouts on integer data: equal to fp64, bit for bit."""
    layouts = list(MATRIX_LAYOUTS)
    vectors = itertools.cycle(VECTOR_LAYOUTS)
    with policy(policy_name):
        for k, (x, w, g) in enumerate(itertools.product(layouts, layouts, layouts)):
            if device == "cpu" and k % 3 != (k // 100) % 3:  # a third of them, every pair met
                continue
            b = next(vectors)
            t, i, o = SHAPES[k % 2]
            case = laid_out(exact_case(t, i, o, dtype, device), x, w, b, g)
            assert_exact(op, case, f"{t}x{i}->{o} x={x} w={w} b={b} g={g}")


@device_param
@dtype_param
@policy_param
def test_large_operands_in_every_layout(policy_name, dtype, device):
    """Large enough for whichever library is only worth its call there, one operand at a time."""
    case = exact_case(64, 256, 288, dtype, device)
    smooth = without_kinks(random_case(64, 256, 288, dtype, device))
    with policy(policy_name):
        for name in MATRIX_LAYOUTS:
            for where in ({"x": name}, {"w": name}, {"g": name}):
                for op in (LINEAR, RELU):
                    assert_exact(op, laid_out(case, **where), f"large {where}")
                for op in (GELU_TANH, GELU_ERF, SILU, RELU2):
                    assert_near(op, laid_out(smooth, **where), f"large {where}")
        for name in VECTOR_LAYOUTS:
            for op in (LINEAR, RELU):
                assert_exact(op, laid_out(case, b=name), f"large bias {name}")


@device_param
@dtype_param
@pytest.mark.parametrize("op", [GELU_TANH, GELU_ERF, SILU, RELU2], ids=repr)
def test_gelu_layouts_against_fp64(op, dtype, device):
    for k, (a, b) in enumerate(itertools.product(MATRIX_LAYOUTS, repeat=2)):
        t, i, o = SHAPES[k % 2]
        case = random_case(t, i, o, dtype, device, seed=k)
        assert_near(op, laid_out(case, x=a, w=b), f"x={a} w={b}")
        assert_near(op, laid_out(case, w=a, g=b), f"w={a} g={b}")


@device_param
@policy_param
@pytest.mark.parametrize("op", [LINEAR, RELU], ids=repr)
def test_leading_dimensions_of_any_layout(op, policy_name, device):
    """3-D and 4-D inputs whose leading dimensions cannot be merged into one stride."""
    with policy(policy_name):
        for dtype, lead in itertools.product([torch.float32, torch.bfloat16], [(4, 3), (2, 3, 4)]):
            for x, g in itertools.product(ND_LAYOUTS, repeat=2):
                case = laid_out(exact_case(lead, 8, 9, dtype, device), x=x, g=g)
                assert_exact(op, case, f"lead={lead} x={x} g={g}")


@device_param
@op_param
def test_channels_last_image(op, device):
    """[N, H, W, C] as a permuted view, as vision models pass it to a Linear."""
    case = random_case((2, 5, 6), 8, 12, torch.float32, device)
    case = without_kinks(case)
    image = case.x.permute(0, 3, 1, 2).contiguous()  # NCHW
    view = Case(image.permute(0, 2, 3, 1), case.w, case.b, case.g)
    assert_contract(op, [("NHWC", view)])


@device_param
@dtype_param
def test_every_alignment_of_every_operand(dtype, device):
    """Slices that begin 0 to 8 elements in: kernels that load 16 bytes at once must not assume
    alignment of any one operand, bias included."""
    t, i, o = 16, 64, 128
    base = exact_case(t, i, o, dtype, device)

    def shifted(tensor, by):
        room = torch.full((tensor.numel() + 8,), float("nan"), dtype=dtype, device=device)
        return room[by : by + tensor.numel()].view(tensor.shape).copy_(tensor)

    for by in (1, 2, 3, 4, 8):
        for which in itertools.product([False, True], repeat=4):
            parts = (base.x, base.w, base.b, base.g)
            case = Case(*(shifted(p, by) if s else p for p, s in zip(parts, which)))
            for op in (LINEAR, RELU):
                assert_exact(op, case, f"shift={by} which={which}")


@device_param
def test_row_strides_of_every_size(device):
    """Views into wider matrices (sliced features): the row stride is not the width."""
    for dtype, extra in itertools.product([torch.float32, torch.bfloat16], [1, 2, 4, 8, 64]):
        case = exact_case(16, 64, 128, dtype, device)

        def widened(t, extra=extra):
            room = torch.full((*t.shape[:-1], t.shape[-1] + extra), float("nan")).to(t)
            return room[..., : t.shape[-1]].copy_(t)

        wide = Case(widened(case.x), widened(case.w), case.b, widened(case.g))
        for op in (LINEAR, RELU):
            assert_exact(op, wide, f"{dtype} row stride +{extra}")


@device_param
def test_meaningless_strides_of_size_one_dimensions(device):
    """A dimension of size 1 may carry any stride; it must not become a leading dimension."""
    for dtype, stride in itertools.product([torch.float32, torch.bfloat16], [0, 1, 3, 1000]):
        for t, i, o in [(1, 8, 8), (8, 1, 8), (8, 8, 1), (1, 1, 1), (1, 64, 1)]:

            def restrided(m, stride=stride):
                rows, columns = m.shape
                outer = stride if rows == 1 else columns
                return m.as_strided(m.shape, (outer, stride if columns == 1 and rows == 1 else 1))

            case = exact_case(t, i, o, dtype, device)
            odd = Case(restrided(case.x), restrided(case.w), case.b, restrided(case.g))
            for op in (LINEAR, RELU):
                assert_exact(op, odd, f"{t}x{i}->{o} stride {stride}")


@device_param
@dtype_param
def test_gradient_of_a_sum_is_expanded(dtype, device):
    """sum().backward() passes a gradient with stride 0 in every dimension."""
    for lead in [(5,), (16,), (2, 3)]:
        case = exact_case(lead, 7, 9, dtype, device)
        ones = torch.ones_like(case.g)
        for op in (LINEAR, RELU):
            leaves = [t.clone().requires_grad_() for t in case.inputs]
            op.call(*leaves).sum().backward()
            want = run(op.eager, Case(*(t.double() for t in (*case.inputs, ones))))[1:]
            for leaf, w in zip(leaves, want):
                assert torch.equal(leaf.grad.double(), w), f"{op!r} {lead}"


@device_param
@moderate_param
def test_layout_of_a_dense_input_changes_nothing_but_rounding(op, device):
    """The same numbers in another layout: the same result as from a contiguous copy."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        case = without_kinks(random_case((4, 6), 64, 96, dtype, device))
        want = run(op.call, case)
        for name in ("transposed", "row_strided", "column_strided", "offset", "outer_swapped"):
            weight = "transposed" if name == "outer_swapped" else name
            got = run(op.call, laid_out(case, x=name, w=weight, g=name))
            for a, b in zip(got, want):
                tolerance = 32 * torch.finfo(dtype).eps
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * 4, msg=name)


# --- gradients: torch's layout, by torch's product ---------------------------------------------


def gradient_strides(call, x, w, frozen):
    x, w = (t.detach().requires_grad_(t is not frozen) for t in (x, w))
    y = call(x, w)
    grads = torch.autograd.grad(y.sum(), [t for t in (x, w) if t.requires_grad])
    return [g.stride() for g in grads]


@device_param
@op_param
@pytest.mark.parametrize("columns", ["w", "x", "both"])
def test_gradients_have_torchs_layout(columns, op, device):
    """A transposed leaf then takes its gradient as it is, without a copy. (That of a frozen
    weight's input is by rows: torch keeps the input's strides for it, which we do not.)"""
    for device_type in (device, "meta"):
        for lead in ((6,), (2, 3), (1, 6)):
            x, w = torch.randn(*lead, 8, device=device_type), torch.randn(5, 8, device=device_type)
            if columns != "w":
                x = x.mT.contiguous().mT
            if columns != "x":
                w = w.t().contiguous().t()
            for frozen in (None, x) if columns == "w" else (None,):
                got = gradient_strides(op.call, x, w, frozen)
                assert got == gradient_strides(op.eager, x, w, frozen), (lead, device_type)


@device_param
@pytest.mark.parametrize("frozen", ["nothing", "the input"])
def test_a_transposed_leaf_takes_its_gradient_as_it_is(frozen, device):
    """As transformers' Conv1D has it: the same memory, in every form of layer."""
    w = [torch.randn(8, 8, device=device).requires_grad_() for _ in range(3)]
    x = torch.randn(4, 8, device=device).requires_grad_(frozen == "nothing")
    turned = [t.t() for t in w]
    for y in (
        tfl.linear_gelu(x, turned[0]),
        tfl.mlp(x, turned, [None] * 3, "relu"),
        tfl.gated_mlp(x, *turned),
        tfl.linear_glu(x, *turned[:2]),
    ):
        for leaf, grad in zip(w, torch.autograd.grad(y.sum(), w, allow_unused=True)):
            assert grad is None or grad.stride() == leaf.stride()


@device_param
@moderate_param
@pytest.mark.parametrize("features", [2, 8])
def test_weights_by_columns_are_as_exact_as_eager(features, op, device):
    """Long sums of few features, whose order a product of the transposes would change."""
    cases = []
    for seed in range(24):
        case = without_kinks(random_case(300, features, features, torch.float32, device, seed=seed))
        cases.append((f"seed {seed}", Case(case.x, case.w.t().contiguous().t(), case.b, case.g)))
    assert_contract(op, cases)
