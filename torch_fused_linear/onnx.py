"""The operators' translation for ``torch.onnx.export(..., dynamo=True)``."""

import math
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch

from .activations import ACTIVATIONS, OPERATORS, of_operator


def onnx_translation_table(opset_version: int = 20) -> dict[Any, Callable]:
    """Returns the table by which ``torch.onnx.export`` writes the fused operators.

    The file holds standard ONNX operators only: ``Gemm``, or ``MatMul`` and ``Add``, followed by
    ``Relu``, ``Relu`` and ``Mul``, ``Gelu``, or ``Sigmoid`` and ``Mul``; ``Conv``, followed by
    ``Relu``. ``Gelu`` came with opset 20. Before it the formula of the requested form is written
    out, and ONNX Runtime fuses it again.

    Args:
        opset_version: the opset that ``torch.onnx.export`` is called with, 20 if with none; at
            least 18.

    Returns:
        For each operator the function that writes it, for ``custom_translation_table``.

    Raises:
        ImportError: onnxscript, which the exporter needs as well, is not installed.
        ValueError: ``opset_version`` is below 18.

    Examples::

        >>> # needs onnxscript
        >>> table = onnx_translation_table()
        >>> torch.ops.fused.linear_relu.default in table
        True
    """
    try:
        import onnxscript
    except ImportError as error:
        needs = "needs onnxscript, as the exporter does: pip install onnx onnxscript"
        raise ImportError(f"torch_fused_linear.onnx_translation_table {needs}") from error
    if opset_version < 18:
        got = f"got {opset_version}"
        raise ValueError(f"onnx_translation_table: opset_version must be 18 or more, {got}")
    write = _Operators(onnxscript, has_gelu=opset_version >= 20)
    writers = {name: write.layer(name) for name in OPERATORS}
    writers |= {"linear": write.linear, "mlp": write.mlp, "conv2d_relu": write.conv2d_relu}
    writers |= {"linear_glu": write.linear_glu, "gated_mlp": write.gated_mlp}
    tensor = onnxscript.onnx_types.TensorType
    types = {"Tensor": tensor, "Optional[Tensor]": tensor | None, "str": str, "int": int}
    types |= {"List[Tensor]": Sequence[tensor], "List[Optional[Tensor]]": Sequence[tensor | None]}
    types |= {"List[int]": Sequence[int]}
    ops = {name: getattr(torch.ops.fused, name).default for name in writers}
    return {op: _with_annotations(writers[name], op, types) for name, op in ops.items()}


def _with_annotations(writer: Callable, op, types: dict[str, Any]) -> Callable:
    """Gives a writer the signature by which the exporter tells tensors from attributes."""
    parameters = []
    for argument in op._schema.arguments:
        default = argument.default_value if argument.has_default_value() else Parameter.empty
        kind, type_ = Parameter.POSITIONAL_OR_KEYWORD, types[str(argument.type)]
        parameters.append(Parameter(argument.name, kind, default=default, annotation=type_))

    signature = Signature(parameters)

    def written(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return writer(**given.arguments)

    written.__signature__ = signature
    written.__annotations__ = {p.name: p.annotation for p in parameters}
    return written


class _Operators:
    """The functions that write the operators. ``memory`` changes nothing in a forward."""

    def __init__(self, onnxscript, has_gelu: bool) -> None:
        self.op, self.newer = onnxscript.opset18, onnxscript.opset20
        self.has_gelu = has_gelu

    def _product(self, input, weight, bias, is_matrix: bool):
        if is_matrix:
            return self.op.Gemm(input, weight, bias, transB=1)
        result = self.op.MatMul(input, self.op.Transpose(weight, perm=[1, 0]))
        return result if bias is None else self.op.Add(result, bias)

    def _activate(self, x, name: str):
        if (approximate := ACTIVATIONS[name].approximate) is not None:
            return self._gelu(x, approximate)
        if name == "silu":
            return self.op.Mul(x, self.op.Sigmoid(x))
        rectified = self.op.Relu(x)
        return {"relu": rectified, "relu2": self.op.Mul(rectified, rectified)}[name]

    def _gelu(self, x, approximate: str):
        if self.has_gelu:
            return self.newer.Gelu(x, approximate=approximate)
        op = self.op

        def number(value: float):
            return op.CastLike(op.Constant(value_float=value), x)

        if approximate == "tanh":
            cube = op.Mul(number(0.044715), op.Pow(x, number(3.0)))
            bracket = op.Tanh(op.Mul(number(math.sqrt(2 / math.pi)), op.Add(x, cube)))
        else:
            bracket = op.Erf(op.Div(x, number(math.sqrt(2))))
        return op.Mul(x, op.Mul(number(0.5), op.Add(bracket, number(1.0))))

    def linear(self, input, weight, bias=None):
        return self._product(input, weight, bias, _is_matrix(input))

    def layer(self, operator: str) -> Callable:
        """Returns the writer of a linear operator with its activation."""

        def written(input, weight, bias=None, approximate="tanh", memory="default"):
            activation = of_operator(operator, approximate)
            return self._activate(self.linear(input, weight, bias), activation.name)

        return written

    def mlp(self, input, weights, biases, activation, memory="default"):
        is_matrix = _is_matrix(input)  # of what follows the shape is not known yet
        for weight, bias in zip(weights[:-1], biases[:-1]):
            input = self._activate(self._product(input, weight, bias, is_matrix), activation)
        return self._product(input, weights[-1], biases[-1], is_matrix)

    def linear_glu(
        self, input, gate, up=None, gate_bias=None, up_bias=None, activation="silu", memory=None
    ):
        first = self.linear(input, gate, gate_bias)
        if up is None:
            first, second = self.op.Split(first, axis=-1, num_outputs=2)
        else:
            second = self.linear(input, up, up_bias)
        return self.op.Mul(self._activate(first, activation), second)

    def gated_mlp(
        self, input, gate, up, down, gate_bias=None, up_bias=None, down_bias=None, **options
    ):
        hidden = self.linear_glu(input, gate, up, gate_bias, up_bias, **options)
        return self._product(hidden, down, down_bias, _is_matrix(input))

    def conv2d_relu(
        self, input, weight, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1
    ):
        op = self.op
        has_batch = input.shape is None or len(input.shape) == 4
        first = None if has_batch else op.Constant(value_ints=[0])
        image = input if has_batch else op.Unsqueeze(input, first)  # a batch of one
        steps = {"strides": [stride[0], stride[-1]], "dilations": [dilation[0], dilation[-1]]}
        pads = 2 * [padding[0], padding[-1]]  # above and to the left, below and to the right
        result = op.Conv(image, weight, bias, **steps, pads=pads, group=groups)
        return op.Relu(result if has_batch else op.Squeeze(result, first))


def _is_matrix(x) -> bool:
    return x.shape is not None and len(x.shape) == 2
