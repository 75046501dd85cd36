"""Derivatives of every operator in every order and by every transform, as torch's own have them."""

import contextlib
import itertools
import warnings

import operators as ops
import pytest
import torch
import torch.autograd.forward_ad as fwAD
from numerics import assert_same, run
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import torch_fused_linear as tfl

# --- against finite differences ------------------------------------------------------------------

SIZES = [((2,), True), ((2,), False), ((), True), ((1, 2), True)]


@ops.every_op
@ops.policy_param
def test_first_and_second_order(policy, op, device):
    fast = {"fast_mode": op not in ops.OPS or policy != "auto"}
    for lead, bias in SIZES if op in ops.OPS or policy == "auto" else SIZES[:1]:
        leaves = op.smooth_case(lead, 3, 4, device=device, bias=bias).leaves()
        with tfl.set_policy(policy):
            assert gradcheck(op.call, leaves, **fast)
            assert gradgradcheck(op.call, leaves, **fast)


@ops.every_op
def test_forward_mode_and_batches(op, device):
    case = op.smooth_case((2,), 3, 4, device=device)
    ways = ("forward_ad", "batched_grad", "batched_forward_grad", "undefined_grad")
    if op is ops.CONV:  # torch's own convolution has no batched forward mode
        ways = ways[:2] + ways[3:]
    options = {f"check_{way}": True for way in ways}
    assert gradcheck(op.call, case.leaves(), fast_mode=True, **options)
    options = {"check_batched_grad": True, "check_fwd_over_rev": op in (*ops.OPS, ops.CONV)}
    assert gradgradcheck(op.call, case.leaves(), fast_mode=True, **options)


@ops.every_op
def test_derivatives_of_inputs_by_columns(op, device):
    case = op.smooth_case((2, 3), 4, 5, device=device)
    leaves = [t.mT.contiguous().mT if t.dim() > 1 else t for t in case.inputs]
    assert gradcheck(op.call, [t.requires_grad_() for t in leaves], fast_mode=True)


