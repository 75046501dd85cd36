"""memory='low' in torch's other systems: transforms, compilers, scripts, export, autocast."""

import copy

import pytest
import torch
from helpers import kept_bytes, one_thread, saved_bytes  # noqa: F401
from low_memory import FORMS, Net, form_param, network, small
from stacks import assert_same
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torch_fused_linear as tfl

fused = torch.ops.fused


def step(model, x):
    x = x.detach().clone().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def data(dtype=torch.float64, device="cpu"):
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).to(device, dtype)


@form_param
def test_torch_func(form, device):
    net = small(device, form=form)

    def loss(call):
        def value(x, w):
            y = call(x, w, net.biases[0], "low")
            return fused.linear(y, net.weights[1], net.biases[1]).square().sum()

        return value

    def smooth(x, w, b, memory):
        operator, _, options = FORMS[form]
        return operator(x, w, b, memory=memory, **options)

    def relu(x, w, b, memory):
        return fused.linear_relu(x, w, b, memory=memory)

    x, w = net.x.detach(), net.weights[0].detach()
    for call in (smooth, relu):
        got = torch.func.grad(loss(call), argnums=(0, 1))(x, w)
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        assert_same(got, torch.autograd.grad(loss(call)(*leaves), leaves))
        rows = torch.vmap(lambda row, call=call: call(row, w, net.biases[0], "low"))(x)
        assert_same([rows], [call(x, w, net.biases[0], "low")])


@pytest.mark.parametrize("name", ["linear_relu", "linear_gelu", "mlp"])
def test_opcheck(name, device):
    net = small(device, dtype=torch.float32)
    args = (net.x, net.weights[0], net.biases[0])
    if name == "mlp":
        args = (net.x, net.weights, net.biases, "gelu_tanh")
    torch.library.opcheck(getattr(fused, name).default, args, {"memory": "low"})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend, device, fresh_compiler):
    model = network(device=device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for x in (data(device=device), torch.randn(9, 16, dtype=torch.float64, device=device)):
        assert_same(step(compiled, x), step(model, x))


@pytest.mark.filterwarnings("ignore:.*boxed arguments:UserWarning")
def test_a_compiled_graph_can_keep_one_tensor(device, fresh_compiler):
    """What it keeps is its partitioner's affair, which by itself trades no time for memory. Told
    to, it computes GELU anew, where by default it would have to do a product again."""
    from functorch.compile import aot_function, min_cut_rematerialization_partition

    net = Net(dtype=torch.float32, device=device, lead=(64,), widths=(16, 128, 8))
    shapes, again = [], []

    def forward_graph(graph, inputs):
        outputs = next(iter(reversed(graph.graph.nodes))).args[0]
        shapes.extend(tuple(node.meta["val"].shape) for node in outputs if node is not None)
        return graph

    def backward_graph(graph, inputs):
        calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        again.extend(call for call in calls if "backward" not in call and "getitem" not in call)
        return graph

    def run(x, w1, b1, w2, b2):
        return fused.linear(fused.linear_gelu(x, w1, b1, memory="low"), w2, b2)

    compiled = aot_function(
        run,
        fw_compiler=forward_graph,
        bw_compiler=backward_graph,
        partition_fn=min_cut_rematerialization_partition,
    )
    with torch._functorch.config.patch(activation_memory_budget=0.9):
        assert_same(net.grads(compiled(*net.leaves)), net.grads(run(*net.leaves)))
    assert shapes.count((64, 128)) == 1
    assert again == ["aten.gelu.default"]


def test_the_pass_joins_layers_and_keeps_the_wish(fresh_compiler):
    found = []

    def backend(module, inputs):
        found.extend(n for n in module.graph.nodes if "fused" in str(n.target))
        return module

    for memory in ("default", "low"):
        found.clear()
        model = nn.Sequential(
            tfl.FusedLinearGELU(16, 24, memory=memory), tfl.FusedLinear(24, 8)
        ).double()
        compiled = torch.compile(model, backend=tfl.compile_backend(backend), fullgraph=True)
        assert_same(step(compiled, data()), step(model, data()))
        (node,) = found
        assert node.target is fused.mlp.default
        assert node.kwargs.get("memory", "default") == memory


def test_compiled_autograd(device, fresh_compiler):
    model = network(device=device)
    want = step(model, data(device=device))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        got = step(model, data(device=device))
    assert_same(got, want)


def test_script_and_export(tmp_path, device):
    model, x = network(device=device), data(device=device)
    want = step(model, x)
    scripted = torch.jit.script(model)
    scripted.save(tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    for program in (scripted, loaded):
        assert_same(step(program, x), want)
    exported = torch.export.export(model, (x,))
    torch.export.save(exported, tmp_path / "model.pt2")
    assert_same([torch.export.load(tmp_path / "model.pt2").module()(x)], want[:1])


def test_programs_from_before_there_was_a_choice(tmp_path):
    """Their code calls the operators without the argument."""

    def program(x, w, b):
        y = torch.ops.fused.linear_relu(x, w, b)
        y = torch.ops.fused.linear_gelu(y, w, b, approximate="none")
        return torch.ops.fused.mlp(y, [w, w], [b, None], "gelu_tanh")

    scripted = torch.jit.script(program)
    assert "memory" not in scripted.code
    scripted.save(str(tmp_path / "program.pt"))
    args = [torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)]
    assert torch.equal(torch.jit.load(tmp_path / "program.pt")(*args), program(*args))


def test_no_product_is_done_twice():
    """By torch's count of operations."""
    counts = []
    for memory in ("default", "low"):
        with FlopCounterMode(display=False) as counter:
            network(memory)(data()).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_autocast(device):
    model, x = network(dtype=torch.float32, device=device), data(torch.float32, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = step(model, x)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    want = step(narrow, x.to(torch.bfloat16))
    assert got[0].dtype == torch.bfloat16 and got[1].dtype == torch.float32
    assert_same([g.to(torch.bfloat16) for g in got], want)
