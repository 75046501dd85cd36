"""Activation checkpointing, whole and selective, eager and compiled; FLOP counts."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import one_thread  # noqa: F401
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torch_fused_linear as tfl
from torch_fused_linear import flops

fused = torch.ops.fused
ROOT = Path(tfl.__file__).parents[1]


def layers(x, w, b, v, c):
    return tfl.linear(tfl.linear_gelu(tfl.linear_relu(x, w, b), v, c), w)


def chain(x, w, b, v, c):
    return tfl.mlp(x, [w, v, w], [b, c, None], "gelu_erf")


def plain(x, w, b, v, c):
    return F.linear(F.gelu(F.linear(F.relu(F.linear(x, w, b)), v, c), approximate="tanh"), w)


def plain_chain(x, w, b, v, c):
    return F.linear(F.gelu(F.linear(F.gelu(F.linear(x, w, b)), v, c)), w)


def tensors():
    shapes = [(2, 5, 8), (16, 8), (16,), (8, 16), (8,)]
    return [torch.randn(s).requires_grad_() for s in shapes]


def saving(seen):
    """A policy that keeps the results of products and computes everything else anew."""

    def policy(context, op, *args, **kwargs):
        if not context.is_recompute:
            seen.append(op)
        kept = op.namespace == "fused" and op.overloadpacket.__name__ in flops.FORMULAS
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    """The operators of ours that are run."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fused":
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


def gradients(function, args):
    """Through backward(): reentrant checkpoints do not take autograd.grad."""
    args = [t.detach().requires_grad_() for t in args]
    function(*args).square().sum().backward()
    return [t.grad for t in args]


# torch.compile does not take reentrant checkpoints.
WAYS = [("reentrant", False), *((h, c) for h in ("whole", "selective") for c in (False, True))]


@pytest.mark.parametrize("how, compiled", WAYS)
@pytest.mark.parametrize("function", [layers, chain])
def test_checkpoint_gives_the_same_gradients(function, how, compiled):
    torch._dynamo.reset()
    options = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        options["context_fn"] = saving([])

    def checkpointed(*args):
        return checkpoint(function, *args, **options)

    call = torch.compile(checkpointed, backend="aot_eager") if compiled else checkpointed
    args = tensors()
    for a, b in zip(gradients(call, args), gradients(function, args), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("function", [layers, chain])
def test_policies_see_these_operators(function):
    """The names that docs give: with gradients the forward of a chain shows layer by layer."""
    seen = []
    checkpoint(function, *tensors(), use_reentrant=False, context_fn=saving(seen))
    aux = fused._linear_aux.default
    first = fused.linear_relu.default if function is layers else aux
    ours = [op for op in seen if op.namespace == "fused"]
    assert ours == [first, aux, fused.linear.default]
    assert {op.overloadpacket.__name__ for op in ours} <= flops.FORMULAS.keys()


@pytest.mark.parametrize("function", [layers, chain])
def test_what_the_policy_keeps_is_not_computed_again(function):
    products = ("linear", "linear_relu", "_linear_aux")

    def products_in_backward(**options):
        args = tensors()
        y = checkpoint(function, *args, use_reentrant=False, **options)
        with Count() as count:
            y.sum().backward()
        return sum(op.overloadpacket.__name__ in products for op in count.ops)

    # The last layer's result is needed by no gradient: checkpoint stops before it.
    assert products_in_backward() >= 2
    assert products_in_backward(context_fn=saving([])) == 0


def count_flops(function, args, backward):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        with torch.set_grad_enabled(backward):
            y = function(*args)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("wanted", [(0, 1, 2, 3, 4), (0,), (1, 2), (4,), ()])
@pytest.mark.parametrize("ours, torchs", [(layers, plain), (chain, plain_chain)])
def test_flops_are_those_of_the_plain_model(ours, torchs, wanted):
    args = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors())]
    want = count_flops(torchs, args, bool(wanted))
    assert count_flops(ours, args, bool(wanted)) == want > 0


def test_flops_of_what_only_policies_call():
    x, w, b, *_ = (t.detach() for t in tensors())
    forward = 2 * 10 * 8 * 16
    assert count_flops(fused._linear_aux, (x, w, b, "relu"), False) == forward
    assert count_flops(fused.linear_gelu, (x, w, b), False) == forward
    y = x @ w.t()
    mask = [False, False, False]
    across = fused._linear_backward_across
    assert count_flops(across, (y, x, w, None, "none", mask, x, "relu", True), False) == forward


@pytest.mark.parametrize("first", ["torch.utils.flop_counter", "torch_fused_linear"])
def test_formulas_register_whichever_comes_first(first):
    """The counter's import is slow, and not ours to make."""
    code = f"""
import sys, torch, {first}
if "{first}" == "torch_fused_linear":
    assert "torch.utils.flop_counter" not in sys.modules
import torch_fused_linear, torch.utils.flop_counter as counter
assert torch.ops.fused.linear_relu in counter.flop_registry
assert not any(getattr(f, "module", "") == "torch.utils.flop_counter" for f in sys.meta_path)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
