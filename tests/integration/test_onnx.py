"""ONNX files: standard operators only, and ONNX Runtime computes what eager does."""

import sys

import pytest
import torch
from helpers import one_thread  # noqa: F401
from networks import batch, network
from operators import EVERY, ODD, conv
from torch import nn

import torch_fused_linear as tfl

onnx = pytest.importorskip("onnx", reason="needs onnx")
pytest.importorskip("onnxscript", reason="needs onnxscript")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


def to_file(model, given, path, opset, dynamic):
    torch.onnx.export(
        model.eval(),
        (given,),
        path,
        dynamo=True,
        opset_version=opset,
        dynamic_shapes=(dynamic,),
        custom_translation_table=tfl.onnx_translation_table(opset),
        verbose=False,
    )
    onnx.checker.check_model(path, full_check=True)
    proto = onnx.load(path)
    assert {node.domain for node in proto.graph.node} <= {""} and not proto.functions
    assert [o.version for o in proto.opset_import if o.domain == ""] == [opset]
    return [node.op_type for node in proto.graph.node]


def assert_equals_eager(path, given, want, **tolerance):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    got = session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})
    torch.testing.assert_close([*map(torch.from_numpy, got)], want, **tolerance)


@pytest.mark.parametrize(
    "name, lead, opset, dtype",
    [
        *(("vectors", lead, 20, torch.float32) for lead in [(5,), (4, 3), (2, 3, 4), ()]),
        ("low memory", (4, 3), 18, torch.float16),
        ("images", (4,), 18, torch.float16),
        ("images", (4,), 20, torch.float32),
    ],
)
def test_networks(name, lead, opset, dtype, tmp_path):
    model, path = network(name, dtype=dtype), tmp_path / "model.onnx"
    dynamic = {0: "tokens"} if lead else None
    kinds = to_file(model, batch(name, *lead, dtype=dtype), path, opset, dynamic)
    if (name, lead) == ("vectors", (5,)):
        assert kinds.count("Gemm") >= 11 and kinds.count("Gelu") == 5 and "Erf" not in kinds
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {}
    for size in [(2, *lead[1:]), (17, *lead[1:])] if lead else [()]:
        x = batch(name, *size, dtype=dtype)
        assert_equals_eager(path, [x], [model(x)], **tolerance)


class Operators(nn.Module):
    """Calls beside each other, each with an input and parameters of its own."""

    def __init__(self, calls, cases):
        super().__init__()
        self.calls = calls
        self.given = nn.ModuleList(nn.ParameterList(case.inputs[1:]) for case in cases)

    def forward(self, xs):
        return [call(x, *given) for call, x, given in zip(self.calls, xs, self.given)]


# Arguments of a convolution, of which the others are left out.
GIVEN = [(), ([2],), ([2, 1], [1]), ([2, 1], [1, 2], [2]), ([1, 1], [0, 0], [1, 1], 2)]


def convolution(given):
    return lambda x, w, b: torch.ops.fused.conv2d_relu(x, w, b, *given)


@pytest.mark.parametrize("bias, opset", [(True, 18), (False, 20)])
def test_every_operator(bias, opset, tmp_path):
    """The two GELUs differ by up to 5e-4 where rounding makes 1e-6."""
    ops = [*EVERY, *ODD.values()]
    calls = [op.call for op in ops]
    if bias:
        calls += map(convolution, GIVEN)
        ops += [conv(groups=given[3] if len(given) == 4 else 1) for given in GIVEN]
    cases = [op.case((33,), dtype=torch.float32, bias=bias) for op in ops]
    model, xs = Operators(calls, cases), [case.x for case in cases]
    batched = [x.dim() != 3 for x in xs]
    dynamic = [{0: f"rows{k}"} if found else None for k, found in enumerate(batched)]
    kinds = to_file(model, xs, tmp_path / "model.onnx", opset, dynamic)
    assert ("Gelu" in kinds) == (opset == 20)
    for rows in (1, 5):
        xs = [torch.randn(rows, *x.shape[1:]) if found else x for x, found in zip(xs, batched)]
        assert_equals_eager(tmp_path / "model.onnx", xs, model(xs), rtol=1e-4, atol=1e-5)


def test_wrong_use_says_so(monkeypatch):
    with pytest.raises(ValueError, match="opset_version must be 18 or more, got 17"):
        tfl.onnx_translation_table(17)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"needs onnxscript.*pip install onnx onnxscript"):
        tfl.onnx_translation_table()
