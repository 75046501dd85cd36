"""Separate layers hand gradients over to each other, and all gradients equal the plain path's."""

import itertools

import pytest
import torch
from numerics import assert_same
from operators import DTYPES
from stacks import LAYERS, MIXED, NOT_OURS, Stack, assert_equal_plain, reasons

import torch_fused_linear as tfl

PAIRS = list(itertools.product(LAYERS, LAYERS))


def expected(activations):
    """A layer hands over where the one before it has an activation."""
    return sum(activation != "none" for activation in activations[:-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_four_layers_hand_over_three_times(dtype, device):
    left_out = {"none"} if dtype != torch.float16 else {"none", "relu2"}  # squares overflow
    for activations in (MIXED, *([name] * 4 for name in LAYERS if name not in left_out)):
        report = assert_equal_plain(
            Stack.step, 3, activations=activations, dtype=dtype, device=device
        )
        handed = {c.operator for c in report.calls if c.handover == "handed over"}
        gated = {"_glu_backward", "_linear_backward"}
        assert handed == (gated if "glu" in activations else {"_linear_backward_across"}), report
        assert NOT_OURS in reasons(report)
    for widths in ([1, 1, 1, 1], [3, 129, 1, 2], [8, 64, 257, 16], [7, 2, 129, 5]):
        options = {"widths": widths, "dtype": dtype, "lead": (33,), "device": device}
        assert_equal_plain(Stack.step, 2, activations=MIXED[1:], **options)
        assert_equal_plain(Stack.step, 2, activations=("relu", "relu", "none"), **options)


def test_gradients_are_those_of_torch(device):
    """And not merely the same with and without, also where the plain path is taken."""
    for activations in itertools.product(LAYERS, repeat=3):
        fused, eager, watched = (Stack(activations, device=device) for _ in "abc")
        fused.backward(fused())
        eager.backward(eager(fused=False))
        outputs = watched.outputs()
        for output in outputs:
            output.retain_grad()
        watched.backward(outputs[-1])
        assert_same(fused.grads(), eager.grads(), str(activations))
        assert_same(watched.grads(), eager.grads(), str(activations))


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)], ids=str)
def test_every_pair_of_activations_and_every_rank(lead, device):
    for pair, bias in itertools.product(PAIRS, [True, False]):
        options = {"activations": pair, "lead": lead, "bias": bias, "device": device}
        assert_equal_plain(Stack.step, expected(pair), **options)


def test_the_comparison_has_teeth():
    """A gradient that is off by a part in 10^11 is found."""
    want = Stack().step()
    for k in range(len(want)):
        got = [t * (1 + 1e-11) if k == n else t for n, t in enumerate(want)]
        got[k].view(-1)[0] += 1e-10
        with pytest.raises(AssertionError, match=f"result {k}"):
            assert_same(got, want)


def test_create_graph_and_a_second_backward(device):
    def scenario(stack):
        (first,) = torch.autograd.grad(stack(), stack.x, stack.g, create_graph=True)
        first.square().sum().backward()
        return [first.detach(), *stack.grads()]

    # the second backward runs through the same nodes, where its gradients may be handed over
    report = assert_equal_plain(scenario, None, device=device)
    assert all(c.operator != "_linear_backward_across" for c in report.calls[:4]), report


# --- which gradients are wanted ------------------------------------------------------------------


def test_every_subset_of_gradients(device):
    """By requires_grad and by autograd.grad."""
    for wanted in itertools.product([True, False], repeat=7):
        if not any(wanted):
            continue

        def frozen(stack, wanted=wanted):
            for leaf, flag in zip(stack.leaves, wanted):
                leaf.requires_grad_(flag)
            return stack.step()

        def returned(stack, wanted=wanted):
            chosen = [leaf for leaf, flag in zip(stack.leaves, wanted) if flag]
            return torch.autograd.grad(stack(), chosen, stack.g)

        # leaves: x, w0, b0, w1, b1, w2, b2; a layer hands over where anything before it is wanted
        handed = any(wanted[:5]) + any(wanted[:3])
        activations = ("gelu_tanh", "relu", "gelu_erf")
        for scenario in (frozen, returned):
            assert_equal_plain(scenario, handed, activations=activations, device=device)


# --- autocast ------------------------------------------------------------------------------------


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


# --- the switch ----------------------------------------------------------------------------------


def test_the_switch_counts_when_the_backward_runs():
    def handed_over(state):
        stack = Stack()
        y = stack()
        with tfl.handover(state), tfl.explain() as report:
            stack.backward(y)
        return report.handed_over, stack.grads(), reasons(report)

    (on, want, _), (off, got, why) = handed_over(True), handed_over(False)
    assert (on, off) == (3, 0) and why.count("switched off") == 3
    assert_same(got, want)
