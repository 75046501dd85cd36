"""set_policy: as a call, a context manager, from the environment; what it changes and what not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import one_thread  # noqa: F401
from stacks import Stack, assert_same

import torch_fused_linear as tfl

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["auto", "cublaslt", "eager"]


@pytest.fixture(autouse=True)
def put_back():
    yield
    tfl.set_policy("auto")


def test_default_is_auto():
    assert tfl.get_policy() == "auto"


def test_as_a_call():
    for name in NAMES:
        tfl.set_policy(name)
        assert tfl.get_policy() == name


def test_as_a_context_manager():
    with tfl.set_policy("eager"):
        assert tfl.get_policy() == "eager"
        with tfl.set_policy("cublaslt"):
            assert tfl.get_policy() == "cublaslt"
        assert tfl.get_policy() == "eager"
    assert tfl.get_policy() == "auto"
    with pytest.raises(KeyError), tfl.set_policy("eager"):
        raise KeyError
    assert tfl.get_policy() == "auto"


@pytest.mark.parametrize("name", ["", "Auto", "fast", "cublas"])
def test_a_wrong_name_is_refused_and_changes_nothing(name):
    tfl.set_policy("eager")
    message = f"set_policy: policy must be 'auto', 'cublaslt' or 'eager', got '{name}'"
    with pytest.raises(ValueError, match=message):
        tfl.set_policy(name)
    assert tfl.get_policy() == "eager"


def in_a_process(value, code):
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_FUSED_LINEAR_POLICY"}
    environment["PYTHONPATH"] = str(ROOT)
    if value is not None:
        environment["TORCH_FUSED_LINEAR_POLICY"] = value
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("value", [None, "auto", "cublaslt", "eager"])
def test_environment_variable(value):
    code = "import torch_fused_linear as t; print(t.get_policy()); t.set_policy('eager')\n"
    run = in_a_process(value, code + "print(t.get_policy())")
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [value or "auto", "eager"]


def test_wrong_environment_variable():
    code = (
        "import torch, torch_fused_linear as t\n"
        "t.linear_relu(torch.ones(2, 2, requires_grad=True), torch.ones(2, 2))"
    )
    run = in_a_process("fast", code)
    assert run.returncode == 1, "a policy that does not exist was taken for another in silence"
    assert "'auto', 'cublaslt' or 'eager', got 'fast'" in run.stderr


def called(name, activation, device):
    """The operators of a layer's forward for training."""
    stack = Stack((activation,), widths=[4, 8], device=device)
    with tfl.set_policy(name), tfl.explain() as report:
        stack()
    return [call.operator for call in report.calls]


def test_what_is_called(device):
    assert called("auto", "relu", device) == ["linear_relu"]
    assert called("cublaslt", "relu", device) == ["_linear_aux"]
    for name in ("auto", "cublaslt"):
        assert called(name, "gelu_tanh", device) == ["_linear_aux"]
    assert called("eager", "gelu_tanh", device) == ["linear_gelu"]
    stack = Stack(("relu",), device=device)
    with tfl.set_policy("eager"):
        assert stack().grad_fn.name() == "ReluBackward0", "eager is not torch's own graph"


def saved_of_relu(name, device):
    """Shape and dtype of what a ReLU layer keeps beside input and weight."""
    stack, kept = Stack(("relu",), lead=(3,), device=device), []
    own = [stack.x.data_ptr(), stack.weights[0].data_ptr()]
    saving = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with tfl.set_policy(name), saving:
        y = stack()
    kept = [t for t in kept if t.data_ptr() not in own]
    return y, kept


def test_what_relu_saves(device):
    """cublaslt: the library's bit mask. auto: the output, which the next layer keeps anyway."""
    y, kept = saved_of_relu("cublaslt", device)
    assert [(t.dtype, tuple(t.shape)) for t in kept] == [(torch.uint8, (3, 16))]
    y, kept = saved_of_relu("auto", device)
    assert [t.data_ptr() for t in kept] == [y.data_ptr()]


def test_gradients_agree(device):
    for activations in (("relu", "gelu_tanh", "gelu_erf", "silu", "none"), ("relu",) * 3):
        results = []
        for name in NAMES:
            with tfl.set_policy(name):
                stack = Stack(activations, lead=(2, 3), device=device)
                stack.backward(stack())
                results.append(stack.grads())
        assert_same(results[0], results[2])
        assert_same(results[1], results[2])


def test_changed_between_forward_and_backward(device):
    """What was saved decides, not the policy of the moment; every pair of policies."""
    want = Stack(device=device)
    want.backward(want(fused=False))
    for forward in NAMES:
        for backward in NAMES:
            stack = Stack(device=device)
            with tfl.set_policy(forward):
                y = stack()
            with tfl.set_policy(backward):
                stack.backward(y)
            assert_same(stack.grads(), want.grads(), f"{forward} then {backward}")


def test_layers_of_different_policies_hand_over_to_each_other(device):
    """A mask that one layer has saved is read by whichever layer follows."""
    want = Stack(("relu", "relu", "gelu_tanh", "none"), device=device)
    want.backward(want(fused=False))
    for first, second in (("auto", "cublaslt"), ("cublaslt", "auto")):
        stack = Stack(want.activations, device=device)
        y = stack.x
        for k in range(4):
            with tfl.set_policy(second if k % 2 else first):
                y = stack.layer(k, y)
        with tfl.explain() as report:
            stack.backward(y)
        assert report.handed_over == 3
        assert_same(stack.grads(), want.grads())


def test_the_one_difference_at_exactly_zero(device):
    """The mask's gradient at a pre-activation of 0 is 1, torch's is 0; handed over or not."""
    for name, slope in (("auto", 0.0), ("cublaslt", 1.0), ("eager", 0.0)):
        for on in (True, False):
            stack = Stack(("relu", "none"), lead=(2,), device=device)
            with torch.no_grad():
                stack.x.zero_()
                stack.biases[0].zero_()
            with tfl.set_policy(name), tfl.handover(on):
                stack.backward(stack())
            want = slope * (stack.g @ stack.weights[1]).sum(0)
            assert_same([stack.biases[0].grad], [want], f"{name}, handover {on}")


def test_eager_holds_for_mlp_without_gradients(device):
    """Below autograd too, where oneDNN or cuBLASLt would otherwise take over."""
    mlp = tfl.FusedMLP(64, 256, 64, activation="gelu_tanh", device=device)
    x = torch.randn(512, 64, device=device)
    with tfl.set_policy("eager"), torch.inference_mode(), tfl.explain() as report:
        mlp(x)
    assert {call.path for call in report.calls} == {"PyTorch's own (not fused)"}, report
