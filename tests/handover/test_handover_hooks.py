"""Whoever hooks in between two fused layers sees, and may change, the true gradient."""

import pytest
import torch
from helpers import one_thread  # noqa: F401
from stacks import MIXED, Stack, assert_equal_plain, assert_same
from torch import nn

import torch_fused_linear as tfl

middle_param = pytest.mark.parametrize("k", [0, 1, 2])


@middle_param
def test_tensor_hook(k, device):
    def scenario(stack):
        seen, outputs = [], stack.outputs()
        outputs[k].register_hook(lambda g: seen.append(g.clone()))
        stack.backward(outputs[-1])
        return [*stack.grads(), *seen]

    assert_equal_plain(scenario, 2, "a hook on the tensor", device=device)


@middle_param
def test_tensor_hook_that_changes_the_gradient(k, device):
    def scenario(stack):
        outputs = stack.outputs()
        outputs[k].register_hook(lambda g: g.cos())
        stack.backward(outputs[-1])
        return stack.grads()

    assert_equal_plain(scenario, 2, "a hook on the tensor", device=device)


def test_hooks_that_were_removed(device):
    """torch keeps their empty places, so that the path may stay plain."""

    def scenario(stack):
        outputs = stack.outputs()
        outputs[1].register_hook(lambda g: g.cos()).remove()
        outputs[2].grad_fn.register_hook(lambda *grads: None).remove()
        stack.backward(outputs[-1])
        return stack.grads()

    assert_equal_plain(scenario, None, device=device)


@middle_param
def test_node_prehook(k, device):
    def scenario(stack):
        seen, outputs = [], stack.outputs()

        def hook(grads):
            seen.append(grads[0].clone())
            return tuple(g.cos() for g in grads)

        outputs[k].grad_fn.register_prehook(hook)
        stack.backward(outputs[-1])
        return [*stack.grads(), *seen]

    assert_equal_plain(scenario, 2, "a hook on the node", device=device)


@middle_param
def test_node_hook_on_the_producer(k, device):
    """It is shown what arrives at the node and what leaves it."""

    def scenario(stack):
        seen, outputs = [], stack.outputs()

        def hook(inputs, outputs):
            seen.extend(None if g is None else g.clone() for g in (*inputs, *outputs))

        outputs[k].grad_fn.register_hook(hook)
        stack.backward(outputs[-1])
        return [*stack.grads(), *seen]

    assert_equal_plain(scenario, None, "hook", device=device)


def test_node_hook_on_the_last_layer(device):
    """A hook on the consumer's node is shown the gradient of its input: the true one."""

    def scenario(stack):
        seen, y = [], stack()
        y.grad_fn.register_hook(lambda inputs, _: seen.extend(g.clone() for g in inputs[:3]))
        stack.backward(y)
        return [*stack.grads(), *seen]

    assert_equal_plain(scenario, 2, "hook", device=device)


def test_node_hook_on_the_last_layer_that_changes_the_gradient(device):
    def scenario(stack):
        y = stack()
        y.grad_fn.register_hook(lambda inputs, _: (inputs[0].cos(), *inputs[1:]))
        stack.backward(y)
        return stack.grads()

    assert_equal_plain(scenario, 2, "hook", device=device)


def test_node_prehook_on_the_last_layer_changes_nothing(device):
    """It sees what arrives there, which is the true gradient in any case."""

    def scenario(stack):
        y = stack()
        y.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
        stack.backward(y)
        return stack.grads()

    assert_equal_plain(scenario, 3, device=device)


@pytest.mark.parametrize("kind", ["full", "pre"])
def test_module_backward_hooks(kind, device):
    def scenario(_):
        torch.manual_seed(1)
        model = nn.Sequential(
            tfl.FusedLinearReLU(4, 5),
            tfl.FusedLinearGELU(5, 6),
            tfl.FusedLinearGELU(6, 7, approximate="none"),
            tfl.FusedLinear(7, 3),
        ).to(device=device, dtype=torch.float64)
        seen = []
        if kind == "full":
            model[1].register_full_backward_hook(
                lambda _, gi, go: seen.extend(g.clone() for g in (*gi, *go))
            )
        else:
            model[1].register_full_backward_pre_hook(lambda _, go: seen.append(go[0].clone()))
        x = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
        model(x).square().sum().backward()
        assert seen
        return [x.grad, *(p.grad for p in model.parameters()), *seen]

    # nodes of the hook's own stand before and behind the layer
    assert_equal_plain(scenario, 1, "the input is not a fused layer's output")


def test_multi_grad_hook(device):
    def scenario(stack):
        seen, outputs = [], stack.outputs()
        torch.autograd.graph.register_multi_grad_hook(
            outputs[:2], lambda grads: seen.extend(g.clone() for g in grads)
        )
        stack.backward(outputs[-1])
        return [*stack.grads(), *seen]

    assert_equal_plain(scenario, 1, "a hook on the tensor", device=device)


def test_hooks_on_parameters_change_nothing(device):
    """Those of DDP, FSDP and optimisers that step in the backward sit on the leaves."""

    def scenario(stack):
        seen = []
        for leaf in stack.leaves:
            leaf.register_hook(lambda g: seen.append(g.clone()))
            leaf.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        stack.backward(stack())
        return [*stack.grads(), *seen]

    assert_equal_plain(scenario, 3, device=device)


@middle_param
def test_retain_grad(k, device):
    def scenario(stack):
        outputs = stack.outputs()
        outputs[k].retain_grad()
        stack.backward(outputs[-1])
        return [*stack.grads(), outputs[k].grad]

    assert_equal_plain(scenario, 2, "retain_grad", device=device)


def test_plain_gradients_equal_torchs_where_watched(device):
    """The plain path, against which all else is held, is torch's."""
    fused, eager = (Stack(MIXED, device=device) for _ in "ab")
    results = []
    for stack, kind in ((fused, True), (eager, False)):
        seen, outputs = [], stack.outputs(kind)
        for output in outputs:
            output.retain_grad()
        stack.backward(outputs[-1])
        seen = [output.grad for output in outputs]
        results.append([*stack.grads(), *seen])
    assert_same(*results)
