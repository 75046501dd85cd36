"""Inputs, weights, biases and gradients of any strides and alignment give the same results."""

import itertools
import re

import operators as ops
import pytest
import torch
from layouts import MATRIX_LAYOUTS, ND_LAYOUTS, VECTOR_LAYOUTS, nan_buffer
from numerics import assert_contract, assert_exact, assert_near, assert_same, plain, run
from places import places

import torch_fused_linear as tfl

exact_param = ops.rows([ops.LINEAR, ops.RELU])
SHAPES = [(5, 7, 9), (16, 64, 128)]  # nothing aligned; everything aligned but for the layout


def laid_out(case, x="contiguous", w="contiguous", b="contiguous", g="contiguous"):
    bias = None if case.b is None else VECTOR_LAYOUTS[b](case.b)
    return ops.Case.of(
        ND_LAYOUTS[x](case.x), MATRIX_LAYOUTS[w](case.w), bias, ND_LAYOUTS[g](case.g)
    )


# --- one layer -----------------------------------------------------------------------------------


def layouts_of_three(thinned):
    """All of them, or of those a Latin square, in which every two still meet."""
    names = list(MATRIX_LAYOUTS)
    for (i, x), (j, w), (k, g) in itertools.product(enumerate(names), repeat=3):
        if not thinned or k == (i + j) % len(names):
            yield i + j, x, w, g


@ops.dtype_param
@places(["auto", "cublaslt"], ["auto", "cublaslt"])
@exact_param
def test_every_pair_of_layouts_is_exact(op, policy, dtype, device):
    """Input x weight x gradient layouts on integer data: equal to fp64, bit for bit."""
    vectors = itertools.cycle(VECTOR_LAYOUTS)
    with tfl.set_policy(policy):
        for k, x, w, g in layouts_of_three(thinned=device.type == "cpu"):
            b, shape = next(vectors), SHAPES[k % 2]
            case = laid_out(op.exact_case(*shape, dtype, device), x, w, b, g)
            assert_exact(op, case, f"{shape} x={x} w={w} b={b} g={g}")


