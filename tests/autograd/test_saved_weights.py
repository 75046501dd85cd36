"""What the backward reads of a weight and of ReLU's bits, whatever was done to them since."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import torch_fused_linear as tfl

D = torch.float64


def gated(x, gate, up, down, memory):
    return tfl.gated_mlp(x, gate, up, down, activation="silu", memory=memory)


def mlp(x, first, second, third, memory):
    return tfl.mlp(x, [first, second, third], [None] * 3, activation="gelu_tanh", memory=memory)


CALLS = {
    "linear": (1, lambda x, w, memory: tfl.linear(x, w), F.linear),
    "relu": (1, tfl.linear_relu, lambda x, w: F.relu(F.linear(x, w))),
    "gelu": (
        1,
        lambda x, w, memory: tfl.linear_gelu(x, w, approximate="none", memory=memory),
        lambda x, w: F.gelu(F.linear(x, w)),
    ),
    "two": (
        2,
        lambda x, v, w, memory: tfl.linear(tfl.linear_silu(x, v, memory=memory), w),
        lambda x, v, w: F.linear(F.silu(F.linear(x, v)), w),
    ),
    "gated": (
        3,
        gated,
        lambda x, g, u, d: F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d),
    ),
    "mlp": (
        3,
        mlp,
        lambda x, a, b, c: F.linear(
            F.gelu(F.linear(F.gelu(F.linear(x, a), approximate="tanh"), b), approximate="tanh"), c
        ),
    ),
}


def put_another(weight):
    weight.data = weight.data * 3


def cast(weight):
    weight.data = weight.data.bfloat16()


def gradients(call, weights, shape, change):
    torch.manual_seed(1)
    leaves = [nn.Parameter(w.clone(), requires_grad=w.requires_grad) for w in weights]
    x = torch.randn(*shape, 8, dtype=D).requires_grad_()
    y = call(x, *leaves)
    for leaf in leaves:
        change(leaf)
    y.square().sum().backward()
    return [x.grad, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("change", [put_another, cast])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("memory", ["default", "low"])
@pytest.mark.parametrize("name", CALLS)
def test_another_tensor_put_into_a_weight_is_not_read(name, memory, frozen, change):
    count, ours, plain = CALLS[name]
    torch.manual_seed(0)
    weights = [torch.randn(8, 8, dtype=D).requires_grad_(not frozen) for _ in range(count)]
    for shape in ((5,), (2, 3)):
        want = gradients(plain, weights, shape, change)
        got = gradients(lambda *args: ours(*args, memory=memory), weights, shape, change)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", CALLS)
def test_a_write_into_a_weight_is_an_error(name):
    count, ours, _ = CALLS[name]
    weights = [torch.randn(8, 8, dtype=D).requires_grad_() for _ in range(count)]
    for k in range(count):
        y = ours(torch.randn(5, 8, dtype=D).requires_grad_(), *weights, memory="default")
        with torch.no_grad():
            weights[k].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


HOOKS = {
    "half": (torch.Tensor.half, torch.Tensor.float),
    "bfloat16": (torch.Tensor.bfloat16, torch.Tensor.float),
    "double": (torch.Tensor.double, torch.Tensor.float),
}


@pytest.mark.parametrize("features", [16, 64, 200])
@pytest.mark.parametrize("name", HOOKS)
def test_bits_that_hooks_give_back_in_another_dtype(name, features):
    weight = torch.randn(features, 16).bfloat16().float()  # so that no hook rounds it
    both = [weight, torch.eye(features)]  # which are frozen
    grads = []
    for call in (
        lambda x: F.relu(F.linear(x, weight)),
        lambda x: tfl.linear_relu(x, weight, memory="low"),
        lambda x: tfl.mlp(x, both, [None] * 2, activation="relu", memory="low"),
    ):
        x = torch.ones(2, 16, requires_grad=True)
        with saved_tensors_hooks(*HOOKS[name]):
            y = call(x)
        y.sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads, grads[:1] * 3)


def test_bits_that_hooks_lose_are_an_error():
    x = torch.ones(2, 16, requires_grad=True)
    with saved_tensors_hooks(lambda t: t, torch.Tensor.int):
        y = tfl.linear_relu(x, torch.ones(16, 16), memory="low")
    with pytest.raises(RuntimeError, match=r"expected ReLU's bits .* got Int"):
        y.sum().backward()
