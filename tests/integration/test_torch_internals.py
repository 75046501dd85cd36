"""What is taken of torch beside its public interface still means what we think it means."""

import ast
import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import one_thread  # noqa: F401
from torch import nn
from torch.overrides import TorchFunctionMode

import torch_fused_linear as tfl
from torch_fused_linear import _library
from torch_fused_linear import _torch_internals as internals
from torch_fused_linear._torch_internals import BroadcastingList2

ROOT = Path(__file__).resolve().parents[2]
fused = torch.ops.fused

# --- one place ----------------------------------------------------------------------------------


def dotted(node):
    """torch.a._b as text; nothing for what does not begin with torch."""
    names = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return ".".join(["torch", *names]) if isinstance(node, ast.Name) and node.id == "torch" else ""


def private_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [dotted(node)]
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch.")]
        # what lies in torch.ops.fused is ours
        yield from (n for n in names if re.search(r"\._[a-z]", n) and "torch.ops." not in n)


def test_no_other_module_takes_private_names_of_torch():
    assert set(private_names(Path(internals.__file__)))
    for path in sorted((ROOT / "torch_fused_linear").rglob("*.py")):
        if path != Path(internals.__file__):
            assert not list(private_names(path)), path


PRIVATE_HEADERS = r"<torch/csrc/(dynamo|autograd/(engine|graph_task))\b|<torch/csrc/.*compiled"


def test_no_other_file_includes_the_engine_or_the_compiled_one():
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        if path.stem != "torch_internals":
            assert not re.search(PRIVATE_HEADERS, path.read_text()), path


# --- modules and modes --------------------------------------------------------------------------


def test_global_hooks():
    assert not internals.has_any_global_hook()
    for register in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        hook = getattr(nn.modules.module, f"register_module_{register}_hook")(lambda *a: None)
        assert internals.has_any_global_hook()
        assert sum(map(len, internals.GLOBAL_HOOKS)) == 1, register
        hook.remove()
    assert not any(internals.GLOBAL_HOOKS)


def test_function_modes():
    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    assert internals.function_modes() == []
    with Watch() as first, Watch() as second:
        assert internals.function_modes() == [first, second]


# --- operators ----------------------------------------------------------------------------------


def test_kernels_of_operators():
    assert internals.has_kernel("fused::linear", "CPU")
    built = _library.build_info()["cuda"] is not None
    assert internals.has_kernel("fused::linear", "CUDA") == built


def test_schemas_of_aten():
    schemas = internals.aten_schemas()
    assert any(s.is_mutable for s in schemas["relu_"]) and not schemas["relu"][0].is_mutable
    assert [a.name for a in schemas["addmm"][0].arguments][:3] == ["self", "mat1", "mat2"]
    assert "append" not in schemas, "TorchScript's, of lists"


def test_numbers_for_two_dimensions():
    @torch.jit.script
    def pair(value: BroadcastingList2[int]):
        return value

    assert pair(3) == [3, 3] and pair([1, 2]) == [1, 2]


# --- the compiler; its caches are tested in tests/graph/test_fusion_inductor.py ------------------


def test_overlapped_collectives():
    assert not internals.overlaps_collectives()
    with torch._inductor.config.patch(_micro_pipeline_tp=True):
        assert internals.overlaps_collectives()


def test_forgetting_what_was_compiled(fresh_compiler):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def inner(x):
        return x + 1

    compiled = torch.compile(lambda x: inner(x), backend=backend)
    assert compiled(torch.zeros(())) == 1
    inner.__code__ = (lambda x: x + 2).__code__
    internals.forget_compiled()
    assert compiled(torch.zeros(())) == 2 and len(graphs) == 2


# --- TorchScript --------------------------------------------------------------------------------


def test_a_scripted_module_gets_a_class_of_its_own():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    copy = internals.copy_of_own_class(scripted._c)
    assert copy._type() != scripted._c._type()
    graph = next(internals.script_graphs(copy))
    kinds = [node.kind() for node in graph.nodes()]
    assert "aten::linear" in kinds and "prim::CallMethod" not in kinds
    first, second = (m.getattr("0").getattr("weight") for m in (copy, scripted._c))
    assert first.data_ptr() == second.data_ptr()


