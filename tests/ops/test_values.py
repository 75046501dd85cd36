"""Outputs and all gradients against fp64, over sizes, dimensions, dtypes, biases and policies."""

import itertools

import operators as ops
import pytest
import torch
from numerics import assert_contract, assert_exact, assert_same, run, with_inference
from places import places

import torch_fused_linear as tfl

SIZES = [0, 1, 2, 3, 7, 8, 64, 129, 257]


# --- one layer: every size -----------------------------------------------------------------------


def shapes_and_biases(device, thinned=False):
    """(tokens, inputs, outputs): on a GPU every combination; on a CPU three Latin squares, a third
    of them, in which every two sizes still meet for every two of the dimensions."""
    n = len(SIZES)
    if device.type == "cuda" and not thinned:
        for k, shape in enumerate(itertools.product(SIZES, repeat=3)):
            yield k, shape, k % 2 == 0
        return
    for k, (a, b, c) in enumerate(itertools.product(range(n), range(n), [0, 3, 6])):
        for bias in (True, False):
            yield k, (SIZES[a], SIZES[b], SIZES[(a + b + c) % n]), bias


LEADS = [(), (1,), (5,), (2, 3), (1, 1), (0, 3), (3, 0), (2, 1, 3), (2, 2, 1, 3), (2, 0, 2, 2)]


@ops.dtype_param
@places()
@ops.op_param
def test_every_size_and_number_of_dimensions(op, policy, dtype, device):
    """A quarter of the sizes under the other policies, one of the squares on a CPU."""
    others = [((512,), 96, 128), ((64,), 1031, 129)]
    others += [(lead, *sizes) for lead in LEADS for sizes in ((7, 3), (64, 129))]
    step = 4 if policy != "auto" else 3 if device.type == "cpu" else 1

    def cases():
        sizes = [(k, sizes, bias) for k, sizes in enumerate(others) for bias in (True, False)]
        squares = shapes_and_biases(device, thinned=policy != "auto")
        sizes += (given for given in squares if given[0] % step == 0)
        for k, (lead, i, o), bias in sizes:
            case = op.case(lead, i, o, dtype, device, bias, seed=k)
            yield op, f"{lead} x {i}->{o} bias={bias}", ops.without_kinks(op, case)

    with tfl.set_policy(policy):
        assert_contract(cases())


@ops.dtype_param
@places(ops.POLICIES)
@ops.rows([ops.LINEAR, ops.RELU])
def test_every_size_exact_on_integers(op, policy, dtype, device):
    """No tolerance at all: one dropped, doubled or misplaced term fails. Without a bias many z
    are exactly 0, where ReLU's gradient must be 0; that of the library's mask is 1."""
    with tfl.set_policy(policy):
        for k, (t, i, o), bias in shapes_and_biases(device, thinned=policy != "auto"):
            case = op.exact_case(t, i, o, dtype, device, bias, seed=k)
            if policy == "cublaslt":
                z = op.product(*(tensor.double() for tensor in case.inputs))
                case = ops.Case(case.inputs, case.g.masked_fill(z == 0, 0))
            assert_exact(op, case, f"{t}x{i}->{o} bias={bias}")


