"""memory='low' in graphs that are reused, cut or written into, under hooks and checkpoints."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_bits, one_thread  # noqa: F401
from low_memory import Net, small
from stacks import assert_same
from torch.utils.checkpoint import checkpoint

import torch_fused_linear as tfl

fused = torch.ops.fused


def test_a_graph_kept_and_then_freed(device):
    net = small(device)
    want = net.grads(net.eager())
    for call in (net.stack, net.mlp):
        y = call()
        first = net.grads(y, retain_graph=True)
        assert_same(first, want)
        assert_bits(net.grads(y), first)
        with pytest.raises(RuntimeError, match="second time"):
            net.grads(y)


def test_the_layer_before_was_freed_already(device):
    """Its output is still a tensor that a layer may be given, and that layer keeps it then."""
    net = small(device)
    y = net.hidden(0, net.x)
    after = net.hidden(1, y)  # shares the pre-activation, which outlives its layer's graph
    y.sum().backward()
    later = net.hidden(1, y)
    z = F.gelu(F.linear(net.x, net.weights[0], net.biases[0]), approximate="tanh")
    (want,) = torch.autograd.grad(net.hidden(1, z).sum(), net.weights[1])
    for out in (after, later):
        (got,) = torch.autograd.grad(out.sum(), net.weights[1], retain_graph=True)
        assert_same([got], [want])
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()


def test_written_to_before_the_next_layer(device):
    """Under autograd or behind its back, whole or in part: what the next layer read counts."""

    def seen(y):
        return y.mul_(2)

    def unseen(y):
        with torch.no_grad():
            y.mul_(2)
        return y

    def through_a_detached(y):
        y.detach()[1:].zero_()
        return y

    def through_a_view(y):
        with torch.no_grad():
            y[0, :2].fill_(3)
        return y

    for write in (seen, unseen, through_a_detached, through_a_view):
        results = []
        for fused_layers in (True, False):
            net = small(device)
            if fused_layers:
                y = fused.linear(write(net.hidden(0, net.x)), net.weights[1], net.biases[1])
            else:
                y = F.gelu(F.linear(net.x, net.weights[0], net.biases[0]), approximate="tanh")
                y = F.linear(write(y), net.weights[1], net.biases[1])
            results.append([y, *torch.autograd.grad(y.square().sum(), net.leaves[:5])])
        assert_same(*results, write.__name__)


def test_written_to_after_the_next_layer(device):
    """eager has to refuse the backward: it kept what was written to. Here it is not needed."""
    net = small(device)
    want = net.grads(net.eager())
    hidden = net.hidden(0, net.x)
    y = fused.linear(net.hidden(1, hidden), net.weights[2], net.biases[2])
    with torch.no_grad():
        hidden.zero_()
    assert_same(net.grads(y), want)


@pytest.mark.parametrize(
    "way", ["view", "part", "transposed", "detached", "twice", "as weight", "cast"]
)
def test_what_is_not_the_very_output_is_kept(way, device):
    net = Net(device=device, lead=(8,), widths=(6, 8, 8))
    w = net.weights[1]
    ways = {
        "view": lambda y: fused.linear(y.view(2, 4, 8), w),
        "part": lambda y: fused.linear(y[:, :8][2:], w),
        "transposed": lambda y: fused.linear(y.t(), w),
        "detached": lambda y: fused.linear(y.detach(), w) * y,
        "twice": lambda y: fused.linear(y, w) + fused.linear_relu(y, w),
        "as weight": lambda y: fused.linear(y, y),
        "cast": lambda y: fused.linear(y.float(), w.float()),
    }
    results = []
    for memory in ("low", "default"):
        y = ways[way](net.hidden(0, net.x, memory))
        results.append(torch.autograd.grad(y.square().sum(), net.leaves[:4], allow_unused=True))
    assert_same(*results)


@pytest.mark.parametrize("on", [True, False])
def test_hooks_on_the_tensor_between(on, device):
    net = small(device)
    results, seen = [], []
    for call in (net.hidden, lambda k, x: net.hidden(k, x, "default")):
        y = call(0, net.x)
        y.register_hook(lambda g: seen.append(g.clone()))
        y = fused.linear(call(1, y), net.weights[2], net.biases[2])
        with tfl.handover(on):
            results.append(net.grads(y))
    assert_same(results[0], results[1])
    assert_same(seen[:1], seen[1:])


# --- hooks on saved tensors, checkpoints --------------------------------------------------------


@pytest.mark.parametrize("which", [None, 0, 1])
def test_kept_elsewhere(which, device):
    """Hooks around all layers or around one: each tensor is asked for once in a backward."""
    asked = []

    def unpack(packed):
        asked.append(packed)
        return packed.clone()

    def hooks():
        return torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack)

    net = small(device)
    want = net.grads(net.eager())
    if which is None:
        with hooks():
            y = net.stack()
    else:
        y = net.x
        for k in range(2):
            if which == k:
                with hooks():
                    y = net.hidden(k, y)
            else:
                y = net.hidden(k, y)
        y = fused.linear(y, net.weights[2], net.biases[2])
    assert_same(net.grads(y), want)
    assert asked and len({id(packed) for packed in asked}) == len(asked)
    with torch.autograd.graph.save_on_cpu():
        y = net.mlp()
    assert_same(net.grads(y), want)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("part", ["all", "first", "second", "each"])
def test_checkpoint(part, reentrant, device):
    net = small(device)
    want = net.grads(net.eager())

    def run(function, x, inside):
        return checkpoint(function, x, use_reentrant=reentrant) if inside else function(x)

    def backward(y):
        for leaf in net.leaves:
            leaf.grad = None
        y.backward(net.g)
        return [leaf.grad for leaf in net.leaves]

    def last(y):
        return fused.linear(y, net.weights[2], net.biases[2])

    def stack(x):
        return last(net.hidden(1, net.hidden(0, x)))

    if part == "all":
        y = run(stack, net.x, True)
    else:
        y = run(lambda x: net.hidden(0, x), net.x, part != "second")
        y = last(run(lambda x: net.hidden(1, x), y, part != "first"))
    assert_same(backward(y), want)
    assert_same(backward(run(lambda x: net.mlp(), net.x, True)), want)
