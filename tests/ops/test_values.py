"""Forward and every gradient against fp64, over sizes, dimensions, dtypes and biases."""

import itertools

import pytest
import torch
import torch.nn.functional as F
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
    device_param,
    exact_case,
    one_thread,  # noqa: F401
    op_param,
    policy,
    preactivation,
    random_case,
    run,
    without_kinks,
)

SIZES = [0, 1, 2, 3, 7, 8, 64, 129, 257]
dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])


def sizes(device):
    """(T, I, O): on CUDA every combination; on CPU three Latin squares, a third of them, in which
    every two sizes still meet for every two of the dimensions."""
    n = len(SIZES)
    if device == "cuda":
        return list(itertools.product(SIZES, repeat=3))
    square = itertools.product(range(n), range(n), [0, 3, 6])
    return [(SIZES[a], SIZES[b], SIZES[(a + b + c) % n]) for a, b, c in square]


def shapes_and_biases(device):
    for k, shape in enumerate(sizes(device)):
        for bias in [k % 2 == 0] if device == "cuda" else [True, False]:
            yield k, shape, bias


@device_param
@dtype_param
@op_param
def test_every_size_against_fp64(op, dtype, device):
    def cases():
        larger = [(-1, (512, 96, 128), True), (-2, (64, 1031, 129), True)]
        for k, (t, i, o), bias in [*larger, *shapes_and_biases(device)]:
            case = random_case(t, i, o, dtype, device, bias, seed=k)
            yield f"{t}x{i}->{o} bias={bias}", without_kinks(case) if op is RELU else case

    assert_contract(op, cases())


@device_param
@dtype_param
@pytest.mark.parametrize("op", [LINEAR, RELU], ids=repr)
def test_every_size_exact_on_integers(op, dtype, device):
    """No tolerance at all: one dropped, doubled or misplaced term fails. Without a bias many z
    are exactly 0, where ReLU's gradient must be 0."""
    for k, (t, i, o), bias in shapes_and_biases(device):
        case = exact_case(t, i, o, dtype, device, bias, seed=k)
        assert_exact(op, case, f"{t}x{i}->{o} bias={bias}")


@device_param
@dtype_param
@pytest.mark.parametrize("name", ["cublaslt", "eager"])
def test_every_size_under_the_other_policies(name, dtype, device):
    with policy(name):
        for k, (t, i, o), bias in shapes_and_biases("cpu"):
            case = exact_case(t, i, o, dtype, device, bias, seed=k)
            if name == "cublaslt":  # its mask has gradient 1 at exactly 0
                case.g = case.g.masked_fill(preactivation(case) == 0, 0)
            label = f"{t}x{i}->{o} bias={bias} policy={name}"
            assert_exact(LINEAR, case, label)
            assert_exact(RELU, case, label)


@device_param
@dtype_param
@pytest.mark.parametrize("name", ["cublaslt", "eager"])
@pytest.mark.parametrize("op", [GELU_TANH, GELU_ERF, SILU, RELU2], ids=repr)
def test_gelu_under_the_other_policies(op, name, dtype, device):
    cases = [
        (f"{t}x{i}->{o} bias={bias}", random_case(t, i, o, dtype, device, bias, seed=k))
        for k, (t, i, o), bias in shapes_and_biases("cpu")
        if k % 4 == 0
    ]
    with policy(name):
        assert_contract(op, cases)


LEADS = [(), (1,), (5,), (2, 3), (1, 1), (0, 3), (3, 0), (2, 1, 3), (2, 2, 1, 3), (2, 0, 2, 2)]


@device_param
@dtype_param
@pytest.mark.parametrize("lead", LEADS, ids=lambda s: f"{len(s) + 1}d-{'x'.join(map(str, s))}")
def test_one_to_five_dimensions(lead, dtype, device):
    for op in OPS:
        cases = {}
        for bias, (i, o) in itertools.product([True, False], [(7, 3), (64, 129), (1, 1)]):
            case = random_case(lead, i, o, dtype, device, bias)
            assert op.call(*case.inputs).shape == (*lead, o)
            assert op.call(*case.inputs).is_contiguous()
            cases[f"lead={lead} {i}->{o} bias={bias}"] = without_kinks(case)
        assert_contract(op, cases.items())


@device_param
@dtype_param
@op_param
def test_no_input_features_gives_the_activation_of_the_bias(op, dtype, device):
    """K = 0: a GEMM library may return early and leave the output unwritten."""
    for t, o in itertools.product([1, 3, 129], [1, 8, 129]):
        case = random_case(t, 0, o, dtype, device)
        want = op.act(case.b.double()).to(dtype).expand(t, o)
        torch.testing.assert_close(op.call(*case.inputs), want)
        assert torch.equal(op.call(case.x, case.w), torch.zeros_like(want))
        _, dx, dw, db = run(op.call, case)
        assert dx.shape == (t, 0) and dw.shape == (o, 0)
        z = case.b.double().expand(t, o).clone().requires_grad_()
        (dz,) = torch.autograd.grad(op.act(z), z, case.g.double())
        torch.testing.assert_close(db.double(), dz.sum(0), rtol=2e-2, atol=2e-2 * t**0.5)


@device_param
@op_param
def test_no_tokens_gives_zero_gradients_of_the_right_shape(op, device):
    """T = 0: the sums over no tokens are 0, not whatever the buffer held."""
    for i, o in [(64, 129), (1, 1), (257, 8)]:
        _, dx, dw, db = run(op.call, random_case(0, i, o, torch.float32, device))
        assert dx.shape == (0, i)
        assert torch.equal(dw, torch.zeros(o, i, device=device))
        assert torch.equal(db, torch.zeros(o, device=device))


