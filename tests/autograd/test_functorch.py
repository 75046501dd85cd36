"""vmap, torch.func and forward-mode AD give torch's values (through the composite formula)."""

import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers import Case, device_param, op_param, policy, preactivation, random_case
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from transforms import assert_both, scalar

policy_param = pytest.mark.parametrize("policy_name", ["auto", "cublaslt", "eager"])


def case_of(device, lead=(3,), i=4, o=5) -> Case:
    for seed in range(1000):  # clear of ReLU's kink, where the policies may differ
        case = random_case(lead, i, o, torch.float64, device, seed=seed)
        if preactivation(case).abs().min() > 1e-2:
            return case
    raise AssertionError("no such data")


@device_param
@op_param
@policy_param
@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, None), (0, 0, None), (0, 0, 0)])
def test_vmap(dims, policy_name, op, device):
    """Over tokens, over weights (an ensemble), over all; equal to a loop, and no slow fallback."""
    case = case_of(device, (3, 2))
    stack = [torch.stack([t, 2 * t, -t]) for t in (case.x[0], case.w, case.b)]
    args = [s if d == 0 else s[0] for s, d in zip(stack, dims)]
    with policy(policy_name), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule.*")
        got = vmap(op.call, in_dims=dims)(*args)
    for k in range(3):
        one = [a[k] if d == 0 else a for a, d in zip(args, dims)]
        torch.testing.assert_close(got[k], op.eager(*one))


@device_param
@op_param
def test_vmap_over_other_dimensions(op, device):
    case = case_of(device, (3, 2))
    assert_both(op, lambda fn: vmap(fn, in_dims=(1, None, None), out_dims=1), *case.inputs)
    assert_both(op, lambda fn: vmap(fn, in_dims=(0, None)), case.x, case.w)
    nested = vmap(vmap(op.call, in_dims=(0, None, None)), in_dims=(0, None, None))
    torch.testing.assert_close(nested(*case.inputs), op.eager(*case.inputs))
    weights = torch.stack([case.w, -case.w], dim=2)
    assert_both(op, lambda fn: vmap(fn, in_dims=(None, 2)), case.x, weights)


@device_param
@op_param
def test_backward_through_vmap(op, device):
    """Ordinary autograd outside, vmap inside."""
    case = case_of(device, (3, 2))

    def gradients(fn):
        leaves = [t.clone().requires_grad_() for t in case.inputs]
        y = vmap(fn, in_dims=(0, None, None))(*leaves)
        return torch.autograd.grad(y, leaves, case.g)

    for a, b in zip(gradients(op.call), gradients(op.eager)):
        torch.testing.assert_close(a, b)


@device_param
@op_param
@policy_param
def test_grad(policy_name, op, device):
    case = case_of(device)
    with policy(policy_name):
        for argnums in (0, 1, 2, (0, 1, 2)):
            assert_both(op, lambda fn, n=argnums: grad(scalar(fn), argnums=n), *case.inputs)
        assert_both(op, lambda fn: grad(scalar(fn)), case.x, case.w)  # no bias


@device_param
@op_param
def test_vjp_and_jvp(op, device):
    case = case_of(device)
    tangents = tuple(torch.randn_like(t) for t in case.inputs)
    assert_both(op, lambda fn: lambda *a: vjp(fn, *a)[1](case.g), *case.inputs)
    assert_both(op, lambda fn: lambda *a: jvp(fn, a, tangents), *case.inputs)
    one = lambda fn: lambda x: jvp(lambda x: fn(x, case.w, case.b), (x,), tangents[:1])  # noqa: E731
    assert_both(op, one, case.x)


@device_param
@op_param
@pytest.mark.parametrize("jacobian", [jacrev, jacfwd], ids=["jacrev", "jacfwd"])
def test_jacobians(jacobian, op, device):
    case = case_of(device)
    assert_both(op, lambda fn: jacobian(fn, argnums=(0, 1, 2)), *case.inputs)


@device_param
@op_param
def test_nested_transforms(op, device):
    case = case_of(device, (2,), 3, 4)
    x, w, b = case.inputs
    assert_both(op, lambda fn: hessian(scalar(fn)), x, w, b)
    assert_both(op, lambda fn: grad(lambda *a: grad(scalar(fn), 1)(*a).sum()), x, w, b)
    assert_both(op, lambda fn: lambda x: jvp(grad(lambda x: scalar(fn)(x, w, b)), (x,), (x,)), x)
    # per-sample gradients
    assert_both(op, lambda fn: vmap(grad(scalar(fn), 1), in_dims=(0, None, None)), x, w, b)


@device_param
@op_param
def test_forward_ad_dual_numbers(op, device):
    case = case_of(device)
    for chosen in ((0,), (1,), (2,), (0, 1, 2)):

        def tangent(fn, chosen=chosen):
            with fwAD.dual_level():
                args = [
                    fwAD.make_dual(t, torch.ones_like(t)) if k in chosen else t
                    for k, t in enumerate(case.inputs)
                ]
                value, rate = fwAD.unpack_dual(fn(*args))
                return value, rate

        for a, b in zip(tangent(op.call), tangent(op.eager)):
            torch.testing.assert_close(a, b)


def test_functional_call_over_an_ensemble_of_modules():
    """torch.func's model ensembling: stacked parameters of our modules under vmap."""
    import torch_fused_linear as tfl

    models = [torch.nn.Sequential(tfl.FusedLinearGELU(4, 6), tfl.FusedLinear(6, 2)) for _ in "abc"]
    params, buffers = torch.func.stack_module_state(models)
    x = torch.randn(5, 4)

    def call(p, b):
        return torch.func.functional_call(models[0], (p, b), (x,))

    got = vmap(call)(params, buffers)
    torch.testing.assert_close(got, torch.stack([m(x) for m in models]))
