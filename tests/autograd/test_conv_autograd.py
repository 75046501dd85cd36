"""Autograd of fused::conv2d_relu: every order, torch.func, the engine's contract, saved memory."""

import itertools
import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from convolutions import ODD, Conv, full_precision  # noqa: F401
from helpers import DTYPES, Calls, Case, device_param, one_thread, policy, run, saved_bytes  # noqa: F401
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint
from transforms import assert_both, scalar

SMALL = Conv(batch=2, channels=4, out=4, size=(4, 3), kernel=(2, 2), padding=(1, 0), groups=2)
SUBSETS = [s for s in itertools.product([False, True], repeat=3) if any(s)]
CHECKED = [
    SMALL,
    Conv(batch=None, channels=2, out=3, size=(5, 4), kernel=(2, 3), stride=(2, 1)),
    Conv(batch=1, channels=2, out=2, size=(5, 5), kernel=(2, 2), dilation=(2, 3), groups=2),
    Conv(batch=2, channels=3, out=2, size=(3, 3), kernel=(1, 1), stride=(3, 2)),
]
policy_param = pytest.mark.parametrize("policy_name", ["auto", "cublaslt", "eager"])


def leaves_of(case: Case):
    return [t.clone().requires_grad_() for t in case.inputs]


# --- against finite differences -----------------------------------------------------------------


@device_param
@policy_param
@pytest.mark.parametrize("conv", CHECKED, ids=["groups", "no batch", "dilated", "1x1"])
def test_gradcheck(conv, policy_name, device):
    with policy(policy_name):
        for bias, last in ((True, ""), (False, "w"), (True, "" if conv.batch is None else "xw")):
            case = conv.smooth_case(device=device, bias=bias, last=last)
            assert gradcheck(conv.call, leaves_of(case), fast_mode=True)
            assert gradgradcheck(conv.call, leaves_of(case), fast_mode=True)


@device_param
def test_gradcheck_of_all_modes(device):
    conv = Conv(batch=1, channels=2, out=2, size=(3, 3), kernel=(2, 2), groups=2)
    case = conv.smooth_case(device=device)
    assert gradcheck(
        conv.call,
        leaves_of(case),
        check_forward_ad=True,
        check_batched_grad=True,
        check_undefined_grad=True,
    )
    assert gradgradcheck(conv.call, leaves_of(case), check_fwd_over_rev=True)


@device_param
@pytest.mark.parametrize("wanted", SUBSETS, ids=lambda s: "".join("FT"[v] for v in s))
def test_subsets(wanted, device):
    """Frozen parameters; inputs=[...] of backward; both orders."""
    case = SMALL.smooth_case(device=device)
    want = [g for g, r in zip(run(SMALL.eager, case)[1:], wanted) if r]
    leaves = [t.clone().requires_grad_(r) for t, r in zip(case.inputs, wanted)]
    assert gradcheck(SMALL.call, leaves, fast_mode=True)
    assert gradgradcheck(SMALL.call, leaves, fast_mode=True)
    SMALL.call(*leaves).backward(case.g)
    for a, b in zip([leaf.grad for leaf in leaves if leaf.requires_grad], want, strict=True):
        torch.testing.assert_close(a, b)
    leaves = leaves_of(case)
    chosen = [leaf for leaf, r in zip(leaves, wanted) if r]
    SMALL.call(*leaves).backward(case.g, inputs=chosen)
    assert [leaf.grad is not None for leaf in leaves] == list(wanted)
    for leaf, b in zip(chosen, want, strict=True):
        torch.testing.assert_close(leaf.grad, b)


@device_param
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_double_backward_equals_eager(dtype, device):
    conv = ODD["groups, strided, dilated"]
    case = conv.case(dtype, device, last="x")

    def second(fn):
        leaves = leaves_of(case)
        first = torch.autograd.grad(fn(*leaves), leaves, case.g, create_graph=True)
        total = sum(t.square().sum() for t in first)
        return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)

    for ours, eager in zip(second(conv.call), second(conv.eager), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, eager, rtol=2e-3, atol=2e-3 * eager.abs().max().item())


# --- torch.func ---------------------------------------------------------------------------------


@device_param
@policy_param
@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, None), (0, 0, 0)])
def test_vmap(dims, policy_name, device):
    case = SMALL.smooth_case(device=device)
    stack = [torch.stack([t, 2 * t, -t]) for t in case.inputs]
    args = [s if d == 0 else s[0] for s, d in zip(stack, dims)]
    with policy(policy_name), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule.*")
        got = vmap(SMALL.call, in_dims=dims)(*args)
    for k in range(3):
        one = [a[k] if d == 0 else a for a, d in zip(args, dims)]
        torch.testing.assert_close(got[k], SMALL.eager(*one))


@device_param
def test_transforms(device):
    case = SMALL.smooth_case(device=device)
    x, w, b = case.inputs
    tangents = tuple(torch.randn_like(t) for t in case.inputs)
    assert_both(SMALL, lambda fn: grad(scalar(fn), argnums=(0, 1, 2)), x, w, b)
    assert_both(SMALL, lambda fn: grad(scalar(fn)), x, w)
    assert_both(SMALL, lambda fn: lambda *a: vjp(fn, *a)[1](case.g), x, w, b)
    assert_both(SMALL, lambda fn: lambda *a: jvp(fn, a, tangents), x, w, b)
    assert_both(SMALL, lambda fn: jacrev(fn, argnums=(0, 1, 2)), x, w, b)
    assert_both(SMALL, lambda fn: jacfwd(fn, argnums=(1, 2)), x, w, b)
    # gradients of each sample
    images = torch.stack([x, -x])
    assert_both(SMALL, lambda fn: vmap(grad(scalar(fn), 1), in_dims=(0, None, None)), images, w, b)


