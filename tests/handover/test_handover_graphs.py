"""Graphs that are no chain: other consumers and roots of the gradient between two fused layers."""

import pytest
import torch
import torch.nn.functional as F
from helpers import one_thread  # noqa: F401
from stacks import LAYERS, OPS, assert_equal_plain

middle_param = pytest.mark.parametrize("k", [0, 1, 2])


# --- gradients of the intermediate --------------------------------------------------------------


@middle_param
def test_autograd_grad_of_the_intermediate(k, device):
    def alone(stack):
        outputs = stack.outputs()
        return torch.autograd.grad(outputs[-1], outputs[k], stack.g)

    assert_equal_plain(alone, 2 - k, device=device)

    def with_leaves(stack):
        outputs = stack.outputs()
        return torch.autograd.grad(outputs[-1], [outputs[k], *stack.leaves], stack.g)

    assert_equal_plain(with_leaves, 2, "its gradient was asked for", device=device)

    def as_an_edge(stack):
        outputs = stack.outputs()
        edge = torch.autograd.graph.get_gradient_edge(outputs[k])
        return torch.autograd.grad(outputs[-1], [edge, *stack.leaves], stack.g)

    assert_equal_plain(as_an_edge, 2, "its gradient was asked for", device=device)


@middle_param
def test_backward_with_the_intermediate_as_an_input(k, device):
    def scenario(stack):
        outputs = stack.outputs()
        outputs[k].retain_grad()  # .grad of a tensor that is no leaf warns without
        stack.backward(outputs[-1], inputs=[outputs[k], stack.weights[0]])
        return [*stack.grads(), outputs[k].grad]

    assert_equal_plain(scenario, 2, device=device)


@pytest.mark.parametrize("activation", LAYERS)
@middle_param
def test_the_intermediate_is_also_a_root(k, activation, device):
    """Two gradients arrive, of which one has been dealt with."""

    def scenario(stack):
        outputs = stack.outputs()
        stack.backward(outputs[-1], outputs[k], gradients=[stack.g, outputs[k].detach().cos()])
        return stack.grads()

    activations = (activation,) * 3 + ("none",)
    handed = 0 if activation == "none" else 3
    assert_equal_plain(scenario, handed, activations=activations, device=device)


def test_every_layer_is_a_root(device):
    def scenario(stack):
        outputs = stack.outputs()
        stack.backward(*outputs, gradients=[o.detach().cos() for o in outputs])
        return stack.grads()

    assert_equal_plain(scenario, 3, device=device)


@pytest.mark.parametrize("activation", [name for name in LAYERS if name != "none"])
def test_a_root_whose_note_waits_while_others_are_left(activation, device):
    """The first layer's note must outlive the notes of another branch that runs in between, though
    nothing else holds the gradient that it names once another has been added to it."""

    def scenario(stack):
        first = stack.layer(0, stack.x)
        branch = stack.layer(1, stack.layer(0, stack.x))
        last = stack.layer(1, first)  # made last, so its backward runs before the branch's
        roots = [last, first, branch]
        return torch.autograd.grad(roots, stack.leaves, [r.detach().cos() for r in roots])

    assert_equal_plain(scenario, 2, activations=(activation, "none"), device=device)


def test_infinite_gradient_at_a_root(device):
    """An overflow, as a loss scaler provokes it, is seen where it would be: as infinity or NaN.
    All else stays finite and equal."""

    def scenario(stack):
        outputs = stack.outputs()
        g = stack.g.clone()
        g[0, 0] = torch.inf
        roots, gradients = [outputs[-1], outputs[0]], [g, torch.ones_like(outputs[0])]
        grads = torch.autograd.grad(roots, stack.leaves, gradients)
        assert any(not t.isfinite().all() for t in grads)
        return [t for g in grads for t in (g.isfinite().double(), g.nan_to_num(0, 0, 0))]

    for activation in ("relu", "gelu_tanh", "gelu_erf", "silu"):  # a gated layer spreads it
        assert_equal_plain(scenario, 1, activations=(activation, "none"), device=device)


# --- other consumers ----------------------------------------------------------------------------


