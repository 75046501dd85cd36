"""Separate layers hand gradients over to each other, and all gradients equal the plain path's."""

import gc
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from numerics import assert_same
from operators import DTYPES
from stacks import LAYERS, MIXED, NOT_OURS, Stack, assert_equal_plain, reasons

import torch_fused_linear as tfl

PAIRS = list(itertools.product(LAYERS, LAYERS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_four_layers_hand_over_three_times(dtype, device):
    left_out = {"none"} if dtype != torch.float16 else {"none", "relu2"}  # squares overflow
    for activations in (MIXED, *([name] * 4 for name in LAYERS if name not in left_out)):
        options = {"activations": activations, "dtype": dtype, "device": device}
        report = assert_equal_plain(Stack.step, 3, **options)
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
        want, outputs = eager.step(eager(fused=False)), watched.outputs()
        for output in outputs:
            output.retain_grad()
        assert_same(fused.step(), want, str(activations))
        assert_same(watched.step(outputs[-1]), want, str(activations))


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)], ids=str)
def test_every_pair_of_activations_and_every_rank(lead, device):
    for pair, bias in itertools.product(PAIRS, [True, False]):
        options = {"activations": pair, "lead": lead, "bias": bias, "device": device}
        assert_equal_plain(Stack.step, int(pair[0] != "none"), **options)


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


# --- several runs of the engine at once, and runs that are broken off -----------------------------


def test_memory_of_aborted_backwards_is_given_back(device):
    """Notes of runs that were broken off go with the next run; graphs are not kept alive."""
    alive = []

    def abort():
        stack = Stack(device=device)
        outputs = stack.outputs()
        alive.extend(weakref.ref(t) for t in (*outputs, *stack.leaves))

        def hook(g):
            raise KeyError("on purpose")

        stack.weights[2].register_hook(hook)
        with pytest.raises(KeyError):
            stack.backward(outputs[-1])

    for _ in range(20):
        abort()
    Stack(device=device).step()
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0


@pytest.mark.parametrize("is_output", [False, True])
@pytest.mark.parametrize("on", [False, True])
def test_a_write_to_what_a_layer_saved_is_an_error(on, is_output, device):
    """A hook in the middle writes: nothing is silently computed with the new values."""
    stack = Stack(("relu", "none"), device=device)
    output, out = stack.outputs()

    def spoil(_):
        with torch.no_grad():
            (output if is_output else stack.weights[0]).add_(1)

    stack.weights[1].register_post_accumulate_grad_hook(spoil)
    with tfl.handover(on), pytest.raises(RuntimeError, match="modified by an inplace"):
        stack.backward(out)


LATE = {
    "a look": lambda y: y.register_hook(lambda g: None),
    "a write": lambda y: y.register_hook(lambda g: g.mul_(2)),
    "another gradient": lambda y: y.register_hook(lambda g: g * 2),
    "retain_grad": lambda y: y.retain_grad(),
    "the node's hook": lambda y: y.grad_fn.register_prehook(lambda g: None),
    "the node's later hook": lambda y: y.grad_fn.register_hook(lambda inputs, outputs: None),
}


@pytest.mark.parametrize("producer", ["relu", "glu"])
@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_a_hook_that_comes_too_late_is_an_error(late, producer, device):
    """The next layer's backward is over, and what it passed on is not the true gradient."""
    stack = Stack((producer, "none"), device=device)
    output, out = stack.outputs()
    stack.weights[1].register_hook(lambda _: (late(output), None)[1])
    with pytest.raises(RuntimeError, match="during the backward"):
        stack.backward(out)


def test_threads_on_one_graph(device):
    """One node runs for several runs of the engine at the same time: notes are kept per run."""
    stack, barrier = Stack(device=device), threading.Barrier(4)
    y = stack()
    with tfl.handover(False):
        want = torch.autograd.grad(y, stack.leaves, stack.g, retain_graph=True)

    def work(k):
        barrier.wait()
        for factor in range(k + 1, k + 21):
            got = torch.autograd.grad(y, stack.leaves, stack.g * factor, retain_graph=True)
            assert_same(got, [t * factor for t in want], f"factor {factor}")

    with tfl.explain() as report, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert report.handed_over == 3 * 20 * 4
