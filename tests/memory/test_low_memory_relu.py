"""memory='low' of ReLU: one bit for each element, by torch's rule."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_bits, decode_mask, kept_bytes, one_thread, random_case  # noqa: F401
from low_memory import ROWS, Net, dtype_param, identity
from stacks import assert_same
from torch.autograd.graph import saved_tensors_hooks

import torch_fused_linear as tfl
from torch_fused_linear import plans

fused = torch.ops.fused


@dtype_param
def test_bytes_of_relu(dtype, device):
    case = random_case((64,), 96, 256, dtype, device)
    leaves = [t.requires_grad_() for t in case.inputs]
    whole, bits = 64 * 256 * dtype.itemsize, 64 * 256 // 8
    assert kept_bytes(lambda: fused.linear_relu(*leaves)) == whole
    assert kept_bytes(lambda: fused.linear_relu(*leaves, memory="low")) == bits
    # a row of bits takes 16 bytes at least
    narrow = random_case((64,), 8, 4, dtype, device)
    leaves = [t.requires_grad_() for t in narrow.inputs]
    kept = kept_bytes(lambda: fused.linear_relu(*leaves, memory="low"))
    assert kept == 64 * min(16, 4 * dtype.itemsize)


@dtype_param
@pytest.mark.parametrize("width", [1, 7, 128, 129])
def test_relu_has_torchs_rule_at_zero_and_for_nan(width, dtype, device):
    case = random_case((6,), 5, width, dtype, device)
    case.x[0] = 0  # and no bias: exactly 0
    case.x[1, 0] = torch.nan
    results = []
    for call in (
        lambda x, w: fused.linear_relu(x, w, memory="low"),
        fused.linear_relu,
        lambda x, w: F.relu(F.linear(x, w)),
    ):
        x, w = case.x.clone().requires_grad_(), case.w.clone().requires_grad_()
        y = call(x, w)
        results.append([y, *torch.autograd.grad(y, [x, w], case.g)])
    low, default, eager = results
    assert (
        torch.count_nonzero(low[1][0]) == 0 and low[1][1].isnan().any() == eager[1][1].isnan().any()
    )
    for a, b in zip(low, default):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    for a, b in zip(low, eager):
        assert torch.equal(a.isnan(), b.isnan())
        assert_same([a.nan_to_num()], [b.nan_to_num()])


def test_gradients_of_relu_in_every_order(device):
    case = random_case((3,), 4, 5, torch.float64, device, seed=2)
    leaves = [t.requires_grad_() for t in case.inputs]

    def function(*args):
        return fused.linear_relu(*args, memory="low")

    assert torch.autograd.gradcheck(function, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_relu_hands_over_with_bits(device):
    case = random_case((6,), 8, 200, torch.float64, device)
    w2 = torch.randn(3, 200, dtype=torch.float64, device=device)

    def grads(memory):
        leaves = [t.clone().requires_grad_() for t in (*case.inputs, w2)]
        y = fused.linear(fused.linear_relu(*leaves[:3], memory=memory), leaves[3])
        return torch.autograd.grad(y.sum(), leaves)

    with tfl.explain() as report:
        low = grads("low")
    assert report.handed_over == 1
    assert sum(call.operator == "_linear_relu_bits" for call in report.calls) == 1
    assert_bits(low, grads("default"))


def test_bits_are_what_the_output_says(device):
    case = random_case((6,), 8, 200, torch.float32, device)
    kept = []
    leaves = [t.requires_grad_() for t in case.inputs]
    with saved_tensors_hooks(lambda t: kept.append(t) or t, identity):
        y = fused.linear_relu(*leaves, memory="low")
    (mask,) = [t for t in kept if t.dtype == torch.uint8]
    assert torch.equal(decode_mask(mask, 200), y > 0)
    assert not decode_mask(mask, 256)[..., 200:].any()


def test_relu_in_a_chain_keeps_bits_beside_frozen_weights_only(device):
    net = Net("relu", torch.float32, device, widths=(128, 256, 384, 128))

    def mlp(memory="low"):
        return fused.mlp(net.x, net.weights, net.biases, "relu", memory=memory)

    outputs = net.hidden_bytes
    assert kept_bytes(mlp) == kept_bytes(lambda: mlp("default")) == outputs
    net.weights[2].requires_grad_(False)
    second = ROWS * 384 * 4
    assert kept_bytes(mlp) == outputs - second + second // 32
    with plans.budget(0):  # a mask and an output have plans of their own
        want = torch.autograd.grad(mlp("default"), [net.x, *net.weights[:2]], net.g)
        got = torch.autograd.grad(mlp(), [net.x, *net.weights[:2]], net.g)
    if device == "cpu":
        assert_bits(got, want)
    torch.testing.assert_close(got, want)
