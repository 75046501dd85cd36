"""What the nodes owe torch's engine, in corners where state could be guessed wrongly."""

import contextlib

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from helpers import GELU_TANH, OPS, RELU, device_param, op_param, policy, random_case
from random_graphs import fused_mlp, plain_mlp
from stacks import assert_same

import torch_fused_linear as tfl

ACTIVATED = pytest.mark.parametrize("op", OPS[1:], ids=repr)


def leaves(op, device="cpu", seed=0):
    case = random_case((3,), 4, 5, torch.float64, device, seed=seed)
    return [t.clone().requires_grad_() for t in case.inputs], case.g


def chain(device="cpu", layers=3):
    gen = torch.Generator().manual_seed(5)

    def leaf(*shape):
        values = torch.randn(*shape, generator=gen, dtype=torch.float64)
        return values.to(device).requires_grad_()

    return leaf(2, 4), [leaf(4, 4) for _ in range(layers)], [leaf(4) for _ in range(layers)]


def assert_equal(got, want):
    assert len(got) == len(want)
    for ours, theirs in zip(got, want):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


# --- batched second derivatives ------------------------------------------------------------------


@device_param
@op_param
@pytest.mark.parametrize("lead", [(3,), (2, 3), ()], ids=str)
def test_vectorized_hessian(op, lead, device):
    case = random_case(lead, 4, 5, torch.float64, device)
    for k in range(3):

        def hessian(call, vectorize, k=k):
            def loss(t):
                return call(*case.inputs[:k], t, *case.inputs[k + 1 :]).square().sum()

            return torch.autograd.functional.hessian(loss, case.inputs[k], vectorize=vectorize)

        assert_equal([hessian(op.call, True)], [hessian(op.eager, False)])


@device_param
def test_batched_gradients_that_are_differentiated_again(device):
    x, weights, biases = chain(device)
    results = []
    for call in (fused_mlp, plain_mlp):
        y = call(x, weights, biases, "gelu_tanh")
        batch = torch.stack([y.detach().sin(), y.detach().cos()]).requires_grad_()
        inputs = [x, *weights, *biases]
        options = {"is_grads_batched": True, "create_graph": True}
        first = torch.autograd.grad(y, inputs, batch, **options)
        total = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(total, [*inputs, batch], allow_unused=True)
        results.append([*first, *second])
    assert_equal(*results)


# --- forward mode --------------------------------------------------------------------------------


@device_param
@ACTIVATED
def test_a_tangent_that_meets_a_gradient_of_a_fused_consumer(op, device):
    """Two roots: one hands over, the other one's gradient is a dual number."""
    if op.name == "linear_silu":
        pytest.skip("aten::silu_backward has no forward mode")
    (x, w, b), _ = leaves(op, device)
    w2 = torch.randn(6, 5, dtype=torch.float64, device=device).requires_grad_()
    results = []
    for call, last in ((op.call, torch.ops.fused.linear), (op.eager, F.linear)):
        y = call(x, w, b)
        z = last(y, w2)
        with fwAD.dual_level():
            dual = fwAD.make_dual(y.detach().sin(), y.detach().cos())
            found = torch.autograd.grad([z, y], [x, w, b, w2], [z.detach().sin(), dual])
            parts = [fwAD.unpack_dual(g) for g in found]
            results.append([t if t is None else t.clone() for part in parts for t in part])
    assert_equal(*results)


# --- a node called by hand -----------------------------------------------------------------------


@device_param
@ACTIVATED
def test_a_node_that_a_hook_calls_by_hand(op, device):
    """It is not the node that the engine runs, and has neither that one's edges nor its notes."""
    (x, w, b), g = leaves(op, device)
    want = torch.autograd.grad(op.eager(x, w, b), [x, w, b], g)
    y, got = op.call(x, w, b), []
    out = torch.ops.fused.linear(op.call(x, w, b), w.mT)
    out.register_hook(lambda _: got.extend(y.grad_fn(g)))
    out.sum().backward()
    assert_equal(got, want)