@ops.dtype_param
@places(["auto"], ["auto", "cublaslt"])
def test_large_operands_in_every_layout(policy, dtype, device):
    """Large enough for whichever library is only worth its call there, one operand at a time."""
    with tfl.set_policy(policy):
        for n, op in enumerate(ops.OPS):
            case, check = op.exact_case(64, 256, 288, dtype, device), assert_exact
            if op in ops.SMOOTH:
                check = assert_near
                case = ops.without_kinks(op, op.case(64, 256, 288, dtype, device))
            for k, (name, where) in enumerate(itertools.product(MATRIX_LAYOUTS, "xwg")):
                if device.type == "cpu" and (k // 3 + k + n) % 3:  # a third of them, each met
                    continue
                check(op, laid_out(case, **{where: name}), f"large {where} {name}")
            for name in VECTOR_LAYOUTS if op not in ops.SMOOTH else ():
                check(op, laid_out(case, b=name), f"large bias {name}")


@ops.dtype_param
@ops.rows(ops.SMOOTH)
def test_smooth_ones_against_fp64(op, dtype, device):
    """On a CPU a third of them with each dtype."""
    for k, x, w, g in layouts_of_three(thinned=True):
        if device.type == "cuda" or k % 3 == ops.DTYPES.index(dtype) % 3:
            case = op.case(*SHAPES[k % 2], dtype, device, seed=k)
            assert_near(op, laid_out(case, x, w, g=g), f"x={x} w={w} g={g}")


def image(t):
    """[N, H, W, C] as a permuted view, as vision models pass it to a Linear."""
    return t.movedim(-1, 1).contiguous().movedim(1, -1)


LEADING = {**ND_LAYOUTS, "image": image}


@places(["auto"], ["auto", "cublaslt"])
@ops.op_param
def test_leading_dimensions_of_any_layout(op, policy, device):
    """3-D and 4-D inputs whose leading dimensions cannot be merged into one stride."""
    smooth = op in ops.SMOOTH
    with tfl.set_policy(policy):
        for dtype, lead in [(torch.float32, (4, 3)), (torch.bfloat16, (2, 3, 4))]:
            case = (op.case if smooth else op.exact_case)(lead, 8, 9, dtype, device)
            for k, (x, g) in enumerate(itertools.product(LEADING, repeat=2)):
                if smooth and k % 5:
                    continue
                laid = ops.Case([LEADING[x](case.x), *case.inputs[1:]], LEADING[g](case.g))
                (assert_near if smooth else assert_exact)(op, laid, f"lead={lead} x={x} g={g}")


def shifted(by):
    """A slice that begins so many elements in."""

    def shift(t):
        return nan_buffer(t, (t.numel() + 8,))[by : by + t.numel()].view(t.shape).copy_(t)

    return shift


def widened(by):
    """A view into a wider matrix (sliced features): the row stride is not the width."""
    return lambda t: nan_buffer(t, (*t.shape[:-1], t.shape[-1] + by))[..., : t.shape[-1]].copy_(t)


def restrided(stride):
    """A dimension of size 1 may carry any stride; it must not become a leading dimension."""

    def change(t):
        if t.dim() == 1:
            return t
        count, width = t.shape
        outer = stride if count == 1 else width
        return t.as_strided(t.shape, (outer, stride if width == 1 and count == 1 else 1))

    return change


@ops.dtype_param
@exact_param
def test_every_alignment_of_every_operand_and_odd_strides(op, dtype, device):
    """Kernels that load 16 bytes at once must not assume alignment of any operand."""
    base = op.exact_case(16, 64, 128, dtype, device)
    for by, which in itertools.product((1, 2, 3, 4, 8), itertools.product([0, 1], repeat=4)):
        parts = [shifted(by)(t) if s else t for t, s in zip((*base.inputs, base.g), which)]
        assert_exact(op, ops.Case(parts[:3], parts[3]), f"shift={by} which={which}")
    for by in (1, 2, 4, 8, 64):
        case = base.map(widened(by))
        assert_exact(op, ops.Case([*case.inputs[:2], base.b], case.g), f"row stride +{by}")
    for stride in (0, 1, 3, 1000):
        for t, i, o in [(1, 8, 8), (8, 1, 8), (8, 8, 1), (1, 1, 1), (1, 64, 1)]:
            case = op.exact_case(t, i, o, dtype, device).map(restrided(stride))
            assert_exact(op, case, f"{t}x{i}->{o} stride {stride}")


# --- gated layers, convolutions, all -------------------------------------------------------------


@ops.rows([ops.gated(form, "silu", down=True) for form in ops.FORMS])
def test_gated_layers(op, device):
    for dtype in (torch.float64, torch.bfloat16):
        base = op.case((4, 3), 8, 5, dtype, device)
        for name, layout in ND_LAYOUTS.items():
            case = ops.Case([layout(base.x), *base.inputs[1:]], layout(base.g))
            dense = ops.Case([case.x.contiguous(), *base.inputs[1:]], case.g.contiguous())
            assert_same(run(op.call, case), run(op.eager, dense), name)
        turned = ops.Case([by_columns(t) for t in base.inputs], base.g)
        assert_same(run(op.call, turned), run(op.eager, base), "by columns")


@pytest.mark.parametrize("how", ND_LAYOUTS)
def test_convolutions(how, device):
    op, layout = ops.conv(padding=(1, 1)), ND_LAYOUTS[how]
    base = op.case(device=device)
    case = ops.Case([*map(layout, base.inputs[:2]), base.b], layout(base.g))
    assert_same(run(op.call, case), run(op.eager, plain(case)))


@ops.dtype_param
@ops.rows(ops.EVERY)
def test_gradient_of_a_sum_is_expanded(op, dtype, device):
    """sum().backward() passes a gradient with stride 0 in every dimension."""
    for layout in ("", "xw") if op.name == "conv2d_relu" else ("",):
        case = ops.channels_last(op.case((2, 3), 7, 9, dtype, device), layout)
        ones = torch.ones((), dtype=dtype, device=device)
        dense = ops.without_kinks(op, ops.Case(case.inputs, torch.ones_like(case.g)))
        if not torch.equal(dense.g, torch.ones_like(case.g)):
            continue  # a sign that is a matter of rounding may differ from path to path
        spread = ops.Case(case.inputs, ones.expand(case.g.shape))
        for a, b in zip(run(op.call, spread), run(op.call, dense), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


# --- gradients: torch's layout, by torch's product -----------------------------------------------


def by_columns(t):
    return t.mT.contiguous().mT if t.dim() > 1 else t


def gradient_strides(call, x, w, frozen):
    x, w = (t.detach().requires_grad_(t is not frozen) for t in (x, w))
    leaves = [t for t in (x, w) if t.requires_grad]
    return [g.stride() for g in torch.autograd.grad(call(x, w).sum(), leaves)]


@ops.op_param
@pytest.mark.parametrize("columns", ["w", "x", "both"])
def test_gradients_have_torchs_layout(columns, op, device):
    """A transposed leaf then takes its gradient as it is, without a copy. (That of a frozen
    weight's input is by rows: torch keeps the input's strides for it, which we do not.)"""
    for where, lead in itertools.product((device, "meta"), ((6,), (2, 3), (1, 6))):
        x, w = torch.randn(*lead, 8, device=where), torch.randn(5, 8, device=where)
        x = x if columns == "w" else by_columns(x)
        w = w if columns == "x" else by_columns(w)
        for frozen in (None, x) if columns == "w" else (None,):
            got = gradient_strides(op.call, x, w, frozen)
            assert got == gradient_strides(op.eager, x, w, frozen), (lead, where)


# torch puts the gradients of two views of a weight together, by rows.
@ops.rows(
    [op for op in ops.EVERY if op is not ops.CONV and not re.search("halves|up first", op.label)]
)
def test_a_transposed_leaf_takes_its_gradient_as_it_is(op, device):
    """As transformers' Conv1D has it: the same memory, in every form of layer."""
    x, *parameters = op.case((4,), 8, 8, device=device).inputs
    case = ops.Case([x, *map(by_columns, parameters)], torch.empty(()))
    for wants_input in (True, False):
        x, *leaves = case.leaves([wants_input, *[True] * len(parameters)])
        grads = torch.autograd.grad(op.call(x, *leaves).sum(), leaves)
        assert [g.stride() for g in grads] == [leaf.stride() for leaf in leaves]


# Activations whose slope makes no error larger.
@pytest.mark.parametrize(
    "op, tokens, features, o",
    [
        *((op, 300, 8, 8) for op in ops.OPS if op.activation != "relu2"),
        *((ops.LINEAR, *sizes) for sizes in ((300, 2, 2), (4096, 1, 64), (4096, 3, 64))),
    ],
    ids=str,
)
def test_weights_by_columns_are_as_exact_as_eager(op, tokens, features, o, device):
    """Long sums of few features, whose order a product of the transposes would change."""
    seeds = range(24 if tokens == 300 else 4)
    cases = (op.case(tokens, features, o, torch.float32, device, seed=seed) for seed in seeds)
    laid = (ops.Case([c.x, by_columns(c.w), c.b], ops.without_kinks(op, c).g) for c in cases)
    assert_contract((op, f"seed {seed}", case) for seed, case in enumerate(laid))


def test_a_convolution_keeps_the_memory_format_of_its_gradients(device):
    op = ops.conv(padding=(1, 1))
    for which in ("", "x", "xw"):
        case = ops.channels_last(op.case(device=device), which)
        for ours, eager in zip(run(op.call, case), run(op.eager, case)):
            assert_same([ours], [eager])
            # torch's own fp64 results are contiguous on a GPU; ours follow one rule
            if ours.dim() == 4 and which == "xw" and device.type == "cpu":
                lasts = [t.is_contiguous(memory_format=ops.LAST) for t in (ours, eager)]
                assert lasts[0] == lasts[1]


def test_one_half_of_a_tensor_may_be_negated():
    x, halves = torch.randn(5, 3, requires_grad=True), [*torch.randn(2, 4, 3)]
    for pair in itertools.product(*((half, torch._neg_view(half)) for half in halves)):
        want = torch.relu(x @ pair[0].t()) * (x @ pair[1].t())
        torch.testing.assert_close(tfl.linear_glu(x, *pair, activation="relu"), want)
