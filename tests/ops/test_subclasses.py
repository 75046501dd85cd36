"""Tensors of classes of their own go the way of F.linear and the activation, with its result."""

import contextlib
import os

import pytest
import torch
import torch.nn.functional as F
from helpers import one_thread  # noqa: F401
from operators import op_param
from subclasses import Negated, Plain, Scaled
from torch import nn

import torch_fused_linear as tfl

FUNCTIONS = {
    "none": tfl.linear,
    "relu": tfl.linear_relu,
    "gelu_tanh": tfl.linear_gelu,
    "gelu_erf": lambda *args: tfl.linear_gelu(*args, approximate="none"),
    "silu": tfl.linear_silu,
    "relu2": tfl.linear_relu2,
}
MODES = {
    "gradients": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "eager": lambda: tfl.set_policy("eager"),
}
ROW = "(no kernel: tensor subclass) + reference"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    torch._dynamo.reset()


def arguments():
    return [torch.randn(5, 4), torch.randn(6, 4), torch.randn(6)]


@op_param
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["input", "weight", "bias"])
def test_a_class_that_knows_atens_operators(place, mode, op):
    args = arguments()
    args[place] = Scaled(args[place])
    with MODES[mode]():
        want = op.eager(*args)
        for call in (op.call, FUNCTIONS[op.activation]):
            torch.testing.assert_close(call(*args), want)


@op_param
@pytest.mark.parametrize("place", [0, 1, 2], ids=["input", "weight", "bias"])
def test_a_class_that_knows_torchs_functions(place, op):
    """Functions are seen as torch's own; an operator is handed to the class, as torch's are."""
    args = arguments()
    want = op.act(-F.linear(*args))
    args[place] = args[place].as_subclass(Negated)
    torch.testing.assert_close(FUNCTIONS[op.activation](*args), want)
    with pytest.raises(TypeError, match="__torch_function__"):
        op.call(*args)


@op_param
def test_a_class_that_adds_nothing(op):
    args = arguments()
    want = op.eager(*args)
    args[0] = args[0].as_subclass(Plain)
    for call in (op.call, FUNCTIONS[op.activation]):
        got = call(*args)
        assert type(got) is Plain
        torch.testing.assert_close(got.as_subclass(torch.Tensor), want)


@op_param
def test_gradients(op):
    x, w, b = (a.requires_grad_() for a in arguments())
    for call in (op.call, FUNCTIONS[op.activation]):
        results = []
        for function in (call, op.eager):
            y = function(x, Scaled(w.detach()), b)
            results.append([y, *torch.autograd.grad(y.sum(), [x, b])])
        for got, want in zip(*results):
            torch.testing.assert_close(got, want)
        assert not results[0][0].grad_fn.name().startswith("fused"), "a node of ours"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@op_param
def test_compiled(op, backend):
    x, w, b = arguments()
    for call in (op.call, FUNCTIONS[op.activation]):
        compiled = torch.compile(call, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, Scaled(w), b), op.eager(x, Scaled(w), b))


def test_compiled_with_a_class_that_knows_torchs_functions():
    """Beside F.linear compiled, whose own result Dynamo may change."""
    x, w, b = arguments()
    w = w.as_subclass(Negated)

    def plain(x, w, b):
        return F.relu(F.linear(x, w, b))

    got, want = (
        torch.compile(function, backend="eager", fullgraph=True)(x, w, b)
        for function in (tfl.linear_relu, plain)
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("strict", [True, False])
def test_exported(strict):
    layer = tfl.FusedLinearReLU(4, 6)
    layer.weight = nn.Parameter(Scaled(layer.weight.detach()), requires_grad=False)
    x = torch.randn(5, 4)
    program = torch.export.export(layer, (x,), strict=strict)
    assert "fused" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), layer(x))


def test_plain_tensors_are_exported_as_the_operator():
    """What stands for a plain tensor while a graph is traced is of a class of its own, too."""
    for strict in (True, False):
        program = torch.export.export(
            tfl.FusedLinearReLU(4, 6), (torch.randn(5, 4),), strict=strict
        )
        assert "fused.linear_relu" in str(program.graph)


