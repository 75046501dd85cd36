"""memory='low': the bits that keeping more would give, in graphs cut, reused or written to.

What is kept is in test_kept.py; every derivative, hook and error of the rows that say "low", which
lend their outputs to each other, in tests/autograd.
"""

import pytest
import torch
from numerics import assert_bits, assert_same, run
from operators import ACTS, GELU_TANH, gated, linear, mlp, pair, rows, stack
from stacks import HANDED
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from watching import operators_of

import torch_fused_linear as tfl

fused = torch.ops.fused
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SMOOTH = [a for a in ACTS if a != "relu"]
MADE_ANEW = {
    **{f"{kind.__name__} {a}": lambda m, k=kind, a=a: k(a, 3, memory=m)
       for kind in (stack, mlp) for a in SMOOTH},
    **{f"pair {form}": lambda m, form=form: pair(form, "silu", memory=m)
       for form in ("apart", "stacked")},
    **{f"block {a}": lambda m, a=a: gated("apart", a, True, memory=m) for a in ACTS},
    "relu": lambda m: linear("relu", memory=m),
    "stack relu": lambda m: stack("relu", 3, memory=m),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE_ANEW)
@dtype_param
def test_what_is_computed_anew_has_the_bits_of_what_was_kept(dtype, name, device):
    """The same from the default, from layers under hooks, which keep all, and without hand-over."""
    low, default = (MADE_ANEW[name](memory) for memory in ("low", "default"))
    for lead in ((), (1,), (5, 7), (0,)):
        case = low.case(lead, 16, 9, dtype, device)
        got = run(low.call, case)
        leaves = case.leaves()
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            y = low.call(*leaves)
        assert_bits([y, *torch.autograd.grad(y, leaves, case.g)], got, str(lead))
        with tfl.handover(False):
            assert_same(run(low.call, case), got)
        if not name.startswith(("stack", "mlp")):  # an epilogue rounds GELU's sum only afterwards
            assert_bits(run(default.call, case), got, str(lead))


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


def ran(op, wanted=None, on=True):
    """(operator, path, hand-over) of the rows of a step."""
    case = op.case((5,), 6, 8)
    leaves = case.leaves(wanted)
    names = ("operator", "path", "handover")
    with tfl.handover(on):
        return operators_of(lambda: op.call(*leaves).backward(case.g), *names)


@pytest.mark.parametrize("form", ["gelu_tanh", "gelu_erf", "silu"])
def test_activations_run_twice_and_hand_over(form, device):
    name = form.partition("_")[0]
    steps = ran(stack(form, 3, memory="low"))
    paths = [path for operator, path, _ in steps if operator == name]
    assert paths == [f"ATen {name}"] * 2 + [f"ATen {name}, recomputed"] * 2
    assert not any("aux" in operator for operator, *_ in steps)
    handed = [operator for operator, _, handover in steps if handover == HANDED]
    assert handed == ["_linear_backward_across"] * 2
    assert sum("recomputed" in path for _, path, _ in ran(mlp(form, 3, memory="low"))) == 2


@rows([stack("silu", 3, memory="low"), mlp("silu", 3, memory="low")])
def test_nothing_is_computed_anew_for_a_frozen_weight(op):
    steps = ran(op, [k == 0 for k in range(len(op.case().inputs))])
    assert not any("recomputed" in path for _, path, _ in steps), steps


def test_up_is_multiplied_with_again_only_where_it_is_read():
    """Inputs: x, gate, up, down, and their biases."""
    op = gated("apart", "silu", True, memory="low")
    for wanted, products in ((range(7), 4), ([6], 3), ([3], 3)):
        names = [operator for operator, *_ in ran(op, [k in wanted for k in range(7)])]
        assert names.count("linear") == products, names
    case = op.case((5,), 6, 8)
    leaves = case.leaves()
    y = op.call(*leaves)
    again = operators_of(lambda: torch.autograd.grad(y, leaves[3], case.g))
    assert again.count("linear") == 1, "where only down's gradient is asked for"


def test_a_pairs_output_comes_with_the_pass_that_is_handed_over():
    for on, again in ((True, 0), (False, 1)):
        steps = ran(pair("apart", "silu", memory="low"), on=on)
        names = [operator for operator, *_ in steps]
        assert names.count("_glu") == 1 + again and names.count("_glu_backward") == 1, names
        assert any(handover == HANDED for *_, handover in steps) == on


FIRST, LAST = linear("gelu_tanh", memory="low"), linear("none")


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
@rows([FIRST, gated("apart", "silu", memory="low")])
@pytest.mark.parametrize("on", [True, False])
def test_what_the_next_layer_read_counts(on, op, name, device):
    """Written to under autograd or behind its back, whole or in part, or not the very output."""
    results = []
    for call in (op.call, op.eager):
        case = op.case((8,), 6, 8, device=device)
        w = torch.linspace(-1, 1, 64, dtype=torch.float64, device=device).view(8, 8)
        leaves = [*case.leaves(), w.requires_grad_()]
        with tfl.handover(on):
            y = BETWEEN[name](call(*leaves[:-1]), w)
            grads = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
        results.append([y, *grads])
    assert_same(*results, exact=1e-5 if name == "cast" else 1e-12)


def test_written_to_after_the_next_layer(device):
    """eager has to refuse the backward: it kept what was written to. Here it is not needed."""
    op = stack("gelu_tanh", 2, memory="low")
    case = op.case(device=device)
    x, v, w, b, c = leaves = case.leaves()
    hidden = FIRST.call(x, v, b)
    y = LAST.call(hidden, w, c)
    with torch.no_grad():
        hidden.zero_()
    assert_same(torch.autograd.grad(y, leaves, case.g), run(op.eager, case)[1:])


def test_the_layer_before_was_freed_already(device):
    """Its output is still a tensor that a layer may be given, and that layer keeps it then."""
    case = FIRST.case((5,), 6, 6, device=device)
    (x, w, b), (_, v, c) = case.leaves(), case.leaves()
    y = FIRST.call(x, w, b)
    after = FIRST.call(y, v, c)  # shares the pre-activation, which outlives its layer's graph
    y.sum().backward()
    later = FIRST.call(y, v, c)
    kept = FIRST.eager(x, w, b).detach()
    for out in (after, later):
        (got,) = torch.autograd.grad(out.sum(), v, retain_graph=True)
        (want,) = torch.autograd.grad(GELU_TANH.call(kept, v, c).sum(), v)
        assert_same([got], [want])
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()


@pytest.mark.parametrize("form", ["linear", "glu"])
def test_a_checkpoint_around_the_borrower_alone(form):
    """Its recomputation must not read in another form what its forward kept."""
    op = FIRST if form == "linear" else gated("apart", "silu", memory="low")
    results = []
    for call in (op.call, op.eager):
        leaves = op.case((6,), 8, 8).leaves()
        w = op.case((6,), 8, 8).w.requires_grad_()
        h = call(*leaves)
        y = checkpoint(lambda t, w=w: LAST.call(t, w).sin(), h, use_reentrant=False).sum()
        h.pow(2).sum().backward(retain_graph=True)
        results.append(torch.autograd.grad(y, [w, *leaves]))
    assert_same(*results)