def test_bf16_sums_that_cancel_are_taken_in_fp32(device):
    """256 + 1 - 256 and the like: partial sums rounded to bf16 would lose the ones."""
    k = 512
    x, w = (torch.ones(n, k, dtype=torch.bfloat16, device=device) for n in (3, 9))
    w[:, : k // 2] = 255
    w[:, k // 2 :] = -254
    want = torch.full((3, 9), 256.0, dtype=torch.bfloat16, device=device)
    for op in (ops.LINEAR, ops.RELU):
        assert torch.equal(op.call(x, w), want)
    long = ops.Case([x[:1].expand(4096, k).contiguous(), w], torch.ones(4096, 9).to(x))
    assert torch.equal(run(ops.RELU.call, long)[2], torch.full_like(w, 4096))
    # the bias gradient too: 4096 ones counted in bf16 would stop at 256
    b = torch.zeros(9, dtype=torch.bfloat16, device=device, requires_grad=True)
    for op in (op for op in ops.OPS if op.activation != "relu2"):  # whose slope is 2 here
        bias_grad = torch.autograd.grad(op.call(long.x, w, b), b, long.g)[0]
        assert torch.equal(bias_grad, torch.full_like(b, 4096)), op


# --- chains and gated layers ---------------------------------------------------------------------


@places()
@pytest.mark.parametrize("activation", ops.ACTS)
def test_chains_of_every_depth(activation, policy, device):
    """Every rank, odd widths, with biases and without; without gradients too."""
    leads = [(), (1,), (7,), (2, 3), (2, 1, 3), (0,), (2, 0)]
    widths = itertools.cycle([[5, 6, 7, 8], [1] * 4, [129, 1, 7, 2]])
    for layers, lead, bias in itertools.product([1, 2, 3, 5], leads, [True, False]):
        op = ops.mlp(activation, layers, next(widths)[: layers - 1])
        case = op.case(lead, 3, 2, device=device, bias=bias)
        with tfl.set_policy(policy):
            got = with_inference(op.call, case)
        assert_same(got, with_inference(op.eager, case), f"{op!r} {lead} bias={bias}")


@ops.dtype_param
@pytest.mark.parametrize("activation", ops.ACTS)
def test_errors_of_chains_and_gated_layers(activation, dtype, device):
    def cases():
        for layers, seed in itertools.product([1, 2, 3], range(6)):
            op = ops.mlp(activation, layers, [40, 17][: layers - 1])
            yield op, f"seed {seed}", op.case((33,), 24, 8, dtype, device, seed=seed)
        sizes = [(6, 8, None), (7, 9, 5), (1, 1, 1), (64, 40, 48), (33, 129, None)]
        leads = [(), (1,), (33,), (2, 3)]
        for k, ((i, hidden, o), lead, bias) in enumerate(itertools.product(sizes, leads, [1, 0])):
            op = ops.gated(ops.FORMS[k % 4], activation, o is not None, hidden)
            case = op.case(lead, i, o or hidden, dtype, device, bool(bias), seed=k)
            yield op, f"{lead} {k}", case
        for form in ("apart", "stacked"):  # large enough for blocks on every thread
            op = ops.gated(form, activation, down=True, hidden=258)
            yield op, f"large, {form}", op.case((3, 171), 24, 16, dtype, device)

    assert_contract((op, label, ops.without_kinks(op, case)) for op, label, case in cases())


@ops.rows([ops.gated(form, "silu", down) for form in ops.FORMS for down in (False, True)])
def test_gated_layers_without_elements(op, device):
    for lead, (i, o) in itertools.product([(), (0,), (3,), (2, 0)], [(4, 6), (0, 6), (4, 0)]):
        case = op.case(lead, i, o, device=device)
        assert_same(run(op.call, case), run(op.eager, case), f"{lead} {i}->{o}")
    empty = ops.gated("apart", "silu", down=True, hidden=0)
    case = empty.case((3,), 4, 5, device=device)
    assert_same(run(empty.call, case), run(empty.eager, case))


# --- convolutions --------------------------------------------------------------------------------

LAYOUTS = ["", "x", "w", "xw", "xwg", "g"]  # what is channels-last


def assert_layout(y, case):
    """Channels-last where image or kernel is, as torch tells it, for which ambiguous tensors are
    contiguous: on every device, for every dtype."""
    formats = [torch._prims_common.suggest_memory_format(t) for t in case.inputs[:2]]
    want = ops.LAST if ops.LAST in formats else torch.contiguous_format
    image = y if y.dim() == 4 else y.unsqueeze(0)
    assert image.is_contiguous(memory_format=want), y.stride()


@ops.dtype_param
@places()
def test_convolutions(policy, dtype, device):
    """Four stand for the rest in every layout, and they alone under the other policies."""
    every = {"groups, strided, dilated", "block", "wide", "plain"}

    def cases():
        for odd in ops.ODD if policy == "auto" else sorted(every):
            op, step = ops.ODD[odd], 1 if odd in every else 2
            for layout, bias in itertools.product(LAYOUTS[::step], [True, False]):
                case = ops.channels_last(op.case(dtype=dtype, device=device, bias=bias), layout)
                if policy == "auto":
                    assert_layout(op.call(*case.inputs), case)
                yield op, f"{layout!r}, bias {bias}", ops.without_kinks(op, case)

    with tfl.set_policy(policy):
        assert_contract(cases())


@pytest.mark.parametrize("odd", ops.ODD)
def test_convolutions_of_small_integers_are_exact(odd):
    """On a CPU bit for bit (on a GPU a Winograd transform rounds)."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        case = ops.ODD[odd].exact_case((), 0, 0, dtype)
        thinned = [t * (torch.rand(t.shape) < 0.4) for t in (*case.inputs[:2], case.g)]
        assert_exact(ops.ODD[odd], ops.Case([*thinned[:2], case.b], thinned[2]), str(dtype))


@ops.dtype_param
def test_a_convolution_without_images(dtype, device):
    op = ops.conv(batch=0, padding=(1, 1))
    for layout in ("", "x", "xw"):
        case = ops.channels_last(op.case(dtype=dtype, device=device), layout)
        assert op.call(*case.inputs).shape == op.eager(*case.inputs).shape == (0, 6, 7, 6)
        for grad, leaf in zip(run(op.call, case)[1:], case.inputs, strict=True):
            assert grad.shape == leaf.shape and grad.dtype == dtype and not grad.any()


def test_one_channel_between_two_convolutions():
    """Its strides are ambiguous, and torch's own convolution reads garbage through some of them."""
    image, first = torch.randn(3, 16, 12, 4), torch.randn(1, 16, 1, 5)
    second, bias = torch.randn(2, 1, 1, 3), torch.randn(2)
    first = first.contiguous(memory_format=torch.channels_last)

    def chain(layer, dtype):
        x, v, w, b = (t.to(dtype) for t in (image, first, second, bias))
        hidden = layer(x, v, b[:1], (1, 1), (0, 1), (2, 1))
        return layer(hidden, w, b, (1, 2), (0, 1))

    def plain(x, weight, bias, *geometry):
        return torch.relu(torch.nn.functional.conv2d(x, weight, bias, *geometry))

    got = chain(torch.ops.fused.conv2d_relu, torch.float32)
    torch.testing.assert_close(got, chain(plain, torch.float64).float(), rtol=1e-4, atol=1e-4)


# --- all of them ---------------------------------------------------------------------------------


@ops.every_op
@places()
def test_functions_and_operators_are_one(policy, op, device):
    """All policies agree in fp64."""
    for lead, bias in itertools.product([(), (5,), (2, 3)], [True, False]):
        case = op.smooth_case(lead, 6, 8, device=device, bias=bias)
        with tfl.set_policy(policy):
            got, functional = run(op.call, case), run(op.function, case)
        assert_same(got, run(op.eager, case), f"{op!r} {lead} {bias}")
        assert all(torch.equal(a, b) for a, b in zip(got, functional))


def test_defaults():
    x, w, b = ops.OPS[2].case().inputs
    tanh, erf = ops.linear("gelu_tanh").eager(x, w, b), ops.linear("gelu_erf").eager(x, w, b)
    for functions in (torch.ops.fused, tfl):
        assert_same([functions.linear_gelu(x, w, b)], [tanh])
        assert_same([functions.linear_gelu(input=x, weight=w, bias=b, approximate="none")], [erf])
        glu = functions.linear_glu(x, w, w)
        assert_same([glu], [ops.gated("apart", "silu").eager(x, w, w)])
    assert_same([tfl.mlp(x, [w, w.t()], [None, None])], [ops.mlp("relu", 2).eager(x, w, w.t())])
