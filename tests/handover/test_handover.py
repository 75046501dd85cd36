"""Separate layers hand gradients over to each other, and all gradients equal the plain path's."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, LOW_DTYPES, one_thread  # noqa: F401
from stacks import LAYERS, MIXED, OPS, Stack, assert_equal_plain, assert_same, reasons

import torch_fused_linear as tfl

ROOT = Path(__file__).resolve().parents[2]
PAIRS = list(itertools.product(LAYERS, LAYERS))


def expected(activations):
    """A layer hands over where the one before it has an activation."""
    return sum(activation != "none" for activation in activations[:-1])


def step(stack):
    stack.backward(stack())
    return stack.grads()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_four_layers_hand_over_three_times(dtype, device):
    left_out = {"none"} if dtype != torch.float16 else {"none", "relu2"}
    for activations in (MIXED, *([name] * 4 for name in LAYERS if name not in left_out)):
        report = assert_equal_plain(step, 3, activations=activations, dtype=dtype, device=device)
        handed = {c.operator for c in report.calls if c.handover == "handed over"}
        gated = {"_glu_backward", "_linear_backward"}
        assert handed == (gated if "glu" in activations else {"_linear_backward_across"}), report
        assert "the input is not a fused layer's output" in reasons(report)


def test_gradients_are_those_of_torch(device):
    """And not merely the same with and without."""
    for activations in itertools.product(LAYERS, repeat=3):
        fused, eager = (Stack(activations, device=device) for _ in "ab")
        fused.backward(fused())
        eager.backward(eager(fused=False))
        assert_same(fused.grads(), eager.grads(), str(activations))


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)], ids=str)
def test_every_pair_of_activations_and_every_rank(lead, device):
    for pair, bias in itertools.product(PAIRS, [True, False]):
        options = {"activations": pair, "lead": lead, "bias": bias, "device": device}
        assert_equal_plain(step, expected(pair), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths(dtype, device):
    for widths in ([1, 1, 1, 1], [3, 129, 1, 2], [8, 64, 257, 16], [7, 2, 129, 5]):
        options = {"widths": widths, "dtype": dtype, "device": device}
        assert_equal_plain(step, 2, activations=MIXED[1:], lead=(33,), **options)
        assert_equal_plain(step, 2, activations=("relu", "relu", "none"), lead=(33,), **options)


def test_the_comparison_has_teeth():
    """A gradient that is off by a part in 10^11 is found."""
    stack = Stack()
    want = step(stack)
    for k in range(len(want)):
        got = [t * (1 + 1e-11) if k == n else t for n, t in enumerate(want)]
        got[k].view(-1)[0] += 1e-10
        with pytest.raises(AssertionError, match=f"result {k}"):
            assert_same(got, want)


# --- second derivatives -------------------------------------------------------------------------


def check_stack(activations, lead, device):
    stack = Stack(activations, lead=lead, device=device, seed=3)

    def function(*leaves):
        x, parameters = leaves[0], leaves[1:]
        for k, activation in enumerate(activations):
            x = LAYERS[activation].call(x, *parameters[2 * k : 2 * k + 2])
        return x

    with tfl.explain() as report:
        torch.autograd.gradcheck(function, stack.leaves, check_batched_grad=True)
    assert (report.handed_over > 0) == (expected(activations) > 0), "this checked the plain path"
    torch.autograd.gradgradcheck(function, stack.leaves)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_gradcheck_of_pairs(pair, device):
    check_stack(pair, (2,), device)


@pytest.mark.parametrize("lead", [(), (1, 2)], ids=str)
def test_gradcheck_of_other_ranks_and_depths(lead, device):
    check_stack(("gelu_tanh", "relu", "none"), lead, device)
    check_stack(("gelu_erf", "gelu_tanh"), lead, device)


def test_create_graph_and_a_second_backward(device):
    def scenario(stack):
        (first,) = torch.autograd.grad(stack(), stack.x, stack.g, create_graph=True)
        first.square().sum().backward()
        return [first.detach(), *stack.grads()]

    # the second backward runs through the same nodes, where its gradients may be handed over
    report = assert_equal_plain(scenario, None, device=device)
    assert all(c.operator != "_linear_backward_across" for c in report.calls[:4]), report

    def all_first_order(stack):
        first = torch.autograd.grad(stack(), stack.leaves, stack.g, create_graph=True)
        return [t.detach() for t in first]

    assert_equal_plain(all_first_order, 0, device=device)


def test_batched_gradients(device):
    """Under is_grads_batched the engine runs inside vmap."""

    def scenario(stack):
        g = torch.stack([stack.g, -stack.g, stack.g.square()])
        return torch.autograd.grad(stack(), stack.leaves, g, is_grads_batched=True)

    assert_equal_plain(scenario, 3, device=device)


# --- which gradients are wanted -----------------------------------------------------------------


def test_frozen_parameters(device):
    """Every subset of the input and the parameters of three layers; frozen first layers with it."""
    activations = ("gelu_tanh", "relu", "gelu_erf")
    for wanted in itertools.product([True, False], repeat=7):
        if not any(wanted):
            continue

        def scenario(stack, wanted=wanted):
            for leaf, flag in zip(stack.leaves, wanted):
                leaf.requires_grad_(flag)
            return step(stack)

        # leaves: x, w0, b0, w1, b1, w2, b2; a layer hands over where anything before it is wanted
        handed = any(wanted[:5]) + any(wanted[:3])
        assert_equal_plain(scenario, handed, activations=activations, device=device)


def test_backward_with_inputs(device):
    """backward(inputs=[...]) and autograd.grad for every subset of the leaves."""
    activations = ("gelu_tanh", "relu", "gelu_erf")
    for wanted in itertools.product([True, False], repeat=7):
        if not any(wanted):
            continue

        def chosen(stack, wanted=wanted):
            return [leaf for leaf, flag in zip(stack.leaves, wanted) if flag]

        def accumulated(stack):
            stack.backward(stack(), inputs=chosen(stack))
            return stack.grads()

        def returned(stack):
            return torch.autograd.grad(stack(), chosen(stack), stack.g)

        handed = any(wanted[:5]) + any(wanted[:3])
        for scenario in (accumulated, returned):
            assert_equal_plain(scenario, handed, activations=activations, device=device)


# --- repeated runs ------------------------------------------------------------------------------


def test_retain_graph_twice(device):
    def scenario(stack):
        y = stack()
        for factor in (1, -2, 3):
            stack.backward(y, gradients=[factor * stack.g], retain_graph=True)
        stack.backward(y)
        return stack.grads()

    assert_equal_plain(scenario, 12, device=device)


def test_a_freed_graph_says_so(device):
    stack = Stack(device=device)
    y = stack()
    stack.backward(y)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        stack.backward(y)


def test_inference_then_training(device):
    def scenario(stack):
        with torch.no_grad():
            before = stack()
        with torch.inference_mode():
            stack()
        y = stack()
        stack.backward(y)
        return [before, y.detach(), *stack.grads()]

    assert_equal_plain(scenario, 3, device=device)


def test_training_loop(device):
    def scenario(stack):
        optimiser = torch.optim.SGD(stack.leaves[1:], lr=0.1, momentum=0.9)
        for _ in range(5):
            optimiser.zero_grad()
            F.mse_loss(stack(), stack.g).backward()
            optimiser.step()
        return [t.detach() for t in stack.leaves]

    assert_equal_plain(scenario, 15, device=device)


# --- dtypes and autocast ------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(cast, device):
    """Between layers nothing is cast, so that they stay neighbours."""

    def scenario(stack):
        with torch.autocast(device.type, dtype=cast):
            y = stack()
        assert y.dtype == cast
        stack.backward(y, gradients=[stack.g.to(cast)])
        # results have been rounded to the narrow type, and are to be compared as such
        return [t.to(cast) for t in stack.grads()]

    assert_equal_plain(scenario, 3, dtype=torch.float32, device=device)


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_another_dtype_between_layers(dtype, device):
    """A cast is a node of its own: the layers on both sides of it run plain."""

    def scenario(stack):
        hidden = stack.layer(1, stack.layer(0, stack.x))
        wide = [stack.weights[2].double(), stack.biases[2].double()]
        hidden = OPS["gelu_erf"].call(hidden.double(), *wide).to(dtype)
        stack.backward(stack.layer(3, hidden))
        return stack.grads()

    reason = "the input is not a fused layer's output"
    assert_equal_plain(scenario, 1, reason, dtype=dtype, device=device)


# --- the switch ---------------------------------------------------------------------------------


def handed_over():
    with tfl.explain() as report:
        step(Stack())
    return report.handed_over


def test_switch_as_a_call_and_as_a_context_manager():
    assert handed_over() == 3, "it is on by default"
    with tfl.handover(False):
        assert handed_over() == 0
        with tfl.handover(True):
            assert handed_over() == 3
        assert handed_over() == 0
    assert handed_over() == 3
    with pytest.raises(KeyError), tfl.handover(False):
        raise KeyError
    assert handed_over() == 3
    try:
        tfl.handover(False)
        assert handed_over() == 0
    finally:
        tfl.handover(True)
    assert handed_over() == 3
    with tfl.handover(False), tfl.explain() as report:
        step(Stack())
    assert reasons(report).count("switched off") == 3


def test_switched_off_between_forward_and_backward():
    stack, want = Stack(), step(Stack())
    y = stack()
    with tfl.handover(False), tfl.explain() as report:
        stack.backward(y)
    assert report.handed_over == 0
    assert_same(stack.grads(), want)


@pytest.mark.parametrize("value, handed", [("0", 0), ("1", 3), (None, 3)])
def test_environment_variable(value, handed):
    code = "import test_handover as t; print(t.handed_over())"
    folders = sys.path
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_FUSED_LINEAR_HANDOVER"}
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    if value is not None:
        environment["TORCH_FUSED_LINEAR_HANDOVER"] = value
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == handed
