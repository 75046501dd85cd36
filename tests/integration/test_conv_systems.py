"""fused::conv2d_relu under opcheck, autocast, torch.compile, export, script; errors, explain."""

import io
import itertools

import pytest
import torch
from convolutions import LAYOUTS, ODD, Conv, full_precision, without_kinks  # noqa: F401
from helpers import DTYPES, ERRORS, Case, CountCasts, device_param, one_thread, policy, run  # noqa: F401
from meta_tensors import as_meta, results
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fused_linear as tfl

op = torch.ops.fused.conv2d_relu.default
private = torch.ops.fused._channels_relu_backward.default
BLOCK = Conv(channels=4, out=8, padding=(1, 1))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- registration -------------------------------------------------------------------------------


@device_param
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "requires_grad"])
def test_opcheck(grad, device):
    odd = ["groups, strided, dilated", "no batch", "1x1", "depthwise"]
    for (name, layout), bias in itertools.product(zip(odd, ("x", "", "xw", "w")), (True, False)):
        conv = ODD[name]
        case = conv.case(torch.float32, device, bias, layout)
        args = [t.requires_grad_(grad) for t in case.inputs] + [None] * (not bias)
        torch.library.opcheck(op, (*args, *map(list, conv.options[:3]), conv.groups))
    for layout in ("", "w", "xw"):
        case = BLOCK.case(torch.float32, device, last=layout)
        y = BLOCK.call(*case.inputs).requires_grad_(grad)
        torch.library.opcheck(private, (case.g.requires_grad_(grad), y, layout != "w"))


def strides(t):
    """Those that mean something."""
    return [s for n, s in zip(t.shape, t.stride()) if n != 1] if t.numel() else []


def assert_same_layout(real, other, label):
    for a, b in zip(results(real), results(other), strict=True):
        assert (a.shape, a.dtype, strides(a)) == (b.shape, b.dtype, strides(b)), label


@device_param
@pytest.mark.parametrize("odd", ODD)
def test_meta_tells_shape_dtype_and_strides(odd, device):
    conv = ODD[odd]
    for dtype, layout in itertools.product(DTYPES, LAYOUTS):
        if conv.batch is None and layout not in ("", "w"):
            continue
        case = conv.case(dtype, device, last=layout)
        args = (*case.inputs, *conv.options)
        real = op(*args)
        assert_same_layout(real, op(*map(as_meta, args)), f"{dtype} {layout}")
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            fake = op(*fakes)
        assert_same_layout(real, fake, f"fake {dtype} {layout}")
        assert fake.device.type == device
        if conv.batch is not None:
            args = (case.g, real, True)
            assert_same_layout(private(*args), private(*map(as_meta, args)), f"{dtype} {layout}")


def test_tags_and_keys():
    for each in (op, private):
        assert torch.Tag.pt2_compliant_tag in each.tags
        assert torch.Tag.needs_exact_strides in each.tags
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        for key in ("CPU", "Meta", "Autograd", "AutocastCPU", "AutocastCUDA"):
            assert has(each.name(), key), key
    assert str(op._schema) == (
        "fused::conv2d_relu(Tensor input, Tensor weight, Tensor? bias=None, "
        "SymInt[2] stride=[1, 1], SymInt[2] padding=[0, 0], SymInt[2] dilation=[1, 1], "
        "SymInt groups=1) -> Tensor"
    )


# --- autocast -----------------------------------------------------------------------------------


