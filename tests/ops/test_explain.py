"""explain: rows for every operator, in order, with what ran and why."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import one_thread  # noqa: F401
from operators import DTYPES
from stacks import MIXED, Stack
from torch._subclasses.fake_tensor import FakeTensorMode
from watching import explained, operators_of

import torch_fused_linear as tfl
from torch_fused_linear.activations import NUMBERS

BACKWARD, ACROSS = "_linear_backward", "_linear_backward_across"


def rows(report, *names):
    return [tuple(getattr(call, name) for name in names) for call in report.calls]


NAMES = dict(zip(DTYPES, ("Double", "Float", "Half", "BFloat16"), strict=True))


@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_a_step_of_a_stack(dtype, device):
    stack = Stack(MIXED, lead=(2, 3), dtype=dtype, widths=[4, 8, 16, 24, 3], device=device)
    _, report = explained(stack.step)
    assert rows(report, "operator", "shapes") == [
        ("linear_relu", "[2, 3, 4] x [8, 4]"),
        ("_linear_aux", "[2, 3, 8] x [16, 8]"),
        ("_linear_aux", "[2, 3, 16] x [24, 16]"),
        ("linear", "[2, 3, 24] x [3, 24]"),
        (BACKWARD, "[2, 3, 24] x [3, 24]"),
        (BACKWARD, "[2, 3, 16] x [24, 16]"),
        (BACKWARD, "[2, 3, 8] x [16, 8]"),
        (BACKWARD, "[2, 3, 4] x [8, 4]"),
    ]
    place = "cpu" if device.type == "cpu" else "cuda:0"
    assert set(rows(report, "dtype", "device")) == {(NAMES[dtype], place)}
    assert all(call.path for call in report.calls), report


def test_a_step_of_a_block(device):
    x, *parameters = (torch.randn(n, 4, device=device, requires_grad=True) for n in (3, 4, 4))
    _, report = explained(lambda: tfl.mlp(x, parameters, [None, None]).sum().backward())
    assert rows(report, "operator", "shapes") == [
        ("linear_relu", "[3, 4] x [4, 4]"),
        ("linear", "[3, 4] x [4, 4]"),
        (ACROSS, "[3, 4] x [4, 4]"),
        (BACKWARD, "[3, 4] x [4, 4]"),
    ]


def test_a_reason_is_in_the_row_that_it_is_about(device):
    """Why a gradient was not added to what is there begins the path of the weight's product."""
    stack = Stack(("relu", "none"), device=device)
    stack.step()
    hooked = stack.weights[0]
    hooked.register_hook(lambda g: g)
    with tfl.accumulate_gradients(hooked):
        ran = operators_of(stack.step, "operator", "path")
    why = "(weight's gradient apart: a hook on the weight)"
    assert [why in path for _, path in ran] == [False, False, False, True], ran
    assert ran[-1][1].startswith(f"{why} + ")


def test_inference_and_single_operators(device):
    stack = Stack(lead=(3,), device=device)
    x, w, b = stack.x, stack.weights[0], stack.biases[0]
    with tfl.explain() as report, torch.no_grad():
        tfl.linear(x, w, b)
        tfl.linear_relu(x, w)
        tfl.linear_gelu(x, w, b)
        tfl.linear_gelu(x, w, b, approximate="none")
        tfl.mlp(x, stack.weights[:2], stack.biases[:2])
        torch.ops.fused._linear_aux(x, w, b, NUMBERS["relu"])
        torch.ops.fused._linear_relu_bits(x, w, b)
        torch.ops.fused._relu_mask(x)
        torch.ops.fused._activation_backward(x, x, NUMBERS["gelu_tanh"], True)
        image, kernel = (torch.ones(sizes, device=device) for sizes in ((2, 4, 7, 6), (8, 4, 3, 3)))
        y = tfl.conv2d_relu(image, kernel)
        torch.ops.fused._channels_relu_backward(y, y, True)
    layers = ["linear", "linear_relu", "linear_gelu", "linear_gelu", "mlp"]
    assert rows(report, "operator", "shapes") == [
        *((name, "[3, 4] x [5, 4]") for name in layers),
        ("mlp", "[3, 5] x [6, 5]"),
        ("_linear_aux", "[3, 4] x [5, 4]"),
        ("_linear_relu_bits", "[3, 4] x [5, 4]"),
        ("_relu_mask", "[3, 4]"),
        ("_activation_backward", "[3, 4]"),
        ("conv2d_relu", "[2, 4, 7, 6] x [8, 4, 3, 3]"),
        ("_channels_relu_backward", "[2, 8, 5, 4]"),
    ]


def test_paths_on_the_cpu():
    assert set(operators_of(Stack().step, "path")) == {"PyTorch's own (not fused)"}
    x, w, small = torch.randn(256, 128), torch.randn(256, 128), torch.randn(2, 128)
    with tfl.explain() as report, torch.no_grad():
        tfl.linear_gelu(x, w)
        tfl.linear_gelu(small, w)
        tfl.linear_gelu(x.double(), w.double())
        tfl.linear_relu(x, w)
        tfl.linear(x, w)
    paths = [call.path for call in report.calls]
    if torch.backends.mkldnn.is_available():
        assert paths[0] == "oneDNN linear with post-op"
    assert paths[1:] == ["PyTorch's own (not fused)"] * 4


