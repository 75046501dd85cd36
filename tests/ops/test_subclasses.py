"""Tensors of classes of their own go the way of F.linear and the activation, with its result."""

import pytest
import torch
import torch.nn.functional as F
from helpers import one_thread  # noqa: F401
from layers import CHAIN, LINEAR
from operators import OPS, op_param
from places import MODES
from subclasses import Negated, Plain, Scaled
from torch import nn
from watching import operators_of

import torch_fused_linear as tfl

MODES = {**MODES, "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16)}
NOT_FUSED = "PyTorch's own (not fused)"
ROW = f"(no kernel: tensor subclass) + {NOT_FUSED}"
pytestmark = pytest.mark.usefixtures("fresh_compiler")
place_param = pytest.mark.parametrize("place", [0, 1, 2], ids=["input", "weight", "bias"])


def arguments():
    return [torch.randn(5, 4), torch.randn(6, 4), torch.randn(6)]


@op_param
@pytest.mark.parametrize("mode", MODES)
@place_param
def test_a_class_that_knows_atens_operators(place, mode, op):
    leaves = [a.requires_grad_() for a in arguments()]
    args = [*leaves[:place], Scaled(leaves.pop(place).detach()), *leaves[place:]]
    for call in (op.call, op.function):
        results = []
        for function in (call, op.eager):
            with MODES[mode]():
                y = function(*args)
            grads = torch.autograd.grad(y.sum(), leaves) if y.requires_grad else []
            results.append([y, *grads])
        torch.testing.assert_close(*results)
        node = results[0][0].grad_fn
        assert node is None or not node.name().startswith("fused"), "a node of ours"


@op_param
@place_param
def test_a_class_that_knows_torchs_functions(place, op):
    """Functions are seen as torch's own; an operator is handed to the class, as torch's are."""
    args = arguments()
    plain = list(args)
    want = op.act(-F.linear(*args))
    args[place] = args[place].as_subclass(Negated)
    torch.testing.assert_close(op.function(*args), want)
    with pytest.raises(TypeError, match="__torch_function__"):
        op.call(*args)
    args[place] = args[place].as_subclass(Plain)  # which adds nothing
    for call in (op.call, op.function):
        got = call(*args)
        assert type(got) is Plain
        torch.testing.assert_close(got.as_subclass(torch.Tensor), op.act(F.linear(*plain)))


@op_param
def test_compiled(op):
    x, w, b = arguments()
    for call in (op.call, op.function):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, Scaled(w), b), op.eager(x, Scaled(w), b))


def test_compiled_with_a_class_that_knows_torchs_functions():
    """Beside F.linear compiled, whose own result Dynamo may change."""
    x, w, b = arguments()
    w = w.as_subclass(Negated)
    got, want = (
        torch.compile(function, backend="eager", fullgraph=True)(x, w, b)
        for function in (tfl.linear_relu, lambda x, w, b: F.relu(F.linear(x, w, b)))
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("strict", [True, False])
def test_exported(strict):
    """Fake tensors, which stand for plain ones while a graph is traced, are a subclass, too."""
    layer, x = tfl.FusedLinearReLU(4, 6), torch.randn(5, 4)
    assert "fused.linear_relu" in str(torch.export.export(layer, (x,), strict=strict).graph)
    layer.weight = nn.Parameter(Scaled(layer.weight.detach()), requires_grad=False)
    program = torch.export.export(layer, (x,), strict=strict)
    assert "fused" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), layer(x))


def test_layers_chains_and_convolutions():
    image = torch.randn(2, 3, 8, 8)
    for row in (*LINEAR, *CHAIN):
        layer, x = row.make(), row.input()
        for module in [m for m in layer.modules() if isinstance(m, nn.Linear)]:
            module.weight = nn.Parameter(Scaled(module.weight.detach()), requires_grad=False)
        torch.testing.assert_close(layer(x), row.twin(layer)(x))
    layer = tfl.FusedConv2dReLU(3, 4, 3, padding="same")
    want = layer.to_unfused()(image * 2)
    torch.testing.assert_close(layer(Scaled(image)), want)
    given = Scaled(image), layer.weight, layer.bias, [1, 1], [1, 1]
    torch.testing.assert_close(torch.ops.fused.conv2d_relu(*given), want)


def test_explain_of_subclasses():
    x, w, b = arguments()
    fields = ("operator", "path", "dtype", "shapes", "device")
    for op in OPS:
        for call in (op.call, op.function):
            want = (op.name, ROW, "Float", "[5, 4] x [6, 4]", "cpu")
            assert operators_of(lambda call=call: call(x, Scaled(w), b), *fields) == [want]
    with tfl.explain() as report:
        for call in (tfl.mlp, torch.ops.fused.mlp):
            call(x, [Scaled(w), torch.randn(3, 6)], [b, None])
        torch.compile(tfl.linear_relu, backend="aot_eager")(x, Scaled(w), b)
    assert [row.operator for row in report.calls] == ["mlp"] * 2, "tracing runs nothing"


@pytest.mark.parametrize("functions", [tfl, torch.ops.fused])
def test_wrong_arguments_are_noticed(functions):
    x, w, _ = arguments()
    with pytest.raises(ValueError, match="memory must be 'default' or 'low', got 'less'"):
        functions.linear_relu(x, Scaled(w), memory="less")
    with pytest.raises(ValueError, match=r"activation must be 'relu', .*got 'swish'"):
        functions.mlp(x, [Scaled(w)], [None], "swish")
    with pytest.raises(ValueError, match="approximate must be 'tanh' or 'none', got 'erf'"):
        functions.linear_gelu(x, Scaled(w), approximate="erf")


def test_weights_quantised_by_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(tfl.FusedLinearReLU(32, 64), tfl.FusedLinearGELU(64, 32)).bfloat16()
    plain = nn.Sequential(*(m for layer in model for m in layer.to_unfused()))
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    for each in (model, plain):
        quantization.quantize_(each, quantization.Int8WeightOnlyConfig())
    assert type(model[0].weight) is not nn.Parameter
    assert operators_of(lambda: torch.testing.assert_close(model(x), plain(x)), "path") == [ROW] * 2
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x))
