"""Autograd: gradients of every order against finite differences, and the engine's contract."""

import itertools

import pytest
import torch
from helpers import (
    GELU_ERF,
    GELU_TANH,
    LINEAR,
    OPS,
    RELU,
    Case,
    device_param,
    op_param,
    policy,
    preactivation,
    random_case,
    run,
    without_kinks,
)
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

policy_param = pytest.mark.parametrize("policy_name", ["auto", "cublaslt", "eager"])


def smooth_case(lead=(3,), i=4, o=5, device="cpu", bias=True):
    """fp64 data whose z keeps clear of ReLU's kink, so that finite differences mean something."""
    for seed in itertools.count():
        case = random_case(lead, i, o, torch.float64, device, bias, seed=seed)
        if preactivation(case).abs().min() > 1e-2:
            return case


def leaves_of(case: Case):
    return [t.clone().requires_grad_() for t in case.inputs]


def double_of(op):
    """A second-order quantity: the gradient of the squared norm of the gradients."""

    def compute(fn, case):
        leaves = leaves_of(case)
        first = torch.autograd.grad(fn(*leaves), leaves, case.g, create_graph=True)
        total = sum(t.square().sum() for t in first)
        return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)

    return compute(op.call, smooth_case()), compute(op.eager, smooth_case())


# --- against finite differences ----------------------------------------------------------------


@device_param
@op_param
@policy_param
@pytest.mark.parametrize("lead, bias", [((), True), ((3,), True), ((3,), False), ((2, 2), True)])
def test_gradcheck(lead, bias, policy_name, op, device):
    case = smooth_case(lead, device=device, bias=bias)
    with policy(policy_name):
        assert gradcheck(op.call, leaves_of(case))
        assert gradgradcheck(op.call, leaves_of(case))


@device_param
@op_param
def test_gradcheck_of_forward_mode_and_batched_gradients(op, device):
    assert gradcheck(
        op.call,
        leaves_of(smooth_case(device=device)),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        check_undefined_grad=True,
    )
    assert gradgradcheck(
        op.call,
        leaves_of(smooth_case(device=device)),
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
    )


@device_param
@op_param
def test_gradcheck_of_every_subset(op, device):
    for wanted in itertools.product([False, True], repeat=3):
        if any(wanted):
            case = smooth_case(device=device)
            leaves = [t.clone().requires_grad_(r) for t, r in zip(case.inputs, wanted)]
            assert gradcheck(op.call, leaves) and gradgradcheck(op.call, leaves)


@device_param
@op_param
def test_gradcheck_of_strided_inputs(op, device):
    case = smooth_case((2, 3), device=device)
    x = case.x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    w = case.w.t().contiguous().t().requires_grad_()
    assert gradcheck(op.call, [x, w, case.b.requires_grad_()], fast_mode=True)


@device_param
def test_gradcheck_through_a_chain(device):
    """Layers feeding layers: the saved output of one is the saved input of the next."""
    case = smooth_case((4,), 3, 6, device=device)
    second, third = (random_case(1, a, b, torch.float64, device) for a, b in [(6, 5), (5, 2)])

    def chain(x, w, b, w2, b2, w3):
        y = GELU_TANH.call(x, w, b)
        return LINEAR.call(GELU_ERF.call(y, w2, b2), w3) + y.sum()

    leaves = [*case.inputs, second.w, second.b, third.w]
    leaves = [t.clone().requires_grad_() for t in leaves]
    assert gradcheck(chain, leaves) and gradgradcheck(chain, leaves)


@device_param
@op_param
def test_double_backward_equals_eager(op, device):
    for ours, eager in zip(*double_of(op)):
        torch.testing.assert_close(ours, eager)


