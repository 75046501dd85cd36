"""Stacks of fused layers and of blocks: every gradient equals that of torch's own functions."""

import gc
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from numerics import assert_same
from operators import ACTS, DTYPES, mlp
from stacks import BLOCKS, EVERY, LAYERS, MIXED, STACKS, Stack, assert_equal_eager
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

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


# --- blocks that free what they have read --------------------------------------------------------

LARGE = (512, 64, 256, 8)  # rows and widths: the hidden tensor is 1 MiB, and goes before dz comes


class Large:
    """A step of a block whose backward makes the upper weight's gradient first."""

    def __init__(self, activation, memory, device, wanted=(True,) * 5):
        self.op = mlp(activation, 2, LARGE[2:3], memory=memory)
        self.case = self.op.case(LARGE[:1], LARGE[1], LARGE[3], device=device)
        self.wanted = wanted

    def outputs(self, call):
        leaves = self.case.leaves(self.wanted)
        return call(*leaves), [t for t in leaves if t.requires_grad]

    def want(self):
        y, leaves = self.outputs(self.op.eager)
        return torch.autograd.grad(y, leaves, self.case.g)


every_block = pytest.mark.parametrize(
    "activation, memory", list(itertools.product(ACTS, ("default", "low")))
)


@every_block
def test_every_subset_of_a_large_block(activation, memory, device):
    """Inputs: x, both weights, both biases."""
    for wanted in itertools.product([True, False], repeat=5):
        if any(wanted):
            block = Large(activation, memory, device, wanted)
            y, leaves = block.outputs(block.op.call)
            got = torch.autograd.grad(y, leaves, block.case.g)
            assert_same(got, block.want(), f"{wanted}")
            if any(wanted[:4]):  # for the last bias alone nothing was saved
                with pytest.raises(RuntimeError, match="second time"):
                    torch.autograd.grad(y, leaves, block.case.g)


@every_block
def test_a_large_block_whose_graph_is_retained(activation, memory, device):
    """Nothing is freed early, also for second derivatives later; then all of it is."""
    block = Large(activation, memory, device)
    want = block.want()
    y, leaves = block.outputs(block.op.call)
    for _ in range(2):
        got = torch.autograd.grad(y, leaves, block.case.g, retain_graph=True)
        assert_same(got, want)
    assert_same(torch.autograd.grad(y, leaves, block.case.g, create_graph=True), want)
    assert_same(torch.autograd.grad(y, leaves, block.case.g), want)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, block.case.g)


@every_block
def test_a_large_block_under_checkpoints_and_hooks(activation, memory, device):
    """Saved tensors that are made again, or are others than those that were saved."""
    block = Large(activation, memory, device)
    want = block.want()
    leaves = block.case.leaves()
    y = checkpoint(block.op.call, *leaves, use_reentrant=False)
    assert_same(torch.autograd.grad(y, leaves, block.case.g), want)
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        y = block.op.call(*leaves)
    for retain in (True, False):
        assert_same(torch.autograd.grad(y, leaves, block.case.g, retain_graph=retain), want)


@every_block
def test_a_large_block_that_adds_to_gradients(activation, memory, device):
    """The weights' gradients, and the biases', to what is there."""
    block = Large(activation, memory, device)
    leaves, want = block.case.leaves(), block.want()
    for _ in range(3):
        with tfl.accumulate_gradients(leaves[1:]), tfl.explain() as report:
            block.op.call(*leaves).backward(block.case.g)
    assert "_weight_gradient" in [call.operator for call in report.calls]
    assert_same([leaf.grad for leaf in leaves], [3 * t for t in want])


def test_a_block_called_by_hand_frees_nothing(device):
    """A hook may call a node while the engine runs another, in a run that frees its graph."""
    block = Large("gelu_tanh", "default", device)
    y, leaves = block.outputs(block.op.call)
    x = torch.ones(3, device=device, dtype=torch.float64, requires_grad=True)
    z, found = x * 2, []
    z.register_hook(lambda g: found.extend(t for t in y.grad_fn(block.case.g) if t is not None))
    z.sum().backward()
    assert_same(found, block.want())
    assert_same(torch.autograd.grad(y, leaves, block.case.g), block.want())


@pytest.mark.parametrize("activation", ACTS)
def test_a_block_in_two_parts(activation, device):
    """A graph's last backward asks for the upper layer alone; what lies below is freed with it."""
    block = Large(activation, "default", device)
    want = block.want()
    y, leaves = block.outputs(block.op.call)
    upper = [leaves[2], leaves[4]]
    assert_same(torch.autograd.grad(y, upper, block.case.g), [want[2], want[4]])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, block.case.g)


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