@device_param
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast(low, device):
    # Kinks as wide as the rounding of what is computed in.
    case = without_kinks(BLOCK, BLOCK.case(low, device))
    case = Case(*(t.float() for t in (case.x, case.w, case.b, case.g)))

    def both(fn):
        leaves = [t.clone().requires_grad_() for t in case.inputs]
        with torch.autocast(device, dtype=low):
            y = fn(*leaves)
        return [y, *torch.autograd.grad(y, leaves, case.g.to(low))]

    tolerance = 16 * torch.finfo(low).eps
    for ours, eager in zip(both(BLOCK.call), both(BLOCK.eager), strict=True):
        assert ours.dtype == eager.dtype
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance * 4)
    w, half = case.w.clone().requires_grad_(), case.x.to(low)
    with torch.autocast(device, dtype=low), CountCasts() as casts:
        for _ in range(3):
            assert BLOCK.call(half, w, case.b).dtype == low
    assert casts.shapes.count(tuple(w.shape)) == 1, "the cast is kept for the region"
    with pytest.raises(RuntimeError, match="conv2d_relu"):
        BLOCK.call(half, w, case.b)
    wide = BLOCK.case(torch.float64, device)
    with torch.autocast(device, dtype=low):
        assert BLOCK.call(*wide.inputs).dtype == torch.float64


# --- compilers ----------------------------------------------------------------------------------


def network(device="cpu"):
    return torch.nn.Sequential(
        tfl.FusedConv2dReLU(3, 8, 3, padding="same"),
        tfl.FusedConv2dReLU(8, 8, 3, stride=2, groups=2, bias=False),
        torch.nn.Flatten(),
        tfl.FusedLinear(8 * 4 * 4, 5),
    ).to(device)


def step(model, x):
    leaf = x.clone().requires_grad_()
    loss = model(leaf).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [leaf, *model.parameters()])]


def assert_steps(compiled, model, x):
    for a, b in zip(step(compiled, x), step(model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@device_param
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_in_one_graph(dynamic, device):
    model, counter = network(device), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=counter)
    for batch in (2, 3, 5) if dynamic else (2,):
        assert_steps(compiled, model, torch.randn(batch, 3, 10, 9, device=device))
    assert counter.frame_count == 2, "with gradients and without"
    last = torch.randn(2, 3, 10, 9, device=device).to(memory_format=torch.channels_last)
    assert_steps(compiled, model, last)


@device_param
def test_inductor(device):
    if device == "cuda":
        pytest.importorskip("triton")
    model = network(device)
    compiled = torch.compile(lambda x: model(x * 2).sin(), fullgraph=True)
    x = torch.randn(2, 3, 10, 9, device=device).to(memory_format=torch.channels_last)
    leaf, twin = (x.clone().requires_grad_() for _ in "ab")
    compiled(leaf).sum().backward()
    model(twin * 2).sin().sum().backward()
    torch.testing.assert_close(leaf.grad, twin.grad, rtol=1e-3, atol=1e-4)


def test_compiled_autograd():
    model, x = network(), torch.randn(2, 3, 10, 9)
    want = step(model, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        for a, b in zip(step(model, x), want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@device_param
def test_export_and_script(device):
    model, x = network(device).eval(), torch.randn(4, 3, 10, 9, device=device)
    dim = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: dim},))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("fused.conv2d_relu.default") == 2
    scripted = torch.jit.script(model)
    assert str(scripted.inlined_graph).count("fused::conv2d_relu(") == 2
    buffers = io.BytesIO(), io.BytesIO()
    torch.export.save(program, buffers[0])
    torch.jit.save(scripted, buffers[1])
    for buffer in buffers:
        buffer.seek(0)
    loaded = torch.export.load(buffers[0]).module(), torch.jit.load(buffers[1])
    for batch, each in itertools.product((4, 7), (*loaded, torch.jit.trace(model, x))):
        x = torch.randn(batch, 3, 10, 9, device=device)
        torch.testing.assert_close(each(x), model(x))
    x = x.requires_grad_()
    for a, b in zip(step(loaded[1], x.detach()), step(model, x.detach()), strict=True):
        torch.testing.assert_close(a, b)


@device_param
def test_flops_are_those_of_eager(device):
    from torch.utils.flop_counter import FlopCounterMode

    for conv, bias in itertools.product((BLOCK, *ODD.values()), (True, False)):
        case, counts = conv.case(torch.float32, device, bias), []
        for fn in (conv.call, conv.eager):
            with FlopCounterMode(display=False) as counter:
                run(fn, case)
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0


# --- reports and errors -------------------------------------------------------------------------


