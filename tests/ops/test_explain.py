"""explain: rows for every operator, in order, with what ran and why it was handed over or not."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import one_thread  # noqa: F401
from operators import DTYPES
from stacks import HANDED, MIXED, Stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from watching import explained, operators_of

import torch_fused_linear as tfl

BACKWARD, ACROSS = "_linear_backward", "_linear_backward_across"


def rows(report, *names):
    return [tuple(getattr(call, name) for name in names) for call in report.calls]


NAMES = dict(zip(DTYPES, ("Double", "Float", "Half", "BFloat16"), strict=True))


@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_a_step_of_a_stack(dtype, device):
    stack = Stack(MIXED, lead=(2, 3), dtype=dtype, widths=[4, 8, 16, 24, 3], device=device)
    _, report = explained(stack.step)
    assert rows(report, "operator", "shapes", "handover") == [
        ("linear_relu", "[2, 3, 4] x [8, 4]", ""),
        ("_linear_aux", "[2, 3, 8] x [16, 8]", ""),
        ("_linear_aux", "[2, 3, 16] x [24, 16]", ""),
        ("linear", "[2, 3, 24] x [3, 24]", ""),
        (ACROSS, "[2, 3, 24] x [3, 24]", HANDED),
        (ACROSS, "[2, 3, 16] x [24, 16]", HANDED),
        (ACROSS, "[2, 3, 8] x [16, 8]", HANDED),
        (BACKWARD, "[2, 3, 4] x [8, 4]", "plain: the input is not a fused layer's output"),
    ]
    assert report.handed_over == 3
    place = "cpu" if device.type == "cpu" else "cuda:0"
    assert set(rows(report, "dtype", "device")) == {(NAMES[dtype], place)}
    assert all(call.path for call in report.calls), report


def test_a_reason_is_in_the_row_that_it_is_about(device):
    """The situations are in tests/handover."""
    stack = Stack(("relu", "none", "none"), device=device)
    outputs = stack.outputs()
    outputs[0].register_hook(lambda g: g)
    ran = operators_of(lambda: stack.backward(outputs[-1]), "handover")
    reasons = ["no activation before", "a hook on the tensor", "the input is not a fused layer's"]
    for found, reason in zip(ran, reasons, strict=True):
        assert found.startswith(f"plain: {reason}")


def test_inference_and_single_operators(device):
    stack = Stack(lead=(3,), device=device)
    x, w, b = stack.x, stack.weights[0], stack.biases[0]
    with tfl.explain() as report, torch.no_grad():
        tfl.linear(x, w, b)
        tfl.linear_relu(x, w)
        tfl.linear_gelu(x, w, b)
        tfl.linear_gelu(x, w, b, approximate="none")
        tfl.mlp(x, stack.weights[:2], stack.biases[:2])
        torch.ops.fused._linear_aux(x, w, b, "relu")
        torch.ops.fused._linear_relu_bits(x, w, b)
        torch.ops.fused._relu_mask(x)
        torch.ops.fused._activation_backward(x, x, "gelu_tanh", True)
        image, kernel = (torch.ones(sizes, device=device) for sizes in ((2, 4, 7, 6), (8, 4, 3, 3)))
        y = tfl.conv2d_relu(image, kernel)
        torch.ops.fused._channels_relu_backward(y, y, True)
    layers = ["linear", "linear_relu", "linear_gelu", "linear_gelu", "mlp"]
    assert rows(report, "operator", "shapes", "handover") == [
        *((name, "[3, 4] x [5, 4]", "") for name in layers),
        ("mlp", "[3, 5] x [6, 5]", ""),
        ("_linear_aux", "[3, 4] x [5, 4]", ""),
        ("_linear_relu_bits", "[3, 4] x [5, 4]", ""),
        ("_relu_mask", "[3, 4]", ""),
        ("_activation_backward", "[3, 4]", ""),
        ("conv2d_relu", "[2, 4, 7, 6] x [8, 4, 3, 3]", ""),
        ("_channels_relu_backward", "[2, 8, 5, 4]", ""),
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
    options = {"lead": (64,), "widths": [64, 128, 64, 128], "dtype": torch.bfloat16}

    def paths(activation, name):
        stack = Stack([activation] * 2 + ["none"], device=cuda, **options)
        with tfl.set_policy(name):
            return operators_of(stack.step, "path")

    relu = paths("relu", "cublaslt")
    assert relu[:2] == ["RELU_AUX_BIAS"] * 2
    assert "DRELU_BGRAD" in relu[3] and "DRELU_BGRAD" in relu[4], relu
    gelu = paths("gelu_tanh", "cublaslt")
    assert gelu[:2] == ["GELU_AUX_BIAS"] * 2
    assert "DGELU_BGRAD" in gelu[3] and "DGELU_BGRAD" in gelu[4], gelu
    assert "DGELU" not in " ".join(relu) and "DRELU" not in " ".join(gelu)

    auto = paths("relu", "auto")
    assert auto[:2] == ["RELU_BIAS"] * 2
    assert all("own one-pass kernel" in path for path in auto[3:5]), auto
    erf = paths("gelu_erf", "cublaslt")
    assert all("own" in path and "DGELU" not in path for path in erf[:2] + erf[3:5]), erf


# --- the table ----------------------------------------------------------------------------------


def test_table(device):
    _, report = explained(Stack(device=device).step)
    lines = str(report).splitlines()
    assert len(lines) == 2 + len(report.calls)
    assert lines[0].split() == ["operator", "shapes", "dtype", "device", "path", "handover"]
    for line, call in zip(lines[2:], report.calls):
        for field in (call.operator, call.shapes, call.dtype, call.device, call.path):
            assert field in line
        assert line.endswith(call.handover or call.path)


# --- on and off ---------------------------------------------------------------------------------


def test_off_afterwards():
    stack = Stack()
    with pytest.raises(KeyError), tfl.explain() as failed:
        stack()
        raise KeyError
    empty = tfl.explain()
    assert str(empty).startswith("operator") and empty.calls == [] and empty.handed_over == 0
    _, report = explained(stack.step)
    before = list(report.calls)
    stack.backward(stack())
    with empty:
        pass
    assert (len(failed.calls), len(before), empty.calls) == (4, 8, [])
    assert report.calls == before and report.handed_over == 3


def test_what_fails_leaves_no_row_and_no_remark_behind():
    stack = Stack()
    y = stack()

    def hook(_):
        raise KeyError

    stack.weights[3].register_hook(hook)
    with tfl.explain() as report, pytest.raises(KeyError):
        stack.backward(y)
    assert report.handed_over == 1
    with tfl.explain() as report:
        with pytest.raises(RuntimeError):
            tfl.linear(stack.x, stack.weights[1])
        stack()
    assert [call.handover for call in report.calls] == [""] * 4
    assert report.calls[-1].operator == "linear"


def test_a_traced_backward_leaves_no_remark_for_the_next_row():
    """Tracing runs the nodes but no kernel, so what they say of their rows has none to go to."""
    with tfl.explain() as report:
        for _ in range(2):  # the second time results come from the tracer's cache
            with FakeTensorMode():
                Stack().step()
        with torch.no_grad():
            Stack()()
        x = torch.ones(1, 1)
        torch.ops.fused._linear_backward(x, x, x, None, "none", [True, True, True])
    assert rows(report, "handover") == [("",)] * 5, report


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
    assert len(report.calls) == 4 * 8 and report.handed_over == 4 * 3
    assert_remarks_in_place(report)


def assert_remarks_in_place(report):
    for call in report.calls:
        assert (call.operator == ACROSS) == (call.handover == HANDED), report
        assert bool(call.handover) == ("backward" in call.operator), report


def test_remarks_stay_with_their_rows_under_checkpoint(device):
    """Asking the producer for what it saved runs its forward anew, whose rows come in between."""
    stack = Stack(device=device)
    y = stack.x
    for k in range(4):
        y = checkpoint(stack.layer, k, y, use_reentrant=False)
    with tfl.explain() as report:
        stack.backward(y)
    assert_remarks_in_place(report)