@device_param
@dtype_param
@pytest.mark.parametrize("n", [1, 3, 8, 64, 129])
def test_square_shapes_with_an_asymmetric_bias(n, dtype, device):
    """With T = I = O and an identity weight, a bias along tokens instead of features, or counted
    twice, or a weight that is not transposed cannot hide."""
    x = torch.zeros(n, n, dtype=dtype, device=device)
    w = torch.zeros(n, n, dtype=dtype, device=device)
    b = torch.arange(n, dtype=dtype, device=device) - n // 2
    for op in (LINEAR, RELU):
        assert torch.equal(op.call(x, w, b), op.act(b).expand(n, n))
    w[0, n - 1] = 2.0  # feature 0 reads input n - 1, and nothing the other way round
    x[:, n - 1] = torch.arange(n, dtype=dtype, device=device)
    want = b.repeat(n, 1)
    want[:, 0] += 2 * x[:, n - 1]
    assert torch.equal(LINEAR.call(x, w, b), want)


SUBSETS = list(itertools.product([False, True], repeat=3))


@device_param
@op_param
@pytest.mark.parametrize("policy_name", ["auto", "cublaslt", "eager"])
@pytest.mark.parametrize("wanted", SUBSETS, ids=lambda s: "".join("FT"[v] for v in s))
def test_only_wanted_gradients_come_back(wanted, op, policy_name, device):
    for lead, dtype in [((), torch.float32), ((5,), torch.bfloat16), ((2, 3), torch.float64)]:
        case = without_kinks(random_case(lead, 7, 9, dtype, device))
        everything = run(op.call, case)
        leaves = [t.clone().requires_grad_(r) for t, r in zip(case.inputs, wanted)]
        with policy(policy_name):
            y = op.call(*leaves)
            assert y.requires_grad == any(wanted)
            if any(wanted):
                y.backward(case.g)
        for leaf, r, want in zip(leaves, wanted, everything[1:]):
            assert (leaf.grad is not None) == r
            if r:
                torch.testing.assert_close(leaf.grad, want)
                assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype


@device_param
@op_param
def test_only_wanted_gradients_without_a_bias(op, device):
    for x_grad, w_grad in [(True, False), (False, True), (True, True)]:
        case = without_kinks(random_case(5, 7, 9, torch.float64, device, bias=False))
        x, w = case.x.clone().requires_grad_(x_grad), case.w.clone().requires_grad_(w_grad)
        op.call(x, w).backward(case.g)
        _, dx, dw = run(op.eager, case)
        for leaf, r, want in ((x, x_grad, dx), (w, w_grad, dw)):
            assert (leaf.grad is not None) == r
            assert not r or torch.allclose(leaf.grad, want)


@device_param
@op_param
def test_inputs_and_grad_output_are_left_alone(op, device):
    for lead, i, o in [((5,), 7, 9), ((2, 64), 64, 128)]:
        case = random_case(lead, i, o, torch.float32, device)
        tensors = [*case.inputs, case.g]
        before, versions = [t.clone() for t in tensors], [t._version for t in tensors]
        run(op.call, case)
        assert all(torch.equal(a, b) for a, b in zip(tensors, before))
        assert [t._version for t in tensors] == versions


@device_param
@op_param
def test_training_and_inference_give_the_same_output(op, device):
    """Two code paths (with and without something saved) compute one function."""
    for dtype in DTYPES:
        case = random_case(65, 48, 129, dtype, device)
        with torch.no_grad():
            plain = op.call(*case.inputs)
        trained = op.call(case.x, case.w.clone().requires_grad_(), case.b)
        close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
        torch.testing.assert_close(trained.detach(), plain, **close)


@device_param
def test_bf16_sums_that_cancel_are_taken_in_fp32(device):
    """256 + 1 - 256 and the like: partial sums rounded to bf16 would lose the ones."""
    k = 512
    x = torch.ones(3, k, dtype=torch.bfloat16, device=device)
    w = torch.ones(9, k, dtype=torch.bfloat16, device=device)
    w[:, : k // 2] = 255
    w[:, k // 2 :] = -254
    want = torch.full((3, 9), 256.0, dtype=torch.bfloat16, device=device)
    for op in (LINEAR, RELU):
        assert torch.equal(op.call(x, w), want)
    long = Case(x[:1].expand(4096, k).contiguous(), w, None, torch.ones(4096, 9).to(x))
    assert torch.equal(run(RELU.call, long)[2], torch.full_like(w, 4096))
    # the bias gradient too: 4096 ones counted in bf16 would stop at 256
    b = torch.zeros(9, dtype=torch.bfloat16, device=device, requires_grad=True)
    for op in set(OPS) - {RELU2}:  # whose slope is 2 here
        bias_grad = torch.autograd.grad(op.call(long.x, w, b), b, long.g)[0]
        assert torch.equal(bias_grad, torch.full_like(b, 4096)), op


def test_functional_forms_are_the_operators():
    import torch_fused_linear as tfl

    case = random_case(5, 7, 9, torch.float32)
    x, w, b = case.inputs
    assert torch.equal(tfl.linear(x, w, b), LINEAR.call(x, w, b))
    assert torch.equal(tfl.linear_relu(x, w, b), RELU.call(x, w, b))
    assert torch.equal(tfl.linear_gelu(x, w, b), GELU_TANH.call(x, w, b))
    assert torch.equal(tfl.linear_gelu(x, w, b, approximate="none"), GELU_ERF.call(x, w, b))
    assert torch.equal(tfl.linear_gelu(input=x, weight=w, approximate="none"), GELU_ERF.call(x, w))
    assert torch.equal(torch.ops.fused.linear_gelu(x, w, b), GELU_TANH.call(x, w, b))
    torch.testing.assert_close(tfl.linear(x, w), F.linear(x, w))
