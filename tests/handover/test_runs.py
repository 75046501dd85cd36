"""Several runs of the engine at once, and runs that are broken off."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from numerics import assert_same
from stacks import Stack
from torch.autograd.graph import saved_tensors_hooks

import torch_fused_linear as tfl

# --- broken off, written to ----------------------------------------------------------------------


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


@pytest.mark.parametrize("when", ["before", "in the backward"])
@pytest.mark.parametrize("on", [False, True])
def test_a_write_to_what_a_layer_saved_is_an_error(on, when, device):
    """Also by a hook in the middle: it is not silently computed with the new values."""
    stack = Stack(("gelu_tanh", "none") if when != "before" else ("relu", "none"), device=device)
    y = stack.layer(0, stack.x)
    out = stack.layer(1, y)

    def spoil(_):
        with torch.no_grad():
            stack.weights[0].add_(1)

    if when == "before":
        y.detach().mul_(2)
    else:
        stack.weights[1].register_post_accumulate_grad_hook(spoil)
    with tfl.handover(on), pytest.raises(RuntimeError, match="modified by an inplace"):
        stack.backward(out)


def test_each_saved_tensor_is_unpacked_once_in_a_backward(device):
    def unpackings(on):
        asked = []

        def unpack(k):
            counts[k] += 1
            return kept[k]

        kept, counts = [], []

        def pack(tensor):
            kept.append(tensor.detach().clone()), counts.append(0)
            return len(kept) - 1

        stack = Stack(device=device)
        with saved_tensors_hooks(pack, unpack):
            y = stack()
        with tfl.handover(on), tfl.explain() as report:
            for retain in (True, False):
                stack.backward(y, retain_graph=retain)
                asked.append(list(counts))
        assert report.handed_over == (6 if on else 0)
        return stack.grads(), asked

    (plain, _), (handed, asked) = unpackings(False), unpackings(True)
    assert_same(handed, plain)
    assert [set(counts) for counts in asked] == [{1}, {2}]


# --- several runs at once ------------------------------------------------------------------------


def at_once(count, work):
    """work(k) in as many threads, started together."""
    barrier = threading.Barrier(count)

    def job(k):
        barrier.wait()
        return work(k)

    with tfl.explain() as report, ThreadPoolExecutor(count) as pool:
        results = list(pool.map(job, range(count)))
    assert report.handed_over == 3 * 20 * count
    return results


def test_threads_on_graphs_of_their_own(device):
    def stacks():
        return [Stack(device=device, seed=k) for k in range(4)]

    with tfl.handover(False):
        want = [torch.autograd.grad(s(), s.leaves, s.g) for s in stacks()]
    ours = stacks()

    def work(k):
        stack = ours[k]
        return [torch.autograd.grad(stack(), stack.leaves, stack.g) for _ in range(20)]

    for k, repeats in enumerate(at_once(4, work)):
        for got in repeats:
            assert_same(got, want[k], f"thread {k}")


def test_threads_on_one_graph(device):
    """One node runs for several runs of the engine at the same time: notes are kept per run."""
    stack = Stack(device=device)
    y = stack()
    with tfl.handover(False):
        want = torch.autograd.grad(y, stack.leaves, stack.g, retain_graph=True)

    def work(k):
        grads = []
        for n in range(1, 21):
            g = stack.g * (k + n)
            grads.append((k + n, torch.autograd.grad(y, stack.leaves, g, retain_graph=True)))
        return grads

    for factor, got in (pair for pairs in at_once(4, work) for pair in pairs):
        assert_same(got, [t * factor for t in want], f"factor {factor}")