@pytest.mark.cuda
def test_paths_on_a_gpu(cuda):
    """cublaslt takes the library's epilogues by name; auto says what it does instead."""
    tensors = [torch.randn(n, 64, device=cuda).bfloat16().requires_grad_() for n in (64, 64, 64)]
    biases = [torch.zeros(64, device=cuda).bfloat16().requires_grad_() for _ in "ab"]

    def paths(activation, name):
        with tfl.set_policy(name):
            (y, forward) = explained(
                lambda: tfl.mlp(tensors[0], tensors[1:], biases, activation=activation)
            )
            backward = operators_of(lambda: y.sum().backward(), "path")
            return [*(call.path for call in forward.calls), *backward]

    relu = paths("relu", "cublaslt")
    assert relu[0] == "RELU_AUX_BIAS" and "DRELU_BGRAD" in relu[2], relu
    gelu = paths("gelu_tanh", "cublaslt")
    assert gelu[0] == "GELU_AUX_BIAS" and "DGELU_BGRAD" in gelu[2], gelu
    assert "DGELU" not in " ".join(relu) and "DRELU" not in " ".join(gelu)

    auto = paths("relu", "auto")
    assert auto[0] == "RELU_BIAS" and "own one-pass kernel" in auto[2], auto
    erf = paths("gelu_erf", "cublaslt")
    assert all("own" in path and "DGELU" not in path for path in (erf[0], erf[2])), erf


# --- the table ----------------------------------------------------------------------------------


def test_table(device):
    _, report = explained(Stack(device=device).step)
    lines = str(report).splitlines()
    assert len(lines) == 2 + len(report.calls)
    assert lines[0].split() == ["operator", "shapes", "dtype", "device", "path"]
    for line, call in zip(lines[2:], report.calls):
        for field in (call.operator, call.shapes, call.dtype, call.device, call.path):
            assert field in line
        assert line.endswith(call.path)


# --- on and off ---------------------------------------------------------------------------------


def test_off_afterwards():
    stack = Stack()
    with pytest.raises(KeyError), tfl.explain() as failed:
        stack()
        raise KeyError
    empty = tfl.explain()
    assert str(empty).startswith("operator") and empty.calls == []
    _, report = explained(stack.step)
    before = list(report.calls)
    stack.backward(stack())
    with empty:
        pass
    assert (len(failed.calls), len(before), empty.calls) == (4, 8, [])
    assert report.calls == before


def test_a_failing_call_leaves_no_row_and_no_reason():
    stack = Stack()
    y = stack()

    def hook(_):
        raise KeyError

    stack.weights[3].register_hook(hook)
    with tfl.explain() as report, pytest.raises(KeyError), tfl.accumulate_gradients(stack.weights):
        stack.backward(y)
    assert len(report.calls) == 1
    with tfl.explain() as report:
        with pytest.raises(RuntimeError):
            tfl.linear(stack.x, stack.weights[1])
        stack()
    assert [call.operator for call in report.calls][-1] == "linear" and len(report.calls) == 4
    assert not any("apart" in call.path for call in report.calls), report


def test_a_traced_backward_leaves_no_reason_for_the_next_row():
    """Tracing runs the nodes but no kernel, so what they say of their rows has none to go to."""
    with tfl.explain() as report:
        for _ in range(2):  # the second time results come from the tracer's cache
            with FakeTensorMode():
                stack = Stack()
                stack.weights[0].register_hook(lambda g: g)
                with tfl.accumulate_gradients(stack.weights):
                    stack.step()
        with torch.no_grad():
            Stack()()
        x = torch.ones(1, 1)
        torch.ops.fused._linear_backward(x, x, x, None, NUMBERS["none"], [True] * 3)
    assert len(report.calls) == 5 and "apart" not in str(report), report


def test_blocks_within_each_other_and_across():
    """Each has what ran while it was open, in order, and none is lost or told twice."""
    x, (outer, inner, later) = torch.randn(3, 4), (tfl.explain() for _ in range(3))
    events = [outer.__enter__, 1, inner.__enter__, 2, later.__enter__, 3]
    events += [inner.__exit__, 4, outer.__exit__, 5, later.__exit__, 6]
    for event in events:
        event() if callable(event) else tfl.linear(x, torch.randn(event, 4))

    def widths(report):
        return [int(call.shapes.split("[")[-1].split(",")[0]) for call in report.calls]

    assert widths(outer) == [1, 2, 3, 4]
    assert widths(inner) == [2, 3]
    assert widths(later) == [3, 4, 5]


def test_one_object_again_and_within_itself():
    x, w, report = torch.randn(3, 4), torch.randn(5, 4), tfl.explain()
    for count in (1, 2):
        with report:
            for _ in range(count):
                tfl.linear(x, w)
        assert len(report.calls) == count
    with report:
        tfl.linear(x, w)
        with report:
            tfl.linear_relu(x, w)
        assert rows(report, "operator") == [("linear_relu",)]
    assert rows(report, "operator") == [("linear",), ("linear_relu",)]


def test_all_threads_are_recorded():
    """Recording is process-wide: the rows of a backward in another thread are there."""
    with tfl.explain() as report, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Stack().step(), range(4)))
    assert len(report.calls) == 4 * 8