def second_fused(stack, y):
    return OPS["gelu_tanh"].call(y, stack.weights[1] * 2)


SECOND = {
    "fused": second_fused,
    "linear": lambda stack, y: F.linear(y, stack.weights[1]),
    "sum": lambda stack, y: y.sum(),
    "view": lambda stack, y: y.view(-1)[2:],
    "index": lambda stack, y: y[1],
}


@pytest.mark.parametrize("second", SECOND)
def test_second_consumer(second, device):
    """Added to the result, or a root of its own."""

    def added(stack):
        y = stack.layer(0, stack.x)
        extra = SECOND[second](stack, y)
        out = stack.layer(1, y)
        (out.cos().sum() + extra.sin().sum()).backward()
        return stack.grads()

    def a_root(stack):
        y = stack.layer(0, stack.x)
        extra = SECOND[second](stack, y)
        out = stack.layer(1, y)
        stack.backward(out, extra)
        return stack.grads()

    for activation in ("relu", "gelu_tanh", "gelu_erf", "silu"):
        options = {"activations": (activation, "none"), "device": device}
        assert_equal_plain(added, 0, "another consumer", **options)
        assert_equal_plain(a_root, 0, "another consumer", **options)


def test_second_consumer_that_does_not_lie_on_the_way_is_no_matter(device):
    """What does not run in this backward does not count."""

    def scenario(stack):
        outputs = stack.outputs()
        other = outputs[1].cos().sum()
        stack.backward(outputs[-1])
        assert other.requires_grad
        return stack.grads()

    assert_equal_plain(scenario, 3, device=device)


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "gelu_erf", "silu"])
def test_a_layer_that_takes_the_same_tensor_twice(activation, device):
    def as_weight(stack):
        y = stack.layer(0, stack.x)
        stack.backward(OPS["none"].call(y, y), gradients=[stack.g @ stack.g.t()])
        return stack.grads()

    def as_bias(stack):
        y = stack.layer(0, stack.x)
        out = OPS["none"].call(y, stack.weights[1], y)
        stack.backward(out)
        return stack.grads()

    options = {"activations": (activation, "none"), "device": device}
    assert_equal_plain(as_weight, 0, "another consumer", **options)
    assert_equal_plain(as_bias, 0, "another consumer", lead=(), widths=(4, 5, 5), **options)


def test_only_as_weight_or_as_bias(device):
    """The gradient of a layer's weight is nothing that the layer before could have been told."""

    def as_weight(stack):
        y = stack.layer(0, stack.x)
        out = OPS["none"].call(stack.weights[1], y)
        stack.backward(out, gradients=[out.detach().cos()])
        return stack.grads()

    def as_bias(stack):
        y = stack.layer(0, stack.x)
        stack.backward(OPS["none"].call(stack.g, stack.weights[1], y))
        return stack.grads()

    options = {"activations": ("gelu_tanh", "none"), "widths": (4, 5, 5), "device": device}
    assert_equal_plain(as_weight, 0, **options)
    assert_equal_plain(as_bias, 0, lead=(), **options)


# Roots that themselves take the first layer's output: the engine does not count their edges.
ROOTS = {
    "product": (lambda stack, y, z: z * y, 1),
    "product of sums": (lambda stack, y, z: z * y.sum(), 0),
    "torch op": (lambda stack, y, z: torch.addmm(z, y, stack.weights[1]), 1),
    "fused, other input": (lambda stack, y, z: OPS["relu"].call(y, z.t() @ z), 1),
    "fused, as weight": (lambda stack, y, z: OPS["relu"].call(z, y), 1),
    "fused, twice": (lambda stack, y, z: OPS["relu"].call(y, y), 0),
}


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "gelu_erf", "silu"])
def test_a_root_that_consumes_the_intermediate_itself(root, activation, device):
    make, handed = ROOTS[root]

    def scenario(stack):
        y = stack.layer(0, stack.x)
        out = make(stack, y, stack.layer(1, y))
        stack.backward(out, gradients=[out.detach().cos()])
        return stack.grads()

    options = {"activations": (activation, "none"), "widths": (4, 5, 5), "device": device}
    assert_equal_plain(scenario, handed, **options)