@device_param
@pytest.mark.parametrize("name", ["auto", "eager"])
def test_explain(name, device):
    case = BLOCK.case(torch.float32, device)
    with policy(name), tfl.explain() as report:
        run(BLOCK.call, case)
    forward = report.calls[0]
    assert (forward.operator, forward.shapes) == ("conv2d_relu", "[2, 4, 7, 6] x [8, 4, 3, 3]")
    if name == "eager" or device == "cpu":
        assert forward.path == "PyTorch's own (not fused)"
    else:
        assert "bias and ReLU" in forward.path
    backward = [call for call in report.calls if "backward" in call.operator]
    assert len(backward) == (name == "auto")
    if backward and device == "cuda":
        assert backward[0].path == "own one-pass kernel"


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


X, W, B = zeros(2, 4, 7, 6), zeros(6, 4, 3, 3), zeros(6)
HALF = torch.float16
BAD = {  # arguments, and what the message has to show
    "input 2-D": ((zeros(4, 4), W), ["input", "4, 4"]),
    "input 5-D": ((zeros(1, 1, 4, 7, 6), W), ["input", "1, 1, 4, 7, 6"]),
    "weight 2-D": ((X, zeros(6, 4)), ["weight", "6, 4"]),
    "channels": ((X, zeros(6, 3, 3, 3)), ["weight", "4 channels", "6, 3, 3, 3"]),
    "channels of a group": ((X, W, None, [1, 1], [0, 0], [1, 1], 2), ["weight", "2 groups"]),
    "groups and out_channels": (
        (X, zeros(7, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], 2),
        ["groups", "7"],
    ),
    "no groups": ((X, W, None, [1, 1], [0, 0], [1, 1], 0), ["groups", "0"]),
    "empty kernel": ((X, zeros(6, 4, 0, 3)), ["weight", "6, 4, 0, 3"]),
    "no channels": ((X[:, :0], W[:, :0]), ["weight", "6, 0, 3, 3"]),
    "kernel too large": ((X, zeros(6, 4, 3, 9), None, [1, 1], [1, 1]), ["width", "9", "8"]),
    "dilated too far": ((X, W, None, [1, 1], [0, 0], [4, 1]), ["height", "9", "7"]),
    "bias length": ((X, W, zeros(7)), ["bias", "6", "7"]),
    "bias 2-D": ((X, W, zeros(6, 1)), ["bias", "6, 1"]),
    "stride 0": ((X, W, B, [0, 1]), ["stride", "0, 1"]),
    "three strides": ((X, W, B, [1, 1, 1]), ["stride", "1, 1, 1"]),
    "padding": ((X, W, B, [1, 1], [0, -1]), ["padding", "0, -1"]),
    "dilation": ((X, W, B, [1, 1], [0, 0], [0, 0]), ["dilation", "0, 0"]),
    "weight dtype": ((X, W.to(HALF), B), ["weight", "Float", "Half"]),
    "bias dtype": ((X, W, B.to(HALF)), ["bias", "Half"]),
}


@device_param
@pytest.mark.parametrize("wrong", BAD)
def test_bad_arguments_name_op_expected_and_got(wrong, device):
    args, shown = BAD[wrong]
    kinds = [("auto", device, False), ("auto", device, True), ("eager", device, False)]
    for name, where, training in [*kinds, ("auto", "meta", False)]:
        moved = [a.to(where).clone() if isinstance(a, torch.Tensor) else a for a in args]
        if training:
            moved[1].requires_grad_()
        with policy(name), pytest.raises(RuntimeError, match=r"^conv2d_relu: .*got") as caught:
            op(*moved)
        for part in shown:
            assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


def test_mixed_devices_and_the_private_operator():
    for args in ((X, W.to("meta"), B), (X, W, B.to("meta")), (X.to("meta"), W, B)):
        with pytest.raises(ERRORS, match=r"conv2d_relu: .* on the device of input"):
            op(*args)
    for args in ((X, X[:1]), (X[0], X[0]), (X, X.double()), (X.long(), X.long())):
        with pytest.raises(ERRORS, match=r"_channels_relu_backward: .*got"):
            private(*args, True)