def test_layers_chains_and_convolutions():
    x, image = torch.randn(5, 4), torch.randn(2, 3, 8, 8)
    for layer in (tfl.FusedLinearGELU(4, 6), tfl.FusedLinear(4, 6), tfl.FusedMLP(4, 6, 3)):
        plain = layer.to_sequential() if isinstance(layer, tfl.FusedMLP) else layer.to_unfused()
        for module in (m for m in layer.modules() if isinstance(m, nn.Linear)):
            weight = nn.Parameter(Scaled(module.weight.detach()), requires_grad=False)
            for holder in (m for m in [*plain.modules(), module] if hasattr(m, "weight")):
                if holder is module or holder.weight is module.weight:
                    holder.weight = weight
        torch.testing.assert_close(layer(x), plain(x))
    layer = tfl.FusedConv2dReLU(3, 4, 3, padding="same")
    want = layer.to_unfused()(image * 2)
    torch.testing.assert_close(layer(Scaled(image)), want)
    torch.testing.assert_close(
        torch.ops.fused.conv2d_relu(Scaled(image), layer.weight, layer.bias, [1, 1], [1, 1]), want
    )


def test_what_explain_says():
    x, w, b = arguments()
    calls = {
        "linear": (tfl.linear, torch.ops.fused.linear),
        "linear_relu": (tfl.linear_relu, torch.ops.fused.linear_relu),
        "linear_gelu": (tfl.linear_gelu, torch.ops.fused.linear_gelu),
    }
    for name, functions in calls.items():
        for function in functions:
            with tfl.explain() as report:
                function(x, Scaled(w), b)
            (row,) = report.calls
            assert (row.operator, row.path, row.dtype) == (name, ROW, "Float")
            assert (row.shapes, row.device) == ("[5, 4] x [6, 4]", "cpu")
    with tfl.explain() as report:
        tfl.mlp(x, [Scaled(w), torch.randn(3, 6)], [b, None])
        torch.compile(tfl.linear_relu, backend="aot_eager")(x, Scaled(w), b)
    assert [row.operator for row in report.calls] == ["mlp"], "tracing runs nothing"


def test_wrong_arguments_are_noticed():
    x, w, _ = arguments()
    for call in (tfl.linear_relu, torch.ops.fused.linear_relu):
        with pytest.raises(ValueError, match="memory must be 'default' or 'low', got 'less'"):
            call(x, Scaled(w), memory="less")
    for call in (tfl.mlp, torch.ops.fused.mlp):
        with pytest.raises(ValueError, match=r"activation must be 'relu', .*got 'swish'"):
            call(x, [Scaled(w)], [None], "swish")
    for call in (tfl.linear_gelu, torch.ops.fused.linear_gelu):
        with pytest.raises(RuntimeError, match="approximate"):
            call(x, Scaled(w), approximate="erf")


def test_modes_see_the_operator():
    """A mode is not a subclass: plain tensors under it run the operator."""
    with torch.device("cpu"), tfl.explain() as report:
        tfl.linear_relu(*arguments())
    assert [row.path for row in report.calls] == ["reference"]


@pytest.fixture
def mesh():
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch has no distributed package")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@op_param
def test_distributed_tensors(op, mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    x, w, b = arguments()
    weight = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
    bias = distribute_tensor(b, mesh, [Shard(0)])
    input = distribute_tensor(x, mesh, [Replicate()])
    for call in (op.call, FUNCTIONS[op.activation]):
        y = call(input, weight, bias)
        assert isinstance(y, DTensor) and y.placements == op.eager(input, weight, bias).placements
        torch.testing.assert_close(y.full_tensor(), op.eager(x, w, b))
        (gradient,) = torch.autograd.grad(y.sum(), weight)
        want = w.clone().requires_grad_()
        torch.testing.assert_close(
            gradient.full_tensor(), torch.autograd.grad(op.eager(x, want, b).sum(), want)[0]
        )


def test_weights_quantised_by_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(tfl.FusedLinearReLU(32, 64), tfl.FusedLinearGELU(64, 32)).bfloat16()
    plain = nn.Sequential(*(m for layer in model for m in layer.to_unfused()))
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    for each in (model, plain):
        quantization.quantize_(each, quantization.Int8WeightOnlyConfig())
    assert type(model[0].weight) is not nn.Parameter
    with tfl.explain() as report:
        torch.testing.assert_close(model(x), plain(x))
    assert [row.path for row in report.calls] == [ROW, ROW]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x))