@device_param
@op_param
def test_low_precision_double_backward(op, device):
    case = without_kinks(random_case(6, 8, 9, torch.bfloat16, device))

    def second(fn):
        leaves = leaves_of(case)
        first = torch.autograd.grad(fn(*leaves), leaves, case.g, create_graph=True)
        total = first[0].float().square().sum() + first[1].float().square().sum()
        return torch.autograd.grad(total, leaves[:2])

    for ours, eager in zip(second(op.call), second(op.eager)):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, eager, rtol=0.1, atol=0.05 * eager.abs().max().item())


# --- the engine's contract ---------------------------------------------------------------------


@device_param
@op_param
@policy_param
def test_retain_graph_twice(policy_name, op, device):
    case = smooth_case(device=device)
    with policy(policy_name):
        want = run(op.call, case)[1:]
        leaves = leaves_of(case)
        y = op.call(*leaves)
        for _ in range(3):
            got = torch.autograd.grad(y, leaves, case.g, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(got, want))
        torch.autograd.grad(y, leaves, case.g)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y, leaves, case.g)


@device_param
@op_param
def test_create_graph_gives_the_same_first_gradients(op, device):
    case = smooth_case(device=device)
    leaves = leaves_of(case)
    got = torch.autograd.grad(op.call(*leaves), leaves, case.g, create_graph=True)
    for a, b in zip(got, run(op.call, case)[1:]):
        torch.testing.assert_close(a.detach(), b)


@device_param
@op_param
def test_in_place_edit_of_a_saved_tensor_raises(op, device):
    """torch's version check: a silently wrong gradient otherwise."""
    saved = ("input", "weight", "output") if op is RELU else ("input", "weight")
    for which in saved:
        x, w, b = leaves_of(smooth_case(device=device))
        y = op.call(x, w, b)
        with torch.no_grad():
            {"input": x, "weight": w, "output": y}[which].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@device_param
@op_param
def test_in_place_edit_of_what_is_not_saved_is_fine(op, device):
    """As in eager: the bias is not needed again, nor the output of linear and GELU."""
    case = smooth_case(device=device)
    x, w, b = leaves_of(case)
    y = op.call(x, w, b)
    with torch.no_grad():
        b.add_(1)
    if op is not RELU:
        y = y.mul_(2)
    got = torch.autograd.grad(y, (x, w, b), case.g)
    scale = 1 if op is RELU else 2
    for a, want in zip(got, run(op.eager, case)[1:]):
        torch.testing.assert_close(a, want * scale)


@device_param
@op_param
def test_gradients_accumulate(op, device):
    """Two backward passes, and one weight used twice in a graph."""
    case = smooth_case((4,), 5, 5, device=device)
    want = run(op.eager, case)[1:]
    leaves = leaves_of(case)
    for _ in range(2):
        op.call(*leaves).backward(case.g)
    for leaf, w in zip(leaves, want):
        torch.testing.assert_close(leaf.grad, 2 * w)

    def twice(fn):
        x, w, b = leaves_of(case)
        return torch.autograd.grad(fn(fn(x, w, b), w, b), (x, w, b), case.g)

    for a, b in zip(twice(op.call), twice(op.eager)):
        torch.testing.assert_close(a, b)


@device_param
@op_param
def test_subsets_through_autograd_grad(op, device):
    case = smooth_case(device=device)
    want = run(op.eager, case)[1:]
    for wanted in itertools.product([False, True], repeat=3):
        if any(wanted):
            leaves = leaves_of(case)
            chosen = [leaf for leaf, r in zip(leaves, wanted) if r]
            got = torch.autograd.grad(op.call(*leaves), chosen, case.g)
            for a, b in zip(got, [g for g, r in zip(want, wanted) if r]):
                torch.testing.assert_close(a, b)
            op.call(*leaves).backward(case.g, inputs=chosen)
            assert [leaf.grad is not None for leaf in leaves] == list(wanted)


