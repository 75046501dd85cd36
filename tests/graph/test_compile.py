"""torch.compile: one graph, the same numbers, no recompiling over batch sizes."""

import inspect

import pytest
import torch
from compiler import has_compiler
from functorch.compile import aot_function, min_cut_rematerialization_partition
from layers import step
from networks import NETWORKS, batch, network
from numerics import assert_same, run
from operators import EVERY, mlp
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.compile_utils import fx_graph_cse
from torch._higher_order_ops.scan import scan

import torch_fused_linear as tfl

name_param = pytest.mark.parametrize("name", NETWORKS)


def compiled_in_one(model, backend="aot_eager", **options):
    return torch.compile(model, fullgraph=True, backend=backend, **options)


def assert_steps(compiled, model, *xs):
    for x in xs:
        assert_same(step(compiled, x), step(model, x), exact=1e-10)
        with torch.no_grad():
            assert_same([compiled(x)], [model(x)], exact=1e-10)


@pytest.mark.parametrize("lead, bias", [((), True), ((2, 3), False)])
def test_every_operator_in_one_graph(lead, bias, device):
    cases = [op.smooth_case(lead, 7, 9, device=device, bias=bias) for op in EVERY]

    def every(tensors):
        return [op.call(*given) for op, given in zip(EVERY, tensors, strict=True)]

    results = []
    for call in (compiled_in_one(every), every):
        leaves = [case.leaves() for case in cases]
        outputs = call(leaves)
        torch.autograd.backward(outputs, [case.g for case in cases])
        results.append([[y, *(t.grad for t in ts)] for y, ts in zip(outputs, leaves)])
    for op, got, want in zip(EVERY, *results, strict=True):
        assert_same(got, want, repr(op))


@name_param
@pytest.mark.parametrize(
    "policy, backend", [("auto", "eager"), ("cublaslt", "aot_eager"), ("eager", "aot_eager")]
)
def test_a_network_in_one_graph(policy, backend, name, device):
    with tfl.set_policy(policy):
        model = network(name, device, torch.float64)
        x = batch(name, 5, device=device, dtype=torch.float64)
        assert_steps(compiled_in_one(model, backend), model, x)


@name_param
def test_inductor(name, device):
    """The default backend, which rewrites strides and reuses buffers."""
    if device.type == "cuda":
        pytest.importorskip("triton")
    elif not has_compiler:
        pytest.skip("needs a C++ compiler")
    model = network(name, device)
    compiled = torch.compile(lambda x: model(x * 2).sin(), fullgraph=True)
    x = batch(name, 6, device=device)
    turned = x.t().contiguous().t() if x.dim() == 2 else x.to(memory_format=torch.channels_last)
    for given in (x, turned):
        leaf, twin = given.clone().requires_grad_(), given.clone().requires_grad_()
        compiled(leaf).sum().backward()
        model(twin * 2).sin().sum().backward()
        torch.testing.assert_close(leaf.grad, twin.grad, rtol=1e-3, atol=1e-4)


@name_param
def test_dynamic_batch_does_not_recompile(name, device):
    """Sizes stay symbols through our shape functions and autograd: one graph for all batches."""
    model, counter = network(name, device, torch.float64), CompileCounterWithBackend("aot_eager")
    xs = [batch(name, n, device=device, dtype=torch.float64) for n in (2, 3, 5, 64, 129)]
    assert_steps(compiled_in_one(model, counter, dynamic=True), model, *xs)
    assert counter.frame_count == 2, "with gradients and without"


@name_param
def test_under_autocast(name, device):
    model = network(name, device)
    compiled, x = compiled_in_one(model), batch(name, 5, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y, want = compiled(x), model(x)
    assert y.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(y, want)


@name_param
def test_compiled_autograd(name, device):
    """The backward pass itself is traced: the node gets a rebuilt context."""
    model, x = network(name, device, torch.float64), batch(name, 5, device=device).double()
    want = step(model, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        got = step(model, x)
    assert_same(got, want, exact=1e-10)
    compiled = torch.compile(model, backend="aot_eager")
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert_same(step(compiled, x), want, exact=1e-10)
    assert_same(step(model, x), want)


@pytest.mark.parametrize("op", [tfl.linear, tfl.linear_relu, tfl.linear_silu, tfl.linear_glu])
def test_rows_in_a_loop_that_allows_no_writes(op):
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    results = []
    for given in (x, x[:, None]):  # a row is a vector, or a matrix
        total, _ = scan(lambda c, v: (c + op(v, w).sum(-1), c * 2), given[0].sum(-1), given)
        results.append([total.sum(), *torch.autograd.grad(total.sum(), w)])
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore:.*boxed arguments:UserWarning")
def test_a_graph_of_low_memory_can_keep_one_tensor(device):
    """The compiler's partitioner decides what a graph keeps; it may compute GELU again."""
    op = mlp("gelu_tanh", 2, (128,), memory="low")
    case = op.case((64,), 16, 8, device=device)
    shapes, again = [], []

    def forward_graph(graph, inputs):
        outputs = next(iter(reversed(graph.graph.nodes))).args[0]
        shapes.extend(tuple(node.meta["val"].shape) for node in outputs if node is not None)
        return graph

    def backward_graph(graph, inputs):
        calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        again.extend(call for call in calls if "backward" not in call and "getitem" not in call)
        return graph

    compiled = aot_function(
        op.call,
        fw_compiler=forward_graph,
        bw_compiler=backward_graph,
        partition_fn=min_cut_rematerialization_partition,
    )
    told = "extra_node_key" not in inspect.signature(fx_graph_cse).parameters
    advice = {"activation_memory_budget": 0.9, "is_non_builtin_to_include": True} if told else {}
    with torch._functorch.config.patch(advice):
        assert_same(run(compiled, case), run(op.call, case))
    assert shapes.count((64, 128)) == 1
    assert again == ["aten.gelu.default"]
