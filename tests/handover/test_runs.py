"""Several runs of the engine at once, and runs that are broken off."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from numerics import assert_same
from stacks import Stack

import torch_fused_linear as tfl


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
    stack = Stack(device=device)
    stack.backward(stack())
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0


@pytest.mark.parametrize("on", [False, True])
def test_a_write_to_what_a_layer_saved_is_an_error(on, device):
    """A hook in the middle writes: nothing is silently computed with the new values."""
    stack = Stack(("gelu_tanh", "none"), device=device)
    out = stack()

    def spoil(_):
        with torch.no_grad():
            stack.weights[0].add_(1)

    stack.weights[1].register_post_accumulate_grad_hook(spoil)
    with tfl.handover(on), pytest.raises(RuntimeError, match="modified by an inplace"):
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
            g = stack.g * factor
            got = torch.autograd.grad(y, stack.leaves, g, retain_graph=True)
            assert_same(got, [t * factor for t in want], f"factor {factor}")

    with tfl.explain() as report, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert report.handed_over == 3 * 20 * 4