# --- distributed tensors ------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_hooks_of_tensor_parallelism_are_known(alone):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    layer = parallelize_module(nn.Linear(8, 8), alone, ColwiseParallel())
    assert internals.is_distributed_module(layer)
    (hook,) = layer._forward_hooks.values()
    given = internals.given_to_distribute_module(hook, "output_fn")
    assert isinstance(given, functools.partial)
    assert internals.prepares_output(given.func, "ColwiseParallel")
    assert not internals.prepares_output(given.func, "RowwiseParallel")
    assert internals.given_to_distribute_module(lambda *a: None, "output_fn") is None


def test_dtensor_asks_our_handler(alone):
    from torch.distributed.tensor import Replicate, distribute_tensor

    x = distribute_tensor(torch.ones(2, 4), alone, [Replicate()])
    with torch.no_grad():
        y = fused.mlp(x, [x, x.T.contiguous()], [None, None], "relu")
    assert torch.equal(y.to_local(), torch.full((2, 4), 8.0))


def test_fsdps_node_has_the_name_by_which_it_is_known():
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

    text = (ROOT / "csrc/core/torch_internals.h").read_text()
    assert f'"{RegisterPostBackwardFunction.__name__}Backward"' in text


# --- autograd, in C++ ---------------------------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "node_creation_hook"), reason="torch 2.14 and newer"
)
def test_who_watches_nodes_being_made_sees_ours():
    x, w, b = torch.randn(4, 16), torch.randn(16, 16, requires_grad=True), torch.randn(16)
    image, kernel = torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3, requires_grad=True)
    seen = []

    def watch(node):
        seen.append(node.name())

    for call in (
        lambda: fused.linear(x, w, b),
        lambda: fused.linear_relu(x, w, b),
        lambda: fused.linear_gelu(x, w, b, memory="low"),
        lambda: fused.mlp(x, [w, w], [b, b], "relu"),
        lambda: fused.linear_glu(x, w, w),
        lambda: fused.gated_mlp(x, w, w, w),
        lambda: fused.conv2d_relu(image, kernel),
    ):
        seen.clear()
        with torch.autograd.graph.node_creation_hook(watch):
            output = call()
        assert seen.count(output.grad_fn.name()) == 1


def two_layers():
    x, w = torch.randn(5, 8), [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    h = fused.linear_relu(x, w[0], None)
    return h, fused.linear(h, w[1], None)


@pytest.mark.parametrize(
    ("watched", "said"), [(False, "handed over"), (True, "its gradient was asked for")]
)
def test_what_a_run_was_asked_for(watched, said):
    h, y = two_layers()
    with tfl.explain() as report:
        if watched:
            torch.autograd.grad(y.sum(), [h])
        else:
            y.sum().backward()
    assert said in str(report)


def test_what_waits_for_the_end_of_a_run_goes_with_it():
    """A note that nobody took would hold its tensors."""
    h, y = two_layers()
    with pytest.raises(ZeroDivisionError):
        h.grad_fn.register_prehook(lambda grads: 1 / 0)
        y.sum().backward(retain_graph=True)
    assert torch.autograd.grad(y.sum(), [h])[0].shape == h.shape


def test_a_long_chain_of_nodes_is_taken_apart_without_recursion():
    w = torch.eye(2, requires_grad=True)
    h = torch.ones(1, 2)
    for _ in range(30_000):
        h = fused.linear(h, w, None)
    del h


def test_a_weight_that_asks_for_gradients_again_is_no_longer_packed():
    layer = tfl.FusedLinearReLU(128, 128).bfloat16().requires_grad_(False)
    assert tfl.pack_weights(layer) == 1
    layer.requires_grad_(True)
    layer(torch.ones(1, 128, dtype=torch.bfloat16)).sum().backward()
    layer.requires_grad_(False)
    assert tfl.unpack_weights(layer) == 0, "it was dropped"


@pytest.mark.cuda
def test_products_of_nine_in_bf16_are_torchs(cuda):
    try:
        torch.backends.cuda.matmul.fp32_precision = "bf16x9"
    except (RuntimeError, ValueError):
        pytest.skip("torch 2.15 and newer")
    try:
        x, w = torch.randn(64, 64, device=cuda), torch.randn(64, 64, device=cuda)
        with tfl.explain() as report:
            fused.linear_relu(x, w, None)
        assert "reference" in str(report)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
