"""Selective activation checkpointing, eager and compiled: what policies see, and what they keep."""

import functools

import pytest
import torch
from helpers import one_thread  # noqa: F401
from numerics import assert_same, run
from operators import mlp, rows, stack
from processes import run_python
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from watching import Calls

from torch_fused_linear import flops

fused = torch.ops.fused
stacks = rows([stack("relu", 3), mlp("gelu_erf", 3, (16, 8))])


def saving(seen):
    """A policy that keeps the results of products and computes everything else anew."""

    def policy(context, op, *args, **kwargs):
        if not context.is_recompute:
            seen.append(op)
        kept = op.namespace == "fused" and op.overloadpacket.__name__ in flops.FORMULAS
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


@stacks
@pytest.mark.parametrize("selective", [True, False])
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(selective, op):
    """(Not compiled they are among the tests of every operator.)"""
    options = {"context_fn": saving([])} if selective else {}

    def checkpointed(*args):
        return checkpoint(op.call, *args, use_reentrant=False, **options)

    case = op.case()
    for call in (torch.compile(checkpointed, backend="aot_eager"), checkpointed):
        assert_same(run(call, case), run(op.eager, case))


@stacks
def test_policies_see_these_operators(op):
    """The names that docs give: with gradients the forward of a chain shows layer by layer."""
    seen = []
    checkpoint(op.call, *op.case().leaves(), use_reentrant=False, context_fn=saving(seen))
    hidden = fused._linear_aux if op.name == "mlp" else fused.linear_relu
    ours = [kind for kind in seen if kind.namespace == "fused"]
    assert ours == [hidden.default, hidden.default, fused.linear.default]
    assert {kind.overloadpacket.__name__ for kind in ours} <= flops.FORMULAS.keys()


@stacks
def test_tensors_that_the_checkpoint_policy_keeps_are_not_recomputed(op):
    def products_in_backward(**options):
        y = checkpoint(op.call, *op.case().leaves(), use_reentrant=False, **options)
        with Calls() as calls:
            y.sum().backward()
        products = ("fused::linear", "fused::linear_relu", "fused::_linear_aux")
        return sum(name in products for name in calls.names)

    # The last layer's result is needed by no gradient: checkpoint stops before it.
    assert products_in_backward() >= 2
    assert products_in_backward(context_fn=saving([])) == 0


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
    run_python(code)