@device_param
@op_param
def test_a_node_called_outside_the_engine_can_be_differentiated(op, device):
    (x, w, b), g = leaves(op, device)
    g.requires_grad_()
    direct = op.call(x, w, b).grad_fn(g)
    first = torch.autograd.grad(op.eager(x, w, b), [x, w, b], g, create_graph=True)
    assert_equal(direct, first)
    want, got = (
        torch.autograd.grad(sum(t.sin().sum() for t in ts), [x, w, b, g], allow_unused=True)
        for ts in (first, direct)
    )
    assert_equal(got, want)


# --- second derivatives that are zero ------------------------------------------------------------


@device_param
@pytest.mark.parametrize("name", ["auto", "cublaslt", "eager"])
@pytest.mark.parametrize("memory", ["default", "low"])
def test_a_second_derivative_of_zeros_is_zeros(name, memory, device):
    (x, w, b), g = leaves(RELU, device)
    results = []
    for fused in (True, False):
        with policy(name):
            y = (
                torch.ops.fused.linear_relu(x, w, b, memory=memory)
                if fused
                else RELU.eager(x, w, b)
            )
            (grad_bias,) = torch.autograd.grad(y, b, g, create_graph=True)
            results.append(torch.autograd.grad(grad_bias.sum(), [x, w, b]))
    assert_equal(*results)


# --- only what is needed is asked for ------------------------------------------------------------


@device_param
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_lower_weight_may_change_where_it_is_not_needed(activation, create_graph, device):
    x, weights, biases = chain(device)
    results = []
    for call in (fused_mlp, plain_mlp):
        ws = [w.clone() for w in weights]
        y = call(x, ws, biases, activation)
        ws[0].mul_(1)  # counts as written to; the values are those of before
        wanted = [ws[2], biases[2], biases[1]]
        first = torch.autograd.grad(y.cos().sum(), wanted, create_graph=create_graph)
        results.append(list(first))
    assert_equal(*results)


