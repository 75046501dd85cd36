"""torch.compile, torch.export: one graph, the same numbers, no recompiling over batch sizes."""

import io
import shutil

import pytest
import torch
from helpers import OPS, Case, device_param, op_param, policy, random_case, run, without_kinks
from torch._dynamo.testing import CompileCounterWithBackend

import torch_fused_linear as tfl

DYNAMIC = torch.export.Dim("tokens", min=2, max=4096)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    layers = [
        tfl.FusedLinearReLU(16, 33),
        tfl.FusedLinearGELU(33, 24),
        tfl.FusedLinearGELU(24, 24, bias=False, approximate="none"),
        tfl.FusedLinearSiLU(24, 20),
        tfl.FusedGatedMLP(20, 17, 24, bias=True),
        tfl.FusedLinear(24, 7),
    ]
    return torch.nn.Sequential(*layers).to(device=device, dtype=dtype)


def step(model, x):
    """[loss, gradients of x and of every parameter]."""
    leaf = x.clone().requires_grad_()
    loss = model(leaf).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, [leaf, *model.parameters()])]


def assert_steps(compiled, model, *xs):
    for x in xs:
        for a, b in zip(step(compiled, x), step(model, x), strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))


@device_param
@op_param
@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_each_operator_in_one_graph(lead, op, device):
    torch._dynamo.reset()
    case = without_kinks(random_case(lead, 7, 9, torch.float32, device))
    for bias in (True, False):
        one = Case(case.x, case.w, case.b if bias else None, case.g)
        compiled = torch.compile(op.call, fullgraph=True, backend="aot_eager")
        for a, b in zip(run(compiled, one), run(op.call, one), strict=True):
            torch.testing.assert_close(a, b)


@device_param
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_network_in_one_graph(dtype, device):
    model = network(device, dtype)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_steps(compiled, model, torch.randn(5, 16, dtype=dtype, device=device))


@device_param
def test_inductor(device):
    """The default backend, which rewrites strides and reuses buffers."""
    if device == "cpu" and not (shutil.which("g++") or shutil.which("c++")):
        pytest.skip("needs a C++ compiler")
    if device == "cuda":
        pytest.importorskip("triton")
    model = network(device)
    compiled = torch.compile(lambda x: model(x * 2).sin(), fullgraph=True)
    for x in (torch.randn(6, 16, device=device), torch.randn(16, 6, device=device).t()):
        leaf, twin = x.clone().requires_grad_(), x.clone().requires_grad_()
        compiled(leaf).sum().backward()
        model(twin * 2).sin().sum().backward()
        torch.testing.assert_close(leaf.grad, twin.grad, rtol=1e-4, atol=1e-5)


@device_param
def test_dynamic_batch_does_not_recompile(device):
    """Sizes stay symbols through our shape functions and autograd: one graph for all batches."""
    model = network(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (2, 3, 5, 64, 129):
        assert_steps(compiled, model, torch.randn(tokens, 16, device=device))
    # two: with gradients and without
    assert counter.frame_count == 2


@device_param
def test_batch_marked_dynamic_is_not_specialised(device):
    """mark_dynamic raises where an operator pins a size to a number."""
    model = network(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 16, device=device)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(x).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 7, 50):
            x = torch.randn(tokens, 16, device=device)
            torch.testing.assert_close(compiled(x), model(x))
            compiled(x).sum().backward()


@device_param
@pytest.mark.parametrize("name", ["cublaslt", "eager"])
def test_the_other_policies_compile(name, device):
    with policy(name):
        model = network(device)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_steps(compiled, model, torch.randn(5, 16, device=device))


@device_param
def test_compile_under_autocast(device):
    model = network(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, want = compiled(x), model(x)
    assert y.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(y, want)


@device_param
def test_wrong_shapes_are_reported_while_tracing(device):
    compiled = torch.compile(OPS[1].call, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"linear_relu: expected .* weight \[out, in\]"):
        compiled(torch.randn(5, 7, device=device), torch.randn(9, 8, device=device))


def test_compiled_autograd():
    """The backward pass itself is traced: the node gets a rebuilt context."""
    model = network()
    x = torch.randn(5, 16)
    want = step(model, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        got = step(model, x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@device_param
def test_export_round_trip(device):
    """Strict and non-strict; our operators stay whole in the graph; saved and loaded."""
    model = network(device).eval()
    x = torch.randn(6, 16, device=device)
    for strict in (False, True):
        program = torch.export.export(model, (x,), dynamic_shapes=({0: DYNAMIC},), strict=strict)
        targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
        assert targets == [
            "fused.linear_relu.default",
            "fused.linear_gelu.default",
            "fused.linear_gelu.default",
            "fused.linear_silu.default",
            "fused.gated_mlp.default",
            "fused.linear.default",
        ]
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        loaded = torch.export.load(buffer).module()
        for tokens in (2, 9):
            x = torch.randn(tokens, 16, device=device)
            torch.testing.assert_close(loaded(x), model(x))
