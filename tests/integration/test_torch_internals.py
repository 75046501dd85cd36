"""The private parts of torch that we use still mean what we think they mean.

The tests of what uses the rest hold it: of function modes tests/fuse, of DTensor and of plans of
parallelism tests/distributed, of schemas tests/graph, of runs of the engine tests/autograd, of what
was compiled and of scripted modules tests/fuse.
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import one_thread  # noqa: F401
from operators import CHAINS, CONV, GATED, LOW, OPS
from processes import ROOT
from torch import nn

import torch_fused_linear as tfl
from torch_fused_linear._support import library
from torch_fused_linear._support import torch_internals as internals
from torch_fused_linear._support.torch_internals import BroadcastingList2
from torch_fused_linear._support.when_imported import when_imported

fused = torch.ops.fused


def private_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        # what lies in torch.ops.fused is ours
        names = [name for name in names if "torch.ops." not in name]
        yield from (name for name in names if re.match(r"torch(\.\w+)*\._[a-z]", name))


def test_no_other_module_takes_private_names_of_torch():
    assert set(private_names(Path(internals.__file__)))
    for path in sorted((ROOT / "torch_fused_linear").rglob("*.py")):
        if path != Path(internals.__file__):
            assert not list(private_names(path)), path


def test_no_other_file_includes_the_engine_or_the_compiled_one():
    private = r"<torch/csrc/(dynamo|autograd/(engine|graph_task))\b|<torch/csrc/.*compiled"
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        if path.stem != "torch_internals":
            assert not re.search(private, path.read_text()), path


def test_global_hooks():
    assert not internals.has_any_global_hook()
    for register in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        hook = getattr(nn.modules.module, f"register_module_{register}_hook")(lambda *a: None)
        assert internals.has_any_global_hook()
        assert sum(map(len, internals.GLOBAL_HOOKS)) == 1, register
        hook.remove()
    assert not any(internals.GLOBAL_HOOKS)


def test_kernels_of_operators():
    assert internals.has_kernel("fused::linear", "CPU")
    built = library.build_info()["cuda"] is not None
    assert internals.has_kernel("fused::linear", "CUDA") == built


def test_numbers_for_two_dimensions():
    @torch.jit.script
    def pair(value: BroadcastingList2[int]):
        return value

    assert pair(3) == [3, 3] and pair([1, 2]) == [1, 2]


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "node_creation_hook"), reason="torch 2.14 and newer"
)
def test_node_creation_hooks_see_our_nodes():
    for op in [*OPS, *LOW, *GATED, *CHAINS, CONV]:
        leaves, seen = op.case().leaves(), []
        with torch.autograd.graph.node_creation_hook(
            lambda node, seen=seen: seen.append(node.name())
        ):
            output = op.call(*leaves)
        assert seen.count(output.grad_fn.name()) == 1, op


def test_a_long_chain_of_nodes_is_taken_apart_without_recursion():
    w = torch.eye(2, requires_grad=True)
    h = torch.ones(1, 2)
    for _ in range(30_000):
        h = fused.linear(h, w, None)
    del h


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


def test_registration_waits_until_a_module_has_run(tmp_path, monkeypatch):
    """Not for whoever only asks where it is, nor for an import that fails."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    registered, path = [], tmp_path / "imported_late.py"
    when_imported("imported_late", lambda: registered.append(sys.modules["imported_late"].value))
    path.write_text("raise RuntimeError")
    for _ in range(2):
        assert importlib.util.find_spec("imported_late").origin == str(path)
    with pytest.raises(RuntimeError):
        importlib.import_module("imported_late")
    assert not registered
    path.write_text("value = 1")
    module = importlib.import_module("imported_late")
    assert registered == [1]
    importlib.reload(module)
    assert registered == [1]
