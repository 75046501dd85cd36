"""The node of gated layers: gradients of every order, what it keeps, what it runs."""

import itertools

import pytest
import torch
from gated import FORMS, Gated, activation_param, form_param
from helpers import Calls, device_param, kept_bytes, one_thread, saved_bytes  # noqa: F401
from stacks import assert_same
from torch.utils.checkpoint import checkpoint

import torch_fused_linear as tfl

fused = torch.ops.fused
BLOCK, LAYER = (3, 4, 2), (3, 4, None)
sizes_param = pytest.mark.parametrize("sizes", [LAYER, BLOCK], ids=["linear_glu", "gated_mlp"])


@sizes_param
@form_param
@activation_param
def test_gradcheck_and_gradgradcheck(activation, form, sizes):
    gated = Gated(form, (2,), sizes, activation=activation, seed=1)
    leaves = tuple(gated.leaves)
    assert torch.autograd.gradcheck(gated.call, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(gated.call, leaves)


@sizes_param
@form_param
def test_forward_mode(form, sizes):
    gated = Gated(form, (2,), sizes)
    assert torch.autograd.gradcheck(
        gated.call, tuple(gated.leaves), check_forward_ad=True, check_backward_ad=False
    )


@sizes_param
@form_param
def test_torch_func(form, sizes):
    gated = Gated(form, (3,), sizes)
    leaves = tuple(t.detach() for t in gated.leaves)

    def loss(call):
        return lambda *given: call(*given).square().sum()

    everything = tuple(range(len(leaves)))
    got = torch.func.grad(loss(gated.call), everything)(*leaves)
    assert_same(got, torch.func.grad(loss(gated.eager), everything)(*leaves))
    rows = torch.vmap(lambda x: gated.call(x, *leaves[1:]))(leaves[0])
    assert_same([rows], [gated.eager(*leaves)])
    hessians = [torch.func.hessian(loss(c))(*leaves) for c in (gated.call, gated.eager)]
    assert_same([hessians[0]], [hessians[1]])


@device_param
@sizes_param
@form_param
def test_subsets_of_the_leaves(form, sizes, device):
    """Every gradient that is wanted and no other, and never more kept than eager keeps."""
    for bias in (True, False):
        count = len(Gated(form, (3,), sizes, bias=bias).leaves)
        for wanted in itertools.product([False, True], repeat=count):
            if not any(wanted):
                continue
            gated = Gated(form, (3,), sizes, device=device, bias=bias)
            for leaf, flag in zip(gated.leaves, wanted, strict=True):
                leaf.requires_grad_(flag)
            assert_same(gated.grads(gated.call()), gated.grads(gated.eager()), str(wanted))
            assert kept_bytes(gated.call) <= kept_bytes(gated.eager), wanted


@device_param
@sizes_param
@form_param
def test_subsets_asked_of_one_graph(form, sizes, device):
    gated = Gated(form, (3,), sizes, device=device)
    y, want = gated.call(), gated.eager()
    for first, second in itertools.combinations(range(len(gated.leaves)), 2):
        asked = [gated.leaves[first], gated.leaves[second]]
        results = [torch.autograd.grad(t, asked, gated.g, retain_graph=True) for t in (y, want)]
        assert_same(*results, f"{first} {second}")
        again = [
            torch.autograd.grad(t, asked, gated.g, create_graph=True)[0].square().sum()
            for t in (y, want)
        ]
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        assert_same(*(torch.autograd.grad(t, gated.leaves, **options) for t in again))


@device_param
def test_bytes(device):
    """The two pre-activations, where eager keeps four tensors of the hidden size."""
    for form, dtype in itertools.product(FORMS, [torch.float32, torch.bfloat16]):
        gated = Gated(form, (64,), (16, 24, 8), dtype, device, bias=False)
        hidden = 64 * 24 * dtype.itemsize
        inputs = gated.x.numel() * dtype.itemsize
        assert kept_bytes(gated.call) == 2 * hidden
        assert saved_bytes(gated.call, gated.leaves[1:]) == 2 * hidden + inputs
        assert kept_bytes(gated.eager) == 4 * hidden


def products(gated, *asked):
    y = gated.call()
    with Calls() as calls:
        torch.autograd.grad(y, asked, gated.g)
    kinds = ("fused::", "aten::addmm", "aten::mm")
    return [name.partition("::")[2] for name in calls.names if name.startswith(kinds)]


def test_what_runs_in_the_backward():
    """One pass over memory; dx of two products is one sum; nothing for what is frozen."""
    gated = Gated("apart", (5,), (6, 8, 4))
    gate, up = gated.weights
    everything = products(gated, *gated.leaves)
    assert everything.count("_glu_backward") == 1 and "_glu" not in everything
    assert everything.count("addmm") == 1 and everything.count("_linear_backward") == 4
    assert products(gated, gated.down) == ["_glu", "_linear_backward"]
    assert "addmm" not in products(gated, gate, up)
    assert products(gated, gated.down_bias) == ["_linear_backward"]
    for form in ("stacked", "halves"):
        gated = Gated(form, (5,), (6, 8, 4))
        with tfl.explain() as report:
            gated.grads(gated.call())
        names = [c.operator for c in report.calls if "backward" in c.operator]
        assert names.count("_glu_backward") == 1
        assert names.count("_linear_backward") == 3, "dh; dx and both weights; down's weight"
        assert not any("addmm" in c.path for c in report.calls)


@device_param
@sizes_param
def test_hooks_see_true_gradients(sizes, device):
    seen = {}

    def run(name):
        gated = Gated("apart", (5,), sizes, device=device)
        x = gated.x * 2
        gated.x = x
        y = getattr(gated, name)()
        seen[name] = []
        for tensor in (x, y):
            tensor.register_hook(seen[name].append)
        y.grad_fn.register_prehook(lambda grads: seen[name].extend(grads))
        y.backward(gated.g)

    run("call")
    run("eager")
    assert_same(seen["call"], seen["eager"])


@device_param
@sizes_param
def test_between_layers_that_hand_over(sizes, device):
    """A fused layer before gets the true gradient of its output, and so does the gated one."""
    gated = Gated("apart", (5,), sizes, device=device)
    width = gated.g.shape[-1]
    before, after = (
        torch.randn(n, m, dtype=torch.float64, device=device, requires_grad=True)
        for n, m in ((sizes[0], 7), (4, width))
    )
    x = torch.randn(5, 7, dtype=torch.float64, device=device)
    leaves = [before, *gated.leaves[1:], after]
    results = []
    for call, layer in ((gated.call, fused.linear_silu), (gated.eager, None)):
        hidden = layer(x, before) if layer else torch.nn.functional.silu(x @ before.t())
        middle = call(hidden, *gated.leaves[1:])
        y = fused.linear(middle, after) if layer else middle @ after.t()
        results.append(torch.autograd.grad(y.square().sum(), leaves))
    assert_same(*results)


@sizes_param
@form_param
def test_checkpoint(form, sizes):
    gated = Gated(form, (3,), sizes)
    y = checkpoint(gated.call, *gated.leaves, use_reentrant=False)
    assert_same(gated.grads(y), gated.grads(gated.eager()))


@sizes_param
def test_saved_tensors_elsewhere(sizes):
    """Halves that hooks have moved are neighbours no longer."""
    gated = Gated("halves", (3,), sizes)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        y = gated.call()
    assert_same(gated.grads(y), gated.grads(gated.eager()))


@sizes_param
def test_a_second_backward_and_a_write_are_torchs_errors(sizes):
    gated = Gated("apart", (3,), sizes)
    y = gated.call()
    gated.grads(y)
    with pytest.raises(RuntimeError, match="second time"):
        gated.grads(y)
    y = gated.call()
    with torch.no_grad():
        gated.x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gated.grads(y)


@sizes_param
def test_names(sizes):
    gated = Gated("apart", (3,), sizes)
    name = "FusedLinearGlu_silu_Backward" if sizes[2] is None else "FusedGatedMlp_silu_Backward"
    assert gated.call().grad_fn.name() == name