@device_param
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
@pytest.mark.parametrize("frozen", [(), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("memory", ["default", "low"])
@pytest.mark.parametrize("upper", ["weight and bias", "bias"])
def test_second_derivatives_reach_the_layers_below(activation, frozen, memory, upper, device):
    """First only the upper layers' gradients, then those of all."""
    x, weights, biases = chain(device, layers=4)
    for k in frozen:
        weights[k].requires_grad_(False)
    results = []
    for call in (fused_mlp, plain_mlp):
        y = call(x, weights, biases, activation, memory)
        wanted = [weights[3], biases[2]] if upper == "weight and bias" else [biases[1]]
        first = torch.autograd.grad(y.cos().sum(), wanted, create_graph=True)
        inputs = [t for t in (x, *weights, *biases) if t.requires_grad]
        total = sum(t.sin().sum() for t in first)
        second = torch.autograd.grad(total, inputs, create_graph=True)
        third = torch.autograd.grad(sum(t.sin().sum() for t in second), inputs)
        results.append([*first, *second, *third])
    assert_equal(*results)


# --- the second time -----------------------------------------------------------------------------


@device_param
@ACTIVATED
def test_the_second_backward_is_told_that_it_is_the_second(op, device):
    (x, w, b), _ = leaves(op, device)
    for y in (op.call(x, w, b), fused_mlp(x, [w, w.mT.contiguous()], [b, None], "gelu_tanh")):
        y.sum().backward()
        with pytest.raises(RuntimeError, match="a second time"):
            y.sum().backward()


@device_param
def test_a_second_head_whose_producer_was_freed(device):
    (x, w, b), _ = leaves(GELU_TANH, device)
    y = GELU_TANH.call(x, w, b)
    heads = [torch.ops.fused.linear(y, w.mT.contiguous()).sum() for _ in range(2)]
    heads[0].backward()
    with pytest.raises(RuntimeError, match="a second time"):
        heads[1].backward()


# --- a weight that lies by columns ---------------------------------------------------------------


@pytest.mark.parametrize("features", [1, 3, 8])
@pytest.mark.parametrize("op", [OPS[0], RELU], ids=repr)
def test_the_weight_gradient_of_a_column_major_weight_is_as_exact_as_torchs(op, features):
    errors = []
    for seed in range(4):
        case = random_case(4096, features, 64, torch.float32, seed=seed)
        exact = [t.double().requires_grad_() for t in case.inputs]
        want = torch.autograd.grad(op.eager(*exact), exact[1], case.g.double())[0]
        row = []
        for call in (op.call, op.eager):
            w = case.w.t().contiguous().t().requires_grad_()
            got = torch.autograd.grad(call(case.x, w, case.b), w, case.g)[0]
            row.append((got.double() - want).square().mean().sqrt().item())
        errors.append(row)
    ours, theirs = map(sum, zip(*errors))
    assert ours <= 1.1 * theirs


@pytest.mark.parametrize("kind", ["linear", "glu", "block", "mlp"])
def test_a_sparse_gradient_arrives(kind):
    """Torch's own backward takes it where its operators do; here its values count."""
    calls = {
        "linear": lambda x, w: tfl.linear_silu(x, w),
        "glu": lambda x, w: tfl.linear_glu(x, w, w),
        "block": lambda x, w: tfl.gated_mlp(x, w, w, w),
        "mlp": lambda x, w: tfl.mlp(x, [w, w], [None, None], "relu"),
    }
    results = []
    for sparse in (True, False):
        x, w = torch.randn(4, 5).requires_grad_(), torch.randn(5, 5).requires_grad_()
        torch.manual_seed(0)
        with torch.no_grad():
            x.normal_(), w.normal_()
        y = calls[kind](x, w)
        picked = torch.gather(y, 1, torch.tensor([[0], [3], [1], [4]]), sparse_grad=sparse)
        results.append(torch.autograd.grad(picked.sum(), [x, w]))
    assert_same(*results)


@pytest.mark.parametrize("kind", ["linear", "low", "glu", "block", "mlp"])
@pytest.mark.parametrize("compiled", [(True, False), (False, True), (True, True)])
def test_second_derivatives_under_compiled_autograd(compiled, kind, fresh_compiler):
    """Of gradients asked for with create_graph, by some of the parameters or all."""
    calls = {
        "linear": lambda x, w, b: tfl.linear(tfl.linear_gelu(x, w[0], b), w[1], b),
        "low": lambda x, w, b: tfl.linear(tfl.linear_gelu(x, w[0], b, memory="low"), w[1], b),
        "glu": lambda x, w, b: tfl.linear(tfl.linear_glu(x, w[0], w[1], b), w[2]),
        "block": lambda x, w, b: tfl.gated_mlp(x, *w, b, b, b),
        "mlp": lambda x, w, b: tfl.mlp(x, w, [b, None, b], "gelu_tanh"),
    }
    x, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (4,)))
    w = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def around(is_compiled):
        compiler = torch.compile(backend="eager")
        enable = torch._dynamo.compiled_autograd._enable
        return enable(compiler) if is_compiled else contextlib.nullcontext()

    def second(wanted, first_compiled, then_compiled):
        y = calls[kind](x, w, b)
        options = {"create_graph": True, "allow_unused": True}
        with around(first_compiled):
            first = torch.autograd.grad(y.square().sum(), wanted, **options)
        total = sum(g.square().sum() for g in first if g is not None)
        with around(then_compiled):
            return torch.autograd.grad(total, [x, b, *w], allow_unused=True)

    for wanted in ([x, b, *w], [w[1]], [b]):
        want = second(wanted, False, False)
        assert_same(second(wanted, *compiled), want, exact=1e-9)
