"""What stands between two layers in a model: views, dropout, residuals, other ops, control flow."""

import random

import pytest
import torch
import torch.nn.functional as F
from helpers import one_thread  # noqa: F401
from stacks import Stack, assert_equal_plain

import torch_fused_linear as tfl

NOT_OURS = "the input is not a fused layer's output"

# What is done to a layer's output before it reaches the next, and whether they stay neighbours.
BETWEEN = {
    "nothing": (lambda y: y, 3),
    "same shape": (lambda y: y.reshape(y.shape), 0),
    "view": (lambda y: y.view(y.shape), 0),
    "one dimension more and less": (lambda y: y.unsqueeze(0).squeeze(0), 0),
    "transposed twice": (lambda y: y.t().t(), 0),
    "contiguous": (lambda y: y.contiguous(), 3),
    "clone": (lambda y: y.clone(), 0),
    "to the same": (lambda y: y.to(y.dtype), 3),
    "scaled": (lambda y: y * 0.5, 0),
    "in place": (lambda y: y.mul(1).mul_(0.5), 0),
    "norm": (lambda y: F.layer_norm(y, y.shape[-1:]), 0),
    "detach": (lambda y: y.detach(), 0),
    "no dropout": (lambda y: F.dropout(y, 0.0), None),
    "dropout in eval": (lambda y: F.dropout(y, 0.5, training=False), 3),
    "identity": (torch.nn.Identity(), 3),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_between(between, device):
    change, handed = BETWEEN[between]

    def scenario(stack):
        y = stack.x
        for k in range(4):
            y = stack.layer(k, y if k == 0 else change(y))
        stack.backward(y)
        return stack.grads()

    reason = NOT_OURS if handed == 0 and between != "detach" else ""
    assert_equal_plain(scenario, handed, reason, device=device)


def test_dropout(device):
    """The same mask on both paths."""

    def scenario(stack):
        torch.manual_seed(7)
        y = stack.layer(1, stack.layer(0, stack.x))
        stack.backward(stack.layer(3, stack.layer(2, F.dropout(y, 0.5))))
        return stack.grads()

    assert_equal_plain(scenario, 2, NOT_OURS, lead=(32,), device=device)


def test_in_place_on_what_a_layer_saved(device):
    """An error on both paths and no wrong gradient."""
    for on in (False, True):
        with tfl.handover(on):
            stack = Stack(("relu", "none"), device=device)
            y = stack.layer(0, stack.x)
            out = stack.layer(1, y)
            y.detach().mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                stack.backward(out)


def test_residual_connections(device):
    """y + B(A(y)): A has one consumer, y two."""

    def scenario(stack):
        y = stack.x
        for k in (0, 2):
            y = y + stack.layer(k + 1, stack.layer(k, y))
        stack.backward(y)
        return stack.grads()

    assert_equal_plain(scenario, 2, widths=(4, 5, 4, 6, 4), device=device)

    def over_the_activation(stack):
        a = stack.layer(0, stack.x)
        out = a + stack.layer(2, stack.layer(1, a))
        stack.backward(out, gradients=[out.detach().cos()])
        return stack.grads()

    # the root adds, and is not counted among the consumers
    options = {"activations": ("gelu_tanh", "relu", "none"), "widths": (4, 5, 6, 5)}
    assert_equal_plain(over_the_activation, 2, device=device, **options)

    def summed(stack):
        a = stack.layer(0, stack.x)
        (a + stack.layer(2, stack.layer(1, a))).cos().sum().backward()
        return stack.grads()

    assert_equal_plain(summed, 1, "another consumer", device=device, **options)


def test_control_flow(device):
    """Layers skipped, repeated and exchanged at random, as Python code does."""
    for seed in range(200):

        def scenario(stack, seed=seed):
            choice, y = random.Random(seed), stack.x
            for _ in range(choice.randrange(1, 8)):
                for k in choice.sample(range(4), choice.randrange(1, 4)):
                    y = stack.layer(k, y)
                if choice.random() < 0.3:
                    y = y * 0.5
                if choice.random() < 0.2:
                    y = y + stack.x
            stack.backward(y)
            return stack.grads()

        report = assert_equal_plain(scenario, None, widths=(4,) * 5, device=device)
        neighbours = sum("not a fused layer's" not in c.handover for c in report.calls)
        assert neighbours, report


def test_shared_layer(device):
    """The same parameters at every depth: one node each."""

    def scenario(stack):
        y = stack.x
        for _ in range(5):
            y = stack.layer(0, y)
        stack.backward(y)
        return stack.grads()

    for activation in ("relu", "gelu_tanh", "gelu_erf", "silu"):
        assert_equal_plain(scenario, 4, activations=(activation,), widths=(4, 4), device=device)


def test_several_inputs_through_the_same_layers(device):
    def scenario(stack):
        torch.stack([stack(), (-stack.x * 2).sum() + stack()]).cos().sum().backward()
        return stack.grads()

    assert_equal_plain(scenario, 6, device=device)


def test_with_mlp_and_plain_layers(device):
    """fused::mlp is a node of another kind, and so are torch's own: no neighbours."""

    def scenario(stack):
        y = stack.layer(1, stack.layer(0, stack.x))
        y = tfl.mlp(y, stack.weights[2:3], stack.biases[2:3])
        y = F.relu(F.linear(stack.layer(3, y), stack.weights[3].t()))
        stack.backward(y)
        return stack.grads()

    assert_equal_plain(scenario, 1, NOT_OURS, widths=(4, 5, 6, 8, 8), device=device)


@pytest.mark.parametrize("seed", range(8))
def test_stacks_of_every_kind_of_layer(seed, device):
    """Each node counts the edges to all kinds of producers, not to those of the first it meets."""
    kinds = random.Random(seed).choices(["relu", "gelu_tanh", "silu", "glu"], k=6)

    def scenario(stack):
        y = stack()
        stack.backward(y)
        return stack.grads()

    assert_equal_plain(scenario, 5, "", device=device, activations=[*kinds, "none"][-6:])
