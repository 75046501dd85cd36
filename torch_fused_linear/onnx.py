"""Our operators in ONNX, for ``torch.onnx.export(..., dynamo=True)``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .activations import ACTIVATIONS

# What torch.onnx.export writes unless told otherwise.
_DEFAULT_OPSET = 20


def onnx_translation_table(opset_version: int = _DEFAULT_OPSET) -> dict[Any, Callable]:
    """How ``torch.onnx.export`` is to write the fused operators.

    ::

        torch.onnx.export(
            model.eval(),
            (x,),
            "model.onnx",
            dynamo=True,
            dynamic_shapes=({0: "tokens"},),
            custom_translation_table=torch_fused_linear.onnx_translation_table(),
        )

    The file holds standard ONNX only, no operators of ours: ``Gemm``, or ``MatMul`` and ``Add``,
    then ``Relu``, ``Gelu`` or ``Sigmoid`` and ``Mul``; ``Conv``, then ``Relu``. Before opset 20,
    which brought ``Gelu``, its formula is written out (of the kind that was asked for); ONNX
    Runtime puts it together again.

    Args:
        opset_version: the one that ``torch.onnx.export`` is called with; at least 18.

    Returns:
        For each operator the function that writes it.

    Raises:
        ImportError: onnxscript, which the exporter needs as well, is not installed.
        ValueError: ``opset_version`` is below 18.
    """
    try:
        import onnxscript
    except ImportError as error:
        raise ImportError(
            "torch_fused_linear.onnx_translation_table needs onnxscript, as the exporter does: "
            "pip install onnx onnxscript"
        ) from error
    if opset_version < 18:
        raise ValueError(
            f"onnx_translation_table: opset_version must be 18 or more, got {opset_version}"
        )
    return _make_table(onnxscript, has_gelu=opset_version >= 20)


def _make_table(onnxscript, has_gelu: bool) -> dict[Any, Callable]:
    op, newer = onnxscript.opset18, onnxscript.opset20

    def is_matrix(x) -> bool:
        return x.shape is not None and len(x.shape) == 2

    def product(input, weight, bias, gemm: bool):
        if gemm:
            return op.Gemm(input, weight, bias, transB=1)
        result = op.MatMul(input, op.Transpose(weight, perm=[1, 0]))
        return result if bias is None else op.Add(result, bias)

    def gelu(x, approximate: str):
        if has_gelu:
            return newer.Gelu(x, approximate=approximate)

        def number(value: float):
            return op.CastLike(op.Constant(value_float=value), x)

        if approximate == "tanh":
            cube = op.Mul(number(0.044715), op.Pow(x, number(3.0)))
            bracket = op.Tanh(op.Mul(number(math.sqrt(2 / math.pi)), op.Add(x, cube)))
        else:
            bracket = op.Erf(op.Div(x, number(math.sqrt(2))))
        return op.Mul(x, op.Mul(number(0.5), op.Add(bracket, number(1.0))))

    def silu(x):
        return op.Mul(x, op.Sigmoid(x))

    def activate(x, activation: str):
        approximate = ACTIVATIONS[activation].approximate
        if approximate is not None:
            return gelu(x, approximate)
        return op.Relu(x) if activation == "relu" else silu(x)

    def convolution(input, weight, bias, stride, padding, dilation, groups):
        def pair(numbers):
            return [numbers[0], numbers[-1]]

        return op.Conv(
            input,
            weight,
            bias,
            strides=pair(stride),
            pads=2 * pair(padding),  # above and to the left, then below and to the right
            dilations=pair(dilation),
            group=groups,
        )

    # The exporter tells tensors from attributes by the annotations, which must be objects.
    def linear(input, weight, bias=None):
        return product(input, weight, bias, is_matrix(input))

    # What is kept for a backward is no matter here.
    def linear_relu(input, weight, bias=None, memory="default"):
        return op.Relu(product(input, weight, bias, is_matrix(input)))

    def linear_gelu(input, weight, bias=None, approximate="tanh", memory="default"):
        return gelu(product(input, weight, bias, is_matrix(input)), approximate)

    def linear_silu(input, weight, bias=None, memory="default"):
        return silu(product(input, weight, bias, is_matrix(input)))

    def mlp(input, weights, biases, activation, memory="default"):
        gemm = is_matrix(input)  # of what follows the shape is not known yet
        for weight, bias in zip(weights[:-1], biases[:-1]):
            input = activate(product(input, weight, bias, gemm), activation)
        return product(input, weights[-1], biases[-1], gemm)

    def glu(input, gate, up, gate_bias, up_bias, activation: str):
        gemm = is_matrix(input)
        first = product(input, gate, gate_bias, gemm)
        if up is None:
            first, second = op.Split(first, axis=-1, num_outputs=2)
        else:
            second = product(input, up, up_bias, gemm)
        return op.Mul(activate(first, activation), second)

    def linear_glu(
        input, gate, up=None, gate_bias=None, up_bias=None, activation="silu", memory="default"
    ):
        return glu(input, gate, up, gate_bias, up_bias, activation)

    def gated_mlp(
        input,
        gate,
        up,
        down,
        gate_bias=None,
        up_bias=None,
        down_bias=None,
        activation="silu",
        memory="default",
    ):
        hidden = glu(input, gate, up, gate_bias, up_bias, activation)
        return product(hidden, down, down_bias, is_matrix(input))

    def conv2d_relu(
        input, weight, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1
    ):
        geometry = stride, padding, dilation, groups
        if input.shape is None or len(input.shape) == 4:
            return op.Relu(convolution(input, weight, bias, *geometry))
        first = op.Constant(value_ints=[0])  # an image is a batch of one
        image = op.Unsqueeze(input, first)
        return op.Relu(op.Squeeze(convolution(image, weight, bias, *geometry), first))

    tensor = onnxscript.onnx_types.TensorType
    one = {"input": tensor, "weight": tensor, "bias": tensor | None}
    linear.__annotations__ = one
    linear_relu.__annotations__ = {**one, "memory": str}
    linear_silu.__annotations__ = {**one, "memory": str}
    linear_gelu.__annotations__ = {**one, "approximate": str, "memory": str}
    numbers = dict.fromkeys(("stride", "padding", "dilation"), Sequence[int])
    conv2d_relu.__annotations__ = {**one, **numbers, "groups": int}
    mlp.__annotations__ = {
        "input": tensor,
        "weights": Sequence[tensor],
        "biases": Sequence[tensor | None],
        "activation": str,
        "memory": str,
    }
    optional = dict.fromkeys(("up", "gate_bias", "up_bias", "down_bias"), tensor | None)
    gated = {"input": tensor, "gate": tensor, "down": tensor, **optional}
    gated |= {"activation": str, "memory": str}
    for function in (linear_glu, gated_mlp):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        function.__annotations__ = {name: gated[name] for name in names}
    fused = torch.ops.fused
    return {
        fused.linear.default: linear,
        fused.linear_relu.default: linear_relu,
        fused.linear_gelu.default: linear_gelu,
        fused.linear_silu.default: linear_silu,
        fused.mlp.default: mlp,
        fused.linear_glu.default: linear_glu,
        fused.gated_mlp.default: gated_mlp,
        fused.conv2d_relu.default: conv2d_relu,
    }
