"""The policy "batch_invariant" without a GPU: what cannot be held raises, and names what it is."""

import threading

import pytest
import torch

import torch_fused_linear as tfl
from torch_fused_linear.graph.accumulated_weights import WeightsPass
from torch_fused_linear.graph.fusion_pass import FusionPass

X = torch.randn(3, 8)
W, DOWN = torch.randn(4, 8), torch.randn(2, 4)
CALLS = {
    "linear": lambda: tfl.linear(X, W),
    "linear_relu": lambda: tfl.linear_relu(X, W),
    "linear_gelu": lambda: tfl.linear_gelu(X, W),
    "mlp": lambda: tfl.mlp(X, [W, DOWN], [None, None]),
    "linear_glu": lambda: tfl.linear_glu(X, W),
    "gated_mlp": lambda: tfl.gated_mlp(X, W, W, DOWN),
    "conv2d_relu": lambda: tfl.conv2d_relu(torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3)),
    "vmap": lambda: torch.func.vmap(lambda w: tfl.linear(X, w))(torch.randn(2, 4, 8)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_cpu_and_convolutions_raise(call):
    words = r"expected .* on a CUDA device, got .* cpu"
    with tfl.set_policy("batch_invariant"), pytest.raises(NotImplementedError, match=words):
        call()
    assert torch.isfinite(call()).all()  # the policy ends with the block


@pytest.mark.parametrize("memory", ["default", "low"])
def test_training_raises_as_inference_does(memory):
    w = W.clone().requires_grad_()
    with tfl.set_policy("batch_invariant"), pytest.raises(NotImplementedError):
        tfl.linear_relu(X, w, memory=memory)


def test_backward_keeps_the_policy_of_its_forward():
    """One of another policy is not held to this one, nor does this one end early."""
    w = W.clone().requires_grad_()
    y = tfl.linear_gelu(X, w)
    with tfl.set_policy("batch_invariant"), pytest.raises(NotImplementedError):
        y.sum().backward()  # the call is made under the policy
    tfl.linear_gelu(X, w).sum().backward()
    assert w.grad is not None


def test_second_derivative_raises():
    x, w = X.double().requires_grad_(), W.double()
    y = tfl.linear_gelu(x, w)
    with tfl.set_policy("batch_invariant"), pytest.raises(NotImplementedError, match="derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_shapes_alone_are_made():
    with tfl.set_policy("batch_invariant"):
        assert tfl.linear_gelu(X.to("meta"), W.to("meta")).shape == (3, 4)


def test_blocks_nest_and_hold_for_all_threads():
    seen = []
    with tfl.set_policy("batch_invariant"):
        with tfl.set_policy("auto"):
            assert tfl.linear(X, W).shape == (3, 4)
        thread = threading.Thread(target=lambda: seen.append(tfl.get_policy()))
        thread.start()
        thread.join()
    assert seen == ["batch_invariant"] and tfl.get_policy() == "auto"


@pytest.mark.parametrize("made", [WeightsPass, FusionPass])
def test_compilers_cache_knows_the_policy(made):
    usual = made().uuid()
    with tfl.set_policy("batch_invariant"):
        assert made().uuid() != usual
    assert made().uuid() == usual