@device_param
def test_dual_numbers_and_batched_gradients(device):
    case = SMALL.smooth_case(device=device)

    def tangent(fn):
        with fwAD.dual_level():
            args = [fwAD.make_dual(t, torch.ones_like(t)) for t in case.inputs]
            return fwAD.unpack_dual(fn(*args))

    for ours, eager in zip(tangent(SMALL.call), tangent(SMALL.eager), strict=True):
        torch.testing.assert_close(ours, eager)
    gs = torch.stack([case.g, 2 * case.g, -case.g])
    leaves = leaves_of(case)
    y = SMALL.call(*leaves)
    batched = torch.autograd.grad(y, leaves, gs, is_grads_batched=True, retain_graph=True)
    for k, g in enumerate(gs):
        for a, b in zip(batched, torch.autograd.grad(y, leaves, g, retain_graph=True)):
            torch.testing.assert_close(a[k], b)


# --- the engine's contract ----------------------------------------------------------------------


@device_param
@policy_param
def test_retain_graph_hooks_and_no_gradient(policy_name, device):
    case = SMALL.smooth_case(device=device)
    with policy(policy_name):
        leaves, seen = leaves_of(case), []
        y = SMALL.call(*leaves)
        y.register_hook(lambda g: seen.append(g.clone()))
        first = torch.autograd.grad(y, leaves, case.g, retain_graph=True)
        again = torch.autograd.grad(y, leaves, case.g)
        assert torch.equal(seen[0], case.g), "the hook sees dL/dy"
        assert all(torch.equal(a, b) for a, b in zip(first, again))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y, leaves, case.g)
        with torch.no_grad():
            assert not SMALL.call(*leaves).requires_grad
        with torch.inference_mode():
            assert SMALL.call(*leaves).is_inference()


@device_param
def test_in_place_edits(device):
    """Of what is saved: torch's error. Of the bias, which is not needed again: nothing."""
    case = SMALL.smooth_case(device=device)
    for which in ("input", "weight", "output", "bias"):
        x, w, b = leaves_of(case)
        y = SMALL.call(x, w, b)
        with torch.no_grad():
            {"input": x, "weight": w, "output": y, "bias": b}[which].add_(1)
        if which == "bias":
            for a, want in zip(
                torch.autograd.grad(y, (x, w, b), case.g), run(SMALL.eager, case)[1:]
            ):
                torch.testing.assert_close(a, want)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


@device_param
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_and_saved_tensor_hooks(reentrant, device):
    conv = Conv(channels=4, out=4, padding=(1, 1))
    case = conv.smooth_case(device=device)

    def block(x, w, b):
        return conv.call(conv.call(x, w, b), w, b)

    want = run(block, case)
    leaves = leaves_of(case)
    checkpoint(block, *leaves, use_reentrant=reentrant).backward(case.g)
    for leaf, w in zip(leaves, want[1:], strict=True):
        torch.testing.assert_close(leaf.grad, w)
    leaves = leaves_of(case)
    to_numpy = lambda t: (t.cpu().contiguous().numpy().copy(), t.device)  # noqa: E731
    back = lambda parts: torch.from_numpy(parts[0]).to(parts[1])  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(to_numpy, back):
        y = block(*leaves)
    for a, w in zip(torch.autograd.grad(y, leaves, case.g), want[1:], strict=True):
        torch.testing.assert_close(a, w)


# --- memory -------------------------------------------------------------------------------------


@device_param
@policy_param
@pytest.mark.parametrize("wanted", SUBSETS, ids=lambda s: "".join("FT"[v] for v in s))
def test_keeps_no_more_than_eager(wanted, policy_name, device):
    for conv, dtype in itertools.product((ODD["block"], ODD["groups"]), DTYPES):
        case = conv.case(dtype, device)
        leaves = [t.clone().requires_grad_(r) for t, r in zip(case.inputs, wanted)]
        with policy(policy_name):
            ours = saved_bytes(lambda a=leaves, c=conv: c.call(*a), leaves[1:])
        eager = saved_bytes(lambda a=leaves, c=conv: c.eager(*a), leaves[1:])
        assert ours <= eager, f"{dtype}: keeps {ours} bytes, eager {eager}"
        if policy_name == "auto":
            size = case.x.element_size()
            kept = (case.x.numel() if wanted[0] or wanted[1] else 0) + case.g.numel()
            assert ours == kept * size, "input and output, and neither bias nor pre-activation"


@device_param
def test_nothing_is_kept_or_computed_that_is_not_wanted(device):
    case = SMALL.case(torch.float32, device)
    leaves = leaves_of(case)
    with torch.no_grad(), Calls() as calls:
        assert SMALL.call(*leaves).grad_fn is None
    assert not [name for name in calls.names if "backward" in name]
    assert saved_bytes(lambda: SMALL.call(*case.inputs)) == 0
    x, w, b = case.inputs
    y = SMALL.call(x, w, b.requires_grad_())
    with Calls() as calls:
        y.backward(case.g)
    assert not [name for name in calls.names if "convolution" in name], "only sums are needed"