@device_param
@op_param
def test_output_hooks_see_the_true_gradient(op, device):
    """dL/dy and not dL/dz, also where the consumer is one of our layers."""
    case = smooth_case((4,), 5, 5, device=device)

    def watched(fn):
        seen = []
        x, w, b = leaves_of(case)
        y = fn(x, w, b)
        y.register_hook(lambda g: seen.append(g.clone()))
        middle = fn(y, w, b)
        middle.retain_grad()
        middle.register_hook(lambda g: g * 2)
        fn(middle, w, b).backward(case.g)
        return [*seen, middle.grad, x.grad, w.grad, b.grad]

    ours, eager = watched(op.call), watched(op.eager)
    assert len(ours) == len(eager)
    for a, b in zip(ours, eager):
        torch.testing.assert_close(a, b)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return None


@device_param
@op_param
def test_undefined_gradient(op, device):
    """A consumer may return None for its input: no gradient then, and no crash."""
    leaves = leaves_of(smooth_case(device=device))
    (_NoGradient.apply(op.call(*leaves)).sum() + leaves[0].sum()).backward()
    assert torch.equal(leaves[0].grad, torch.ones_like(leaves[0]))
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves[1:])


@device_param
@op_param
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpoint(reentrant, op, device):
    case = smooth_case((4,), 5, 5, device=device)

    def block(x, w, b):
        return op.call(op.call(x, w, b), w, b)

    want = run(block, case)
    leaves = leaves_of(case)
    y = checkpoint(block, *leaves, use_reentrant=reentrant)
    y.backward(case.g)
    assert torch.equal(y, want[0])
    for leaf, w in zip(leaves, want[1:]):
        torch.testing.assert_close(leaf.grad, w)


@device_param
@op_param
@policy_param
def test_saved_tensor_hooks_round_trip(policy_name, op, device):
    """All that is saved passes through the hooks (offloading, compression); nothing escapes."""
    case = smooth_case((4,), 5, 6, device=device)
    packed = []

    def pack(t):
        packed.append(t)
        return t.cpu().numpy().copy(), t.device

    def unpack(parts):
        return torch.from_numpy(parts[0]).to(parts[1])

    with policy(policy_name):
        want = run(op.call, case)
        leaves = leaves_of(case)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = op.call(*leaves)
        assert packed
        for a, b in zip(torch.autograd.grad(y, leaves, case.g), want[1:]):
            torch.testing.assert_close(a, b)


@device_param
@op_param
def test_is_grads_batched(op, device):
    case = smooth_case(device=device)
    gs = torch.stack([case.g, 2 * case.g, -case.g, torch.ones_like(case.g)])
    leaves = leaves_of(case)
    y = op.call(*leaves)
    batched = torch.autograd.grad(y, leaves, gs, is_grads_batched=True, retain_graph=True)
    for k, g in enumerate(gs):
        for a, b in zip(batched, torch.autograd.grad(y, leaves, g, retain_graph=True)):
            torch.testing.assert_close(a[k], b)


@device_param
@op_param
def test_inference_mode_and_no_grad(op, device):
    case = smooth_case(device=device)
    leaves = leaves_of(case)
    want = op.eager(*case.inputs)
    with torch.inference_mode():
        y = op.call(*leaves)
        assert y.is_inference() and not y.requires_grad
    torch.testing.assert_close(y.clone(), want)
    with torch.no_grad():
        assert not op.call(*leaves).requires_grad
    # an inference tensor may be an input where no gradient is wanted
    with torch.inference_mode():
        x = case.x.clone()
    torch.testing.assert_close(op.call(x, case.w, case.b), want)


def test_modules_on_two_threads_share_parameters():
    """Backward runs on whichever thread calls it; nothing is kept per process but plans."""
    from concurrent.futures import ThreadPoolExecutor

    cases = [random_case(t, 16, 24, torch.float64, seed=t) for t in (3, 9, 33, 65)]
    jobs = [(op, case) for op in OPS for case in cases] * 4
    want = [run(op.call, case) for op, case in jobs]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda job: run(job[0].call, job[1]), jobs))
    for a, b in zip(got, want):
        for x, y in zip(a, b):
            torch.testing.assert_close(x, y)
