"""ONNX files: standard operators only, and ONNX Runtime computes what eager does."""

import sys

import pytest
import torch
from helpers import one_thread  # noqa: F401
from operators import ODD, conv
from steps import arguments_of
from torch import nn

import torch_fused_linear as tfl

onnx = pytest.importorskip("onnx", reason="needs onnx")
pytest.importorskip("onnxscript", reason="needs onnxscript")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


class Stacked(nn.Linear):
    """Gate and up in one weight."""

    def forward(self, x):
        return tfl.linear_glu(x, self.weight, None, self.bias, activation="relu")


def network(dtype=torch.float32, others=True):
    torch.manual_seed(0)
    layers = [
        tfl.FusedLinearReLU(6, 9),
        tfl.FusedLinearReLU(9, 8, bias=False, memory="low"),
        tfl.FusedLinearGELU(8, 8, memory="low"),
        tfl.FusedLinearGELU(8, 7, approximate="none", bias=False),
        tfl.FusedLinear(7, 8),
        tfl.FusedMLP(8, 9, 8),
        tfl.FusedMLP(8, 9, 8, activation="gelu_erf", bias=False),
        tfl.FusedMLP(8, 9, 5, activation="gelu_tanh", memory="low"),
        tfl.FusedGatedMLP(5, 8),
        tfl.FusedGatedMLP(5, 8, bias=True, activation="gelu_erf"),
        tfl.FusedLinear(5, 3, bias=False),
    ]
    if others:
        layers += [tfl.FusedLinearSiLU(3, 4, memory="low"), tfl.FusedLinearReLU2(4, 4)]
        layers += [tfl.FusedMLP(4, 9, 4, activation="relu2"), Stacked(4, 6)]
    return nn.Sequential(*layers).eval().to(dtype)


def to_file(model, x, path, opset=20, dynamic=True):
    torch.onnx.export(
        model,
        (x,),
        path,
        dynamo=True,
        opset_version=opset,
        dynamic_shapes=({0: "tokens"},) if dynamic and x.dim() > 1 else None,
        custom_translation_table=tfl.onnx_translation_table(opset),
        verbose=False,
    )
    onnx.checker.check_model(path, full_check=True)
    return onnx.load(path)


def run(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
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


class Operator(nn.Module):
    """The convolution by itself, with as many arguments as are given."""

    def __init__(self, op, bias, dtype, arguments=None):
        super().__init__()
        case = op.case(dtype=dtype, bias=bias)
        if arguments is None:
            arguments = arguments_of(op, case.inputs)[0][3:]
        self.x, self.arguments = case.x, arguments
        self.weight = nn.Parameter(case.w)
        self.bias = nn.Parameter(case.b) if bias else None

    def forward(self, x):
        return torch.ops.fused.conv2d_relu(x, self.weight, self.bias, *self.arguments)


FEW = ["plain", "no batch", "groups, strided, dilated"]


@pytest.mark.parametrize(
    "odd, bias, dtype",
    [
        *((odd, True, torch.float32) for odd in ODD),
        *((odd, False, dtype) for odd in FEW for dtype in (torch.float32, torch.float16)),
    ],
)
def test_convolutions(odd, bias, dtype, tmp_path):
    """Every geometry of the tests of the operator, also without a batch."""
    model = Operator(ODD[odd], bias, dtype).eval()
    batched = model.x.dim() == 4
    proto = to_file(model, model.x, tmp_path / "model.onnx", 18, batched)
    kinds = [node.op_type for node in proto.graph.node if node.op_type != "Constant"]
    around = [[], []] if batched else [["Unsqueeze"], ["Squeeze"]]
    assert kinds == [*around[0], "Conv", *around[1], "Relu"]
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float16 else {"rtol": 1e-4}
    tolerance = {"atol": 1e-5, **tolerance}
    for batch in (1, 5) if batched else ():
        x = torch.randn(batch, *model.x.shape[1:]).to(dtype)
        torch.testing.assert_close(run(tmp_path / "model.onnx", x), model(x), **tolerance)
    torch.testing.assert_close(run(tmp_path / "model.onnx", model.x), model(model.x), **tolerance)


GIVEN = [(), ([2],), ([2, 1], [1]), ([2, 1], [1, 2], [2]), ([1, 1], [0, 0], [1, 1], 2)]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_arguments_of_a_convolution_that_are_left_out(given, tmp_path):
    op = conv(groups=given[3] if len(given) == 4 else 1)
    model = Operator(op, True, torch.float32, given).eval()
    to_file(model, model.x, tmp_path / "model.onnx")
    torch.testing.assert_close(
        run(tmp_path / "model.onnx", model.x), model(model.x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("padding", ["same", "valid", 1])
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_convolution_layers_with_every_padding(mode, padding, tmp_path):
    layers = [
        tfl.FusedConv2dReLU(3, 8, (2, 3), padding=padding, padding_mode=mode),
        tfl.FusedConv2dReLU(8, 6, 3, stride=2, groups=2, bias=False),
        nn.Flatten(),
    ]
    model, path = nn.Sequential(*layers).eval(), tmp_path / "model.onnx"
    proto = to_file(model, torch.randn(2, 3, 9, 8), path)
    assert [node.op_type for node in proto.graph.node].count("Conv") == 2
    x = torch.randn(7, 3, 9, 8)
    torch.testing.assert_close(run(path, x), model(x), rtol=1e-4, atol=1e-5)


def test_matrices_become_gemm_and_gelu_one_operator(tmp_path):
    proto = to_file(network(others=False), torch.randn(5, 6), tmp_path / "model.onnx")
    gated = {"MatMul", "Transpose", "Sigmoid", "Mul"}  # of what follows the shape is not known yet
    assert {node.op_type for node in proto.graph.node} - gated == {"Gemm", "Relu", "Gelu"}


def test_wrong_use_says_so(monkeypatch):
    with pytest.raises(ValueError, match="opset_version must be 18 or more, got 17"):
        tfl.onnx_translation_table(17)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"needs onnxscript.*pip install onnx onnxscript"):
        tfl.onnx_translation_table()
