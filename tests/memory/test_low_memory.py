"""memory='low': the bits that keeping more would give, in graphs cut, reused or written to.

What is kept is in test_kept.py; every derivative, hook and error of the rows that say "low" in
tests/autograd.
"""

from functools import partial

import pytest
import torch
from numerics import assert_bits, assert_same, run
from operators import ACTS, gated, linear, mlp, rows, stack
from torch.autograd.graph import saved_tensors_hooks
from watching import explained, operators_of

import torch_fused_linear as tfl

fused = torch.ops.fused
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SMOOTH = [a for a in ACTS if a != "relu"]
RECOMPUTED = {
    **{f"mlp {a}": lambda m, a=a: mlp(a, 3, memory=m) for a in SMOOTH},
    **{f"block {a}": lambda m, a=a: gated("apart", a, True, memory=m) for a in ACTS},
    "relu": lambda m: linear("relu", memory=m),
    "stack relu": lambda m: stack("relu", 3, memory=m),
}


@pytest.mark.parametrize("name", RECOMPUTED)
@dtype_param
def test_recomputed_output_is_bitwise_equal(dtype, name, device):
    """To the one of the default, and under hooks on saved tensors."""
    low, default = (RECOMPUTED[name](memory) for memory in ("low", "default"))
    for lead in ((), (1,), (5, 7), (0,)):
        case = low.case(lead, 16, 9, dtype, device)
        got = run(low.call, case)
        leaves = case.leaves()
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            y = low.call(*leaves)
        assert_bits([y, *torch.autograd.grad(y, leaves, case.g)], got, str(lead))
        if not name.startswith("mlp"):  # an epilogue rounds GELU's sum only afterwards
            assert_bits(run(default.call, case), got, str(lead))


@pytest.mark.parametrize("op", [linear, lambda a, memory: gated("apart", a, memory=memory)])
@pytest.mark.parametrize("activation", SMOOTH)
def test_a_layer_alone_does_what_it_does_by_default(activation, op, device):
    """Bit for bit, by the same operators."""
    results = []
    for memory in ("default", "low"):
        layer = op(activation, memory=memory)
        case = layer.case((5,), 16, 9, torch.bfloat16, device)
        results.append(explained(partial(run, layer.call, case)))
    (by_default, ran), (low, ran_low) = results
    assert_bits(low, by_default)
    assert ran_low.calls == ran.calls


@dtype_param
def test_numerics_are_eagers(dtype, device):
    """The pre-activation is rounded before GELU, as eager rounds it: on a CPU bit for bit."""
    op = mlp("gelu_tanh", 2, (24,), memory="low")
    case = op.case((9,), 16, 8, dtype, device)
    compare = assert_bits if device.type == "cpu" else assert_same
    compare(run(op.call, case), run(op.eager, case))


def test_hooks_on_saved_tensors_are_given_what_torch_keeps():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    h, kept = tfl.linear_gelu(x, w, memory="low"), []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        tfl.linear(h, w)
    assert {h.data_ptr(), w.data_ptr()} == {t.data_ptr() for t in kept}


def ran(op, wanted=None):
    """(operator, path) of the rows of a step."""
    case = op.case((5,), 6, 8)
    leaves = case.leaves(wanted)
    return operators_of(lambda: op.call(*leaves).backward(case.g), "operator", "path")


@pytest.mark.parametrize("form", ["gelu_tanh", "gelu_erf", "silu"])
def test_activations_run_twice(form, device):
    name = form.partition("_")[0]
    steps = ran(mlp(form, 3, memory="low"))
    paths = [path for operator, path in steps if operator == name]
    assert paths == [f"ATen {name}"] * 2 + [f"ATen {name}, recomputed"] * 2
    assert not any("aux" in operator for operator, _ in steps)
    assert [operator for operator, _ in steps].count("_linear_backward_across") == 2


@rows([mlp("silu", 3, memory="low")])
def test_nothing_is_computed_anew_for_a_frozen_weight(op):
    steps = ran(op, [k == 0 for k in range(len(op.case().inputs))])
    assert not any("recomputed" in path for _, path in steps), steps


def test_up_is_multiplied_with_again_only_where_it_is_read():
    """Inputs: x, gate, up, down, and their biases."""
    op = gated("apart", "silu", True, memory="low")
    for wanted, products in ((range(7), 4), ([6], 3), ([3], 3)):
        names = [operator for operator, _ in ran(op, [k in wanted for k in range(7)])]
        assert names.count("linear") == products, names
    case = op.case((5,), 6, 8)
    leaves = case.leaves()
    y = op.call(*leaves)
    again = operators_of(lambda: torch.autograd.grad(y, leaves[3], case.g))
    assert again.count("linear") == 1, "where only down's gradient is asked for"


LAST = linear("none")


def written(write):
    """The next layer reads what was written to behind autograd's back."""

    def between(y, w):
        with torch.no_grad():
            write(y)
        return LAST.call(y, w)

    return between


BETWEEN = {
    "seen": lambda y, w: LAST.call(y.mul_(2), w),
    "unseen": written(lambda y: y.mul_(2)),
    "through a detached": lambda y, w: (y.detach()[1:].zero_(), LAST.call(y, w))[1],
    "through a view": written(lambda y: y[0, :2].fill_(3)),
    "a view": lambda y, w: LAST.call(y.view(2, 4, 8), w),
    "a part": lambda y, w: LAST.call(y[:, :8][2:], w),
    "transposed": lambda y, w: LAST.call(y.t(), w),
    "detached": lambda y, w: LAST.call(y.detach(), w) * y,
    "twice": lambda y, w: LAST.call(y, w) + fused.linear_relu(y, w),
    "as weight": lambda y, w: LAST.call(y, y),
    "cast": lambda y, w: LAST.call(y.float(), w.float()).double(),
    "a hook": lambda y, w: (y.register_hook(torch.cos), LAST.call(y, w))[1],
}


@pytest.mark.parametrize("name", BETWEEN)
@rows([linear("gelu_tanh", memory="low"), mlp("gelu_tanh", 2, memory="low")])
def test_a_write_to_an_output_that_the_next_layer_read(op, name, device):
    """Written to under autograd or behind its back, whole or in part, or not the very output."""
    results = []
    for call in (op.call, op.eager):
        case = op.case((8,), 6, 8, device=device)
        w = torch.linspace(-1, 1, 64, dtype=torch.float64, device=device).view(8, 8)
        leaves = [*case.leaves(), w.requires_grad_()]
        y = BETWEEN[name](call(*leaves[:-1]), w)
        grads = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
        results.append([y, *grads])
    assert_same(*results, exact=1e-5 if name == "cast" else 1e-12)
