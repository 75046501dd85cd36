"""Saved tensors, recomputed (checkpoint) or kept elsewhere (offload), are asked for once each."""

import pytest
import torch
from helpers import one_thread  # noqa: F401
from stacks import Stack, assert_equal_plain, assert_same
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torch_fused_linear as tfl


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_layer_by_layer(reentrant, device):
    """Non-reentrant: the layers stay neighbours, and the consumer's step may be what has the
    producer recomputed. Reentrant: each layer is a graph of its own."""

    def scenario(stack):
        y = stack.x
        for k in range(4):
            y = checkpoint(stack.layer, k, y, use_reentrant=reentrant)
        stack.backward(y)
        return stack.grads()

    assert_equal_plain(scenario, 0 if reentrant else 3, device=device)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_of_the_whole_stack(reentrant, device):
    def scenario(stack):
        layers = [lambda x, k=k: stack.layer(k, x) for k in range(4)]

        def whole(x):
            for layer in layers:
                x = layer(x)
            return x

        stack.backward(checkpoint(whole, stack.x, use_reentrant=reentrant))
        return stack.grads()

    assert_equal_plain(scenario, 3, device=device)

    def in_segments(stack):
        layers = [lambda x, k=k: stack.layer(k, x) for k in range(4)]
        stack.backward(checkpoint_sequential(layers, 2, stack.x, use_reentrant=reentrant))
        return stack.grads()

    # the last segment is not checkpointed
    assert_equal_plain(in_segments, 2 if reentrant else 3, device=device)


def test_some_layers_checkpointed(device):
    for chosen in range(16):

        def scenario(stack, chosen=chosen):
            y = stack.x
            for k in range(4):
                inside = chosen >> k & 1
                y = (
                    checkpoint(stack.layer, k, y, use_reentrant=False)
                    if inside
                    else stack.layer(k, y)
                )
            stack.backward(y)
            return stack.grads()

        assert_equal_plain(scenario, 3, device=device)


class Packed:
    """A saved tensor, and how often it was asked for."""

    def __init__(self, tensor):
        self.tensor, self.unpacked = tensor.detach().clone(), 0


def test_each_saved_tensor_is_unpacked_once_in_a_backward(device):
    def unpackings(on):
        kept = []

        def pack(tensor):
            kept.append(Packed(tensor))
            return kept[-1]

        def unpack(packed):
            packed.unpacked += 1
            return packed.tensor

        stack = Stack(device=device)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = stack()
        with tfl.handover(on), tfl.explain() as report:
            stack.backward(y, retain_graph=True)
            once = [packed.unpacked for packed in kept]
            stack.backward(y)
        assert report.handed_over == (6 if on else 0)
        twice = [packed.unpacked for packed in kept]
        return stack.grads(), once, twice

    plain, handed = unpackings(False), unpackings(True)
    assert_same(handed[0], plain[0])
    assert handed[1:] == plain[1:]
    assert set(handed[1]) == {1} and set(handed[2]) == {2}


def test_offload(device):
    def scenario(stack):
        with torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"):
            y = stack()
        stack.backward(y)
        return stack.grads()

    assert_equal_plain(scenario, 3, device=device)


def test_unpacking_that_computes_with_gradients(device):
    """An unpack hook runs in the same state of autograd with and without hand-over."""

    def scenario(stack):
        states = []

        def unpack(tensor):
            with torch.enable_grad():
                leaf = tensor.detach().clone().requires_grad_(tensor.is_floating_point())
                states.append((leaf * 2).requires_grad)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = stack()
        stack.backward(y)
        assert states and all(states), "autograd was switched off while unpacking"
        return stack.grads()

    assert_equal_plain(scenario, 3, device=device)
