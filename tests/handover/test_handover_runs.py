"""Unusual runs of the engine: broken off, several at once, one inside another, on other streams."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import one_thread  # noqa: F401
from stacks import Stack, assert_equal_plain, assert_same

import torch_fused_linear as tfl

middle_param = pytest.mark.parametrize("k", [0, 1, 2])


def test_anomaly_mode(device):
    def scenario(stack):
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            stack.backward(stack())
        return stack.grads()

    assert_equal_plain(scenario, 0, "anomaly mode", device=device)


@middle_param
def test_aborted_backward_then_a_good_one(k, device):
    """A hook raises in the middle; nothing of that run shows in the next."""

    def scenario(stack):
        outputs, armed = stack.outputs(), [True]

        def hook(_):
            if armed:
                raise KeyError("on purpose")

        stack.weights[k].register_hook(hook)
        with pytest.raises(KeyError, match="on purpose"):
            stack.backward(outputs[-1], retain_graph=True)
        armed.clear()
        for leaf in stack.leaves:
            leaf.grad = None
        stack.backward(outputs[-1])
        return stack.grads()

    # three in the second run; in the first, as many as were left before the hook
    assert_equal_plain(scenario, 3 + min(3, 4 - k), device=device)


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


def test_a_hook_that_changes_a_parameter_in_the_backward(device):
    """What the plain path reports as an error, a saved tensor that was modified, is not silently
    computed with the new values."""

    def run():
        stack = Stack(("gelu_tanh", "none"), device=device)

        def spoil(_):
            with torch.no_grad():
                stack.weights[0].add_(1)

        stack.weights[1].register_post_accumulate_grad_hook(spoil)
        stack.backward(stack())

    for on in (False, True):
        with tfl.handover(on), pytest.raises(RuntimeError, match="modified by an inplace"):
            run()


# --- several runs at once -----------------------------------------------------------------------


def at_once(count, work):
    """work(k) in as many threads, started together."""
    barrier = threading.Barrier(count)

    def job(k):
        barrier.wait()
        return work(k)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(job, range(count)))


def test_threads_on_graphs_of_their_own(device):
    with tfl.handover(False):
        want = [torch.autograd.grad(s(), s.leaves, s.g) for s in map_stacks(device)]
    stacks = map_stacks(device)

    def work(k):
        stack = stacks[k]
        return [torch.autograd.grad(stack(), stack.leaves, stack.g) for _ in range(20)]

    with tfl.explain() as report:
        results = at_once(4, work)
    assert report.handed_over == 3 * 20 * 4
    for k, repeats in enumerate(results):
        for got in repeats:
            assert_same(got, want[k], f"thread {k}")


def map_stacks(device):
    return [Stack(device=device, seed=k) for k in range(4)]


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

    with tfl.explain() as report:
        results = at_once(4, work)
    assert report.handed_over == 3 * 20 * 4
    for factor, got in (pair for pairs in results for pair in pairs):
        assert_same(got, [t * factor for t in want], f"factor {factor}")


def test_a_backward_inside_a_backward(device):
    """The inner run has its own id; the outer one's notes wait."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                inner = Stack(device=grad.device, seed=1)
                inner.backward(inner())
            return grad * inner.biases[0].grad.sum()

    def scenario(stack):
        y = stack.layer(1, stack.layer(0, stack.x))
        stack.backward(stack.layer(3, stack.layer(2, Inner.apply(y))))
        return stack.grads()

    assert_equal_plain(scenario, 1 + 3 + 1, device=device)


# --- streams ------------------------------------------------------------------------------------


def test_the_producer_ran_on_another_stream(cuda):
    def scenario(stack):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = stack.layer(1, stack.layer(0, stack.x))
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        stack.backward(stack.layer(3, stack.layer(2, y)))
        torch.cuda.synchronize()
        return stack.grads()

    assert_equal_plain(scenario, 2, "another stream", device=cuda)


def test_everything_on_a_side_stream(cuda):
    def scenario(stack):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = stack()
            stack.backward(y, gradients=[stack.g])
        torch.cuda.synchronize()
        return stack.grads()

    assert_equal_plain(scenario, 3, device=cuda)
