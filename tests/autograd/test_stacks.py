"""Stacks of fused layers and of blocks: every gradient equals that of torch's own functions."""

import gc
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from numerics import assert_same
from operators import DTYPES
from stacks import BLOCKS, EVERY, LAYERS, MIXED, STACKS, Stack, assert_equal_eager

import torch_fused_linear as tfl

every_stack = pytest.mark.parametrize("activations", STACKS.values(), ids=STACKS)


def test_sizes(device):
    """Widths of 1, odd ones, and more rows than columns."""
    for widths in ([1, 1, 1, 1], [3, 129, 1, 2], [8, 64, 257, 16], [7, 2, 129, 5]):
        options = {"widths": widths, "lead": (33,), "device": device}
        for activations in (MIXED[1:], ("relu", "relu", "none"), list(BLOCKS)[:3]):
            assert_equal_eager(Stack.step, activations=activations, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_plain_policy_agrees(dtype, device):
    """To the rounding of the dtype, with the formula in place of the nodes."""
    for activations in STACKS.values():
        results = []
        for policy in ("auto", "eager"):
            with tfl.set_policy(policy):
                results.append(Stack(activations, dtype=dtype, device=device).step())
        assert_same(*results)


def test_every_three_layers(device):
    for activations in itertools.product(LAYERS, repeat=3):
        assert_equal_eager(Stack.step, activations=activations, device=device)


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)], ids=str)
def test_every_pair_and_every_rank(lead, device):
    pairs = [*itertools.product(LAYERS, LAYERS), *itertools.product(BLOCKS, EVERY)]
    for pair, bias in itertools.product(pairs, [True, False]):
        options = {"activations": pair, "lead": lead, "bias": bias, "device": device}
        assert_equal_eager(Stack.step, **options)


def test_the_comparison_has_teeth():
    """A gradient that is off by a part in 10^11 is found."""
    want = Stack().step()
    for k in range(len(want)):
        got = [t * (1 + 1e-11) if k == n else t for n, t in enumerate(want)]
        got[k].view(-1)[0] += 1e-10
        with pytest.raises(AssertionError, match=f"result {k}"):
            assert_same(got, want)


@every_stack
def test_create_graph_and_a_second_backward(activations, device):
    def scenario(stack):
        (first,) = torch.autograd.grad(stack(), stack.x, stack.g, create_graph=True)
        first.square().sum().backward()
        return [first.detach(), *stack.grads()]

    assert_equal_eager(scenario, activations=activations, device=device)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_subset_of_gradients(name, device):
    """By requires_grad and by autograd.grad, of two blocks and a layer."""
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

        for scenario in (frozen, returned):
            assert_equal_eager(scenario, activations=(name, name, "none"), device=device)


# --- several runs of the engine at once, and runs that are broken off ----------------------------


@every_stack
def test_memory_of_aborted_backwards_is_given_back(activations, device):
    """Graphs of runs that were broken off are not kept alive."""
    alive = []

    def abort():
        stack = Stack(activations, device=device)
        outputs = stack.outputs()
        alive.extend(weakref.ref(t) for t in (*outputs, *stack.leaves))

        def hook(g):
            raise KeyError("on purpose")

        stack.weights[2].register_hook(hook)
        with pytest.raises(KeyError):
            stack.backward(outputs[-1])

    for _ in range(20):
        abort()
    Stack(activations, device=device).step()
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0


@pytest.mark.parametrize(
    "first, is_output", [("relu", True), ("relu", False), ("mlp relu", False), ("mlp low", False)]
)
def test_a_write_to_what_a_layer_saved_is_an_error(first, is_output, device):
    """A hook in the middle writes: nothing is silently computed with the new values."""
    stack = Stack((first, first), device=device)
    output, out = stack.outputs()

    def spoil(grad):
        with torch.no_grad():
            (output if is_output else stack.weights[0]).add_(1)

    output.register_hook(spoil)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        stack.backward(out)


LATE = {
    "a look": lambda y, see: y.register_hook(lambda g: see.append(g.clone())),
    "another gradient": lambda y, see: y.register_hook(lambda g: g * 2),
    "retain_grad": lambda y, see: (y.retain_grad(), see.append(y)),
    "the node's hook": lambda y, see: y.grad_fn.register_prehook(
        lambda g: see.append(g[0].clone())
    ),
}


@pytest.mark.parametrize("producer", ["relu", "glu", *BLOCKS])
@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_a_hook_that_another_hook_puts_there_sees_the_true_gradient(late, producer, device):
    """During the backward, after the next layer's step."""

    def scenario(stack):
        seen, (output, out) = [], stack.outputs()
        stack.weights[1].register_hook(lambda _: (late(output, seen), None)[1])
        grads = stack.step(out)
        return [*grads, *(t if t.grad_fn is None else t.grad for t in seen)]

    assert_equal_eager(scenario, activations=(producer, "none"), device=device)


@every_stack
def test_threads_on_one_graph(activations, device):
    """One node runs for several runs of the engine at the same time."""
    stack, barrier = Stack(activations, device=device), threading.Barrier(4)
    y = stack()
    want = Stack(activations, device=device, fused=False).step()

    def work(k):
        barrier.wait()
        for factor in range(k + 1, k + 21):
            got = torch.autograd.grad(y, stack.leaves, stack.g * factor, retain_graph=True)
            assert_same(got, [t * factor for t in want], f"factor {factor}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