def test_derivatives_of_the_step_of_a_sharded_convolution():
    leaves = [torch.randn(4, 4, 3, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    step, options = torch.ops.fused._conv2d_backward, ([1, 1], [1, 1], [1, 1], 1, [True] * 3)
    assert gradcheck(lambda *tensors: step(*tensors, *options), leaves, fast_mode=True)


# --- second order, beside eager ------------------------------------------------------------------


def second(call, case, wanted=None):
    """Gradients of the squared norm of some of the gradients."""
    leaves = case.leaves()
    chosen = leaves if wanted is None else [leaves[k] for k in wanted]
    first = torch.autograd.grad(call(*leaves), chosen, case.g, create_graph=True)
    total = sum(t.to(torch.promote_types(t.dtype, torch.float32)).square().sum() for t in first)
    if not total.requires_grad:  # a lone layer's bias has a gradient that depends on nothing
        return [*first, *map(torch.zeros_like, leaves)]
    options = {"allow_unused": True, "materialize_grads": True}
    return [*first, *torch.autograd.grad(total, leaves, **options)]


@ops.every_op
def test_second_order_of_every_input_and_pair(op, device):
    """That of an upper weight alone reaches the layers below it."""
    case = op.smooth_case((3,), 4, 5, device=device, seed=1)
    assert_same(second(op.call, case), second(op.eager, case))
    for size in (1, 2):
        for wanted in itertools.combinations(range(len(case.inputs)), size):
            ours, eager = (second(call, case, wanted) for call in (op.call, op.eager))
            assert_same(ours, eager, f"{op!r} {wanted}")


@ops.op_param
def test_second_order_of_narrow_types(op, device):
    case = ops.without_kinks(op, op.case((6,), 8, 9, torch.bfloat16, device))
    for ours, eager in zip(second(op.call, case, (0, 1)), second(op.eager, case, (0, 1))):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, eager, rtol=0.1, atol=0.05 * eager.abs().max().item())


@ops.every_op
def test_batches_that_are_differentiated_again(op, device):
    case = op.smooth_case((2,), 3, 4, device=device)
    results = []
    for call in (op.call, op.eager):
        leaves = case.leaves()
        y = call(*leaves)
        batch = torch.stack([y.detach().sin(), y.detach().cos()]).requires_grad_()
        options = {"is_grads_batched": True, "create_graph": True}
        first = torch.autograd.grad(y, leaves, batch, **options)
        total = sum(g.square().sum() for g in first)
        options = {"allow_unused": True, "materialize_grads": True}
        results.append([*first, *torch.autograd.grad(total, [*leaves, batch], **options)])
    assert_same(*results)


@pytest.mark.parametrize("policy", ["auto", "cublaslt", "eager"])
@ops.rows([op for op in ops.EVERY if op.label in ("relu", "relu low")])
def test_derivatives_at_zero(op, policy, device):
    """ReLU's second derivative is zeros, and not nothing at all."""
    case, results = op.smooth_case(device=device), []
    for call in (op.call, op.eager):
        leaves = case.leaves()
        with tfl.set_policy(policy):
            y = call(*leaves)
            (grad_bias,) = torch.autograd.grad(y, leaves[2], case.g, create_graph=True)
            results.append(torch.autograd.grad(grad_bias.sum(), leaves))
    assert_same(*results)


@ops.rows(
    [ops.mlp(a, 4, (4, 4, 4), memory=m) for a in ("relu", "gelu_tanh") for m in ("default", "low")]
)
@pytest.mark.parametrize("frozen", [(), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("upper", [(4, 7), (6,)], ids=["weight and bias", "bias"])
def test_third_order_through_the_layers_below(upper, frozen, op, device):
    """First only the upper layers' gradients, then those of all. Inputs: x, 4 weights, 4 biases."""
    case, results = op.case((2,), 4, 4, device=device, seed=5), []
    for call in (op.call, op.eager):
        leaves = case.leaves([k not in frozen for k in range(9)])
        asked = [leaves[k] for k in upper]
        first = torch.autograd.grad(call(*leaves).cos().sum(), asked, create_graph=True)
        trained = [t for t in leaves if t.requires_grad]
        then = torch.autograd.grad(sum(t.sin().sum() for t in first), trained, create_graph=True)
        third = torch.autograd.grad(sum(t.sin().sum() for t in then), trained)
        results.append([*first, *then, *third])
    assert_same(*results, exact=1e-11)


@ops.rows(
    [
        *(ops.stack("gelu_tanh", 2, memory=memory) for memory in ("default", "low")),
        ops.pair("apart", "silu"),
        ops.gated("apart", "silu", down=True),
        ops.mlp("gelu_tanh", 3),
    ]
)
@pytest.mark.parametrize("compiled", [(True, False), (False, True), (True, True)])
def test_second_order_under_compiled_autograd(compiled, op, fresh_compiler):
    """Differentiates gradients made with create_graph by some of the parameters or all."""
    leaves = op.case().leaves()

    def around(is_compiled):
        enable = torch._dynamo.compiled_autograd._enable
        return enable(torch.compile(backend="eager")) if is_compiled else contextlib.nullcontext()

    def of(wanted, first_compiled, then_compiled):
        y = op.call(*leaves)
        options = {"create_graph": True, "allow_unused": True}
        with around(first_compiled):
            first = torch.autograd.grad(y.square().sum(), wanted, **options)
        total = sum(g.square().sum() for g in first if g is not None)
        with around(then_compiled):
            return torch.autograd.grad(total, leaves, allow_unused=True)

    for wanted in (leaves, leaves[-2:-1]):
        assert_same(of(wanted, *compiled), of(wanted, False, False), exact=1e-9)


# --- vmap, torch.func, forward mode --------------------------------------------------------------


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else [t for r in result for t in tensors(r)]


def assert_both(op, transform, *args):
    ours, eager = tensors(transform(op.call)(*args)), tensors(transform(op.eager)(*args))
    assert_same(ours, eager, repr(op), exact=1e-10)


def scalar(fn):
    return lambda *args: fn(*args).square().sum()


MAPPED = {"input": {0}, "weight": {1}, "both": {0, 1}, "all": set(range(9))}


@ops.every_op
@ops.policy_param
@pytest.mark.parametrize("which", MAPPED)
def test_vmap(which, policy, op, device):
    """Over tokens, over weights (an ensemble), over all; equal to a loop, and no slow fallback."""
    case = op.smooth_case((2,), 4, 5, device=device)
    stacks = [torch.stack([t, 2 * t, -t]) for t in case.inputs]
    dims = tuple(0 if k in MAPPED[which] else None for k in range(len(stacks)))
    args = [s if d == 0 else s[0] for s, d in zip(stacks, dims)]
    with tfl.set_policy(policy), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule.*")
        got = vmap(op.call, in_dims=dims)(*args)
    for k in range(3):
        one = [a[k] if d == 0 else a for a, d in zip(args, dims)]
        assert_same([got[k]], [op.eager(*one)], f"{op!r} {which}")


def first(fn, args):
    """As a function of the first argument alone."""
    return lambda x: fn(x, *args[1:])


TRANSFORMS = {
    "grad": lambda fn, args: grad(scalar(fn), tuple(range(len(args)))),
    "grad of the second": lambda fn, args: grad(scalar(fn), 1),
    "grad without biases": lambda fn, args: lambda *a: grad(scalar(fn))(*a[: len(args)]),
    "vjp": lambda fn, args: lambda *a: vjp(fn, *a)[1](torch.ones_like(fn(*a))),
    "jvp": lambda fn, args: lambda *a: jvp(fn, a, tuple(t.cos() for t in a)),
    "jvp by one": lambda fn, args: lambda x, *_: jvp(first(fn, args), (x,), (x.cos(),)),
    "jacrev": lambda fn, args: jacrev(fn, tuple(range(len(args)))),
    "jacfwd": lambda fn, args: jacfwd(fn, tuple(range(1, len(args)))),
    "hessian": lambda fn, args: hessian(scalar(fn)),
    "grad of grad": lambda fn, args: grad(lambda *a: grad(scalar(fn), 1)(*a).sum()),
    "jvp of grad": lambda fn, args: (
        lambda x, *_: jvp(grad(first(scalar(fn), args)), (x,), (x.cos(),))
    ),
    "gradients of each sample": lambda fn, args: (
        lambda x, *a: vmap(lambda t: grad(scalar(fn), 1)(t, *a))(torch.stack([x, -x]))
    ),
    "vmap of vmap": lambda fn, args: (
        lambda x, *a: vmap(vmap(lambda t: fn(t, *a)))(torch.stack([torch.stack([x, -x])] * 2))
    ),
    "vmap along other dimensions": lambda fn, args: (
        lambda x, w, *a: vmap(lambda t, v: fn(t, v, *a), in_dims=(1, w.dim()), out_dims=1)(
            torch.stack([x, -x], 1), torch.stack([w, -w], w.dim())
        )
    ),
}


@ops.every_op
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(name, op, device):
    args = tuple(op.smooth_case((2,), 3, 4, device=device, bias="biases" not in name).inputs)
    assert_both(op, lambda fn: TRANSFORMS[name](fn, args), *args)
    if name == "grad":
        for policy in ("cublaslt", "eager"):
            with tfl.set_policy(policy):
                assert_both(op, lambda fn: TRANSFORMS[name](fn, args), *args)


@ops.every_op
def test_autograd_around_vmap(op, device):
    case = op.smooth_case((2,), 3, 4, device=device)
    batch = ops.Case([torch.stack([case.x, -case.x]), *case.inputs[1:]], torch.stack([case.g] * 2))

    def mapped(call):
        return lambda x, *rest: vmap(lambda t: call(t, *rest))(x)

    assert_same(run(mapped(op.call), batch), run(mapped(op.eager), batch))


# The backward of SiLU has no forward mode.
@ops.rows([op for op in ops.OPS[1:] if op.name != "linear_silu"])
def test_forward_mode_over_the_gradients_of_two_roots(op, device):
    """One root is the next layer's output; the other one's gradient is a dual number."""
    case, results = op.case(device=device), []
    w2 = ops.linear("none").case((1,), 5, 6, device=device).w.requires_grad_()
    for fused in (True, False):
        leaves = [*case.leaves(), w2]
        y = (op.call if fused else op.eager)(*leaves[:3])
        z = (ops.LINEAR.call if fused else ops.LINEAR.eager)(y, w2)
        with fwAD.dual_level():
            dual = fwAD.make_dual(y.detach().sin(), y.detach().cos())
            found = torch.autograd.grad([z, y], leaves, [z.detach().sin(), dual])
            parts = [fwAD.unpack_dual(g) for g in found]
            results.append([t if t is None else t.clone() for part in parts for t in part])
    assert_same(*results)
