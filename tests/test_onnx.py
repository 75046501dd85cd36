"""ONNX files: standard operators only, and ONNX Runtime computes what eager does."""

import sys

import pytest
import torch
from helpers import one_thread  # noqa: F401
from torch import nn

import torch_fused_linear as tfl

onnx = pytest.importorskip("onnx", reason="needs onnx")
pytest.importorskip("onnxscript", reason="needs onnxscript")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [
        tfl.FusedLinearReLU(6, 9),
        tfl.FusedLinearReLU(9, 8, bias=False),
        tfl.FusedLinearGELU(8, 8),
        tfl.FusedLinearGELU(8, 7, approximate="none", bias=False),
        tfl.FusedLinear(7, 8),
        tfl.FusedMLP(8, 9, 8),
        tfl.FusedMLP(8, 9, 8, activation="gelu_erf", bias=False),
        tfl.FusedMLP(8, 9, 5, activation="gelu_tanh"),
        tfl.FusedLinear(5, 3, bias=False),
    ]
    return nn.Sequential(*layers).eval().to(dtype)


def to_file(model, x, path, opset=20):
    torch.onnx.export(
        model,
        (x,),
        path,
        dynamo=True,
        opset_version=opset,
        dynamic_shapes=({0: "tokens"},) if x.dim() > 1 else None,
        custom_translation_table=tfl.onnx_translation_table(opset),
        verbose=False,
    )
    onnx.checker.check_model(path, full_check=True)
    return onnx.load(path)


def run(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvide"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(y)


CASES = [
    *((lead, 20, torch.float32) for lead in [(5,), (4, 3), (2, 3, 4), ()]),
    ((5,), 18, torch.float32),
    ((4, 3), 18, torch.float16),
    ((5,), 20, torch.float16),
]


@pytest.mark.parametrize("lead, opset, dtype", CASES)
def test_onnxruntime_equals_eager(lead, opset, dtype, tmp_path):
    model, path = network(dtype), tmp_path / "model.onnx"
    proto = to_file(model, torch.randn(*lead, 6).to(dtype), path, opset)
    assert {node.domain for node in proto.graph.node} <= {""} and not proto.functions
    assert [o.version for o in proto.opset_import if o.domain == ""] == [opset]
    for tokens in (lead[:1] and (2, 17)) or (0,):
        x = torch.randn(*((tokens, *lead[1:]) if lead else ()), 6).to(dtype)
        tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {}
        torch.testing.assert_close(run(path, x), model(x), **tolerance)


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("chain", [False, True])
def test_gelu_keeps_its_kind(chain, approximate, opset, tmp_path):
    """The two differ by up to 5e-4 where rounding makes 1e-6."""
    model = tfl.FusedLinearGELU(1, 1, approximate=approximate)
    if chain:
        name = {"tanh": "gelu_tanh", "none": "gelu_erf"}[approximate]
        model = tfl.FusedMLP(1, 1, 1, activation=name)
    for parameter in model.parameters():
        nn.init.constant_(parameter, float(parameter.dim() == 2))
    x = torch.linspace(-6, 6, 501).unsqueeze(1)
    to_file(model.eval(), x, tmp_path / "model.onnx", opset)
    want = nn.functional.gelu(x, approximate=approximate)
    torch.testing.assert_close(run(tmp_path / "model.onnx", x), want, rtol=1e-5, atol=2e-6)


def test_matrices_become_gemm_and_gelu_one_operator(tmp_path):
    proto = to_file(network(), torch.randn(5, 6), tmp_path / "model.onnx")
    assert {node.op_type for node in proto.graph.node} == {"Gemm", "Relu", "Gelu"}


def test_wrong_use_says_so(monkeypatch):
    with pytest.raises(ValueError, match="opset_version must be 18 or more, got 17"):
        tfl.onnx_translation_table(17)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"needs onnxscript.*pip install onnx onnxscript"):
        tfl.onnx_translation_table()
