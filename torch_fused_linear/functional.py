"""The operators ``torch.ops.fused.<name>`` as functions, a microsecond quicker in eager mode.

They work under autocast, ``torch.compile``, ``torch.func``, ``torch.export`` and in TorchScript.
"""

from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling as is_compiling

from . import subclasses
from ._arguments import Activation, Approximate, Memory, Precision, check_precision
from ._library import direct
from ._torch_internals import register_builtin


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Applies :math:`y = xW^T + b`.

    The same as :func:`torch.nn.functional.linear`. After a fused layer use this one: it takes part
    in the fused backward.

    Where there is no kernel (other dtypes and layouts, a one-dimensional weight, a bias that is
    broadcast, nested and quantised tensors, other subclasses of tensors) torch's own functions run;
    :class:`explain` says so.

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; fp64, fp32, fp16 or bf16.
        weight: :math:`(\text{out\_features}, \text{in\_features})`, dtype and device of ``input``.
        bias: :math:`(\text{out\_features})` or ``None``.

    Returns:
        :math:`(*, \text{out\_features})`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit: as torch's own function raises it.
        NotImplementedError: torch's own has no kernel for a dtype or layout either.
    """
    if is_compiling() or (y := direct.linear(input, weight, bias)) is None:
        y = _dispatched("linear", input, weight, bias)
    return y


def linear_relu(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, memory: Memory = "default"
) -> Tensor:
    r"""Applies :math:`y = \max(xW^T + b, 0)`; equivalent to ``F.relu(F.linear(input, ...))``.

    On a GPU this is one cuBLASLt product with the epilogue ``RELU_BIAS``. The gradient where
    :math:`y = 0` is 0 and NaN is passed on, as in torch; under ``set_policy("cublaslt")`` the
    gradient where the pre-activation is exactly 0 is 1, as the library's bit mask has it.

    The backward keeps the output. With ``memory='low'`` it keeps one bit for each element instead.
    That is less where nothing else keeps the output (dropout, pooling or a sum follows), and more
    where the next layer does, as a linear one does.

    Args:
        input, weight, bias: as :func:`linear`.
        memory: ``'default'`` or ``'low'``.

    Returns:
        :math:`(*, \text{out\_features})`.

    Raises:
        RuntimeError, NotImplementedError: as :func:`linear`.
        ValueError: ``memory`` is neither of these.
    """
    if is_compiling() or (y := direct.linear_relu(input, weight, bias, memory)) is None:
        y = _dispatched("linear_relu", input, weight, bias, memory=memory)
    return y


def linear_gelu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: Approximate = "tanh",
    memory: Memory = "default",
) -> Tensor:
    r"""Applies :math:`y = \text{GELU}(xW^T + b)`.

    Equivalent to ``F.gelu(F.linear(input, weight, bias), approximate=approximate)``. Mind the
    default: ``'tanh'``, which cuBLASLt computes in its epilogue; torch's default is ``'none'``.
    Neither form is ever computed in the place of the other. See
    `Gaussian Error Linear Units <https://arxiv.org/abs/1606.08415>`_.

    The backward keeps the pre-activation :math:`z`, and the layer after keeps its input :math:`y`:
    two tensors, as in torch. ``memory='low'`` is accepted and changes nothing, since a layer alone
    cannot keep less: :func:`mlp` can.

    Args:
        input, weight, bias: as :func:`linear`.
        approximate: ``'tanh'`` or ``'none'`` (erf).
        memory: ``'default'`` or ``'low'``.

    Returns:
        :math:`(*, \text{out\_features})`.

    Raises:
        RuntimeError, NotImplementedError, ValueError: as :func:`linear_relu`.
    """
    tensors = (input, weight, bias)
    if is_compiling() or (y := direct.linear_gelu(*tensors, approximate, memory)) is None:
        y = _dispatched("linear_gelu", *tensors, approximate=approximate, memory=memory)
    return y


def linear_silu(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, memory: Memory = "default"
) -> Tensor:
    r"""Applies :math:`y = z \cdot \sigma(z)` with :math:`z = xW^T + b`.

    Equivalent to ``F.silu(F.linear(input, weight, bias))``; SiLU is also called Swish. cuBLASLt has
    no epilogue for it: on a GPU it is a product with bias, then one kernel, or on Hopper GPUs one
    kernel of our own.

    The backward keeps :math:`z`. ``memory='low'`` changes nothing, as in :func:`linear_gelu`.

    Args:
        input, weight, bias, memory: as :func:`linear_gelu`.

    Returns:
        :math:`(*, \text{out\_features})`.

    Raises:
        RuntimeError, NotImplementedError, ValueError: as :func:`linear_relu`.
    """
    if is_compiling() or (y := direct.linear_silu(input, weight, bias, memory)) is None:
        y = _dispatched("linear_silu", input, weight, bias, memory=memory)
    return y


def linear_relu2(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, memory: Memory = "default"
) -> Tensor:
    r"""Applies :math:`y = \max(xW^T + b, 0)^2`, the squared ReLU.

    Equivalent to ``F.relu(F.linear(input, weight, bias)).square()``; done as :func:`linear_silu`.
    Under autocast it returns autocast's dtype, where ``square`` returns fp32 on a GPU.
    See `Primer: Searching for Efficient Transformers <https://arxiv.org/abs/2109.08668>`_.

    The backward keeps :math:`xW^T + b`. ``memory='low'`` changes nothing, as in
    :func:`linear_gelu`.

    Args:
        input, weight, bias, memory: as :func:`linear_gelu`.

    Returns:
        :math:`(*, \text{out\_features})`.

    Raises:
        RuntimeError, NotImplementedError, ValueError: as :func:`linear_relu`.
    """
    if is_compiling() or (y := direct.linear_relu2(input, weight, bias, memory)) is None:
        y = _dispatched("linear_relu2", input, weight, bias, memory=memory)
    return y


def mlp(
    input: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    activation: Activation = "relu",
    *,
    memory: Memory = "default",
    precision: Precision = "default",
) -> Tensor:
    r"""Applies linear layers in a chain, with the activation between them and none after the last.

    Equivalent to, for ReLU::

        for weight, bias in zip(weights[:-1], biases[:-1]):
            input = F.relu(F.linear(input, weight, bias))
        return F.linear(input, weights[-1], biases[-1])

    It is one node of the graph. The backward applies every hidden layer's activation derivative,
    and sums its bias gradient, together with the next layer's product (cuBLASLt's ``DRELU_BGRAD``
    and ``DGELU_BGRAD``, or what is faster). Unless the graph is retained it frees what it has read
    before it makes room for more.

    With ``memory='low'`` one tensor is kept for each hidden layer instead of two: the backward
    computes its output again, bit for bit. ReLU keeps one in any case: the output, or where the
    weight after it is frozen one bit for each element.

    Args:
        input: :math:`(*, \text{features}_0)`, any strides; fp64, fp32, fp16 or bf16.
        weights: one or more, :math:`(\text{features}_{i+1}, \text{features}_i)`.
        biases: for each weight :math:`(\text{features}_{i+1})` or ``None``.
        activation: ``'relu'``, ``'gelu_tanh'``, ``'gelu_erf'``, ``'silu'`` or ``'relu2'``.
        memory: ``'default'`` or ``'low'``.
        precision: ``'default'``, the dtype of ``input``, or ``'float8'`` to run :func:`float8_mlp`.

    Returns:
        :math:`(*, \text{features}_n)`.

    Raises:
        RuntimeError, NotImplementedError: as :func:`linear`.
        ValueError: there is no weight, not a bias for each, ``activation``, ``memory`` or
            ``precision`` is none of these, or ``memory='low'`` is given with ``'float8'``.
    """
    if precision != "default":
        check_precision("mlp", precision, memory)
        return float8_mlp(input, weights, biases, activation)
    if is_compiling() or (y := direct.mlp(input, weights, biases, activation, memory)) is None:
        y = _dispatched("mlp", input, weights, biases, activation, memory=memory)
    return y


def linear_glu(
    input: Tensor,
    gate: Tensor,
    up: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
    memory: Memory = "default",
) -> Tensor:
    r"""Applies :math:`y = \text{act}(xW_\text{gate}^T + b_\text{gate}) \odot
    (xW_\text{up}^T + b_\text{up})`, a gated linear unit.

    Equivalent to, for SiLU::

        F.silu(F.linear(input, gate, gate_bias)) * F.linear(input, up, up_bias)

    Without ``up``, ``gate`` holds both weights, gate's rows first, and ``gate_bias`` both biases.
    (Where up's rows come first pass the two halves.) Weights that lie next to each other in memory,
    gate first, such as the halves of one, take one product. See
    `GLU Variants Improve Transformer <https://arxiv.org/abs/2002.05202>`_.

    The backward keeps the input and the two pre-activations, and makes both gradients and the sums
    for the biases in one pass over memory. ``memory='low'`` changes nothing, as in
    :func:`linear_gelu`: :func:`gated_mlp` can keep less.

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; fp64, fp32, fp16 or bf16.
        gate: :math:`(\text{hidden\_features}, \text{in\_features})`, dtype and device of ``input``;
            without ``up`` :math:`(2 \cdot \text{hidden\_features}, \text{in\_features})`.
        up: :math:`(\text{hidden\_features}, \text{in\_features})` or ``None``.
        gate_bias: :math:`(\text{hidden\_features})`, without ``up`` twice that, or ``None``.
        up_bias: :math:`(\text{hidden\_features})` or ``None``.
        activation: ``'silu'``, ``'gelu_tanh'``, ``'gelu_erf'``, ``'relu'`` or ``'relu2'``.
        memory: ``'default'`` or ``'low'``.

    Returns:
        :math:`(*, \text{hidden\_features})`.

    Raises:
        RuntimeError, NotImplementedError: as :func:`linear`.
        ValueError: ``activation`` or ``memory`` is none of these; without ``up``, ``gate`` cannot
            be halved or ``up_bias`` is given.
    """
    tensors = (input, gate, up, gate_bias, up_bias)
    if is_compiling() or (y := direct.linear_glu(*tensors, activation, memory)) is None:
        y = _dispatched("linear_glu", *tensors, activation=activation, memory=memory)
    return y


def gated_mlp(
    input: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
    memory: Memory = "default",
    precision: Precision = "default",
) -> Tensor:
    r"""Applies the feed-forward block of most language models: a gated layer and a linear one.

    Equivalent to ``F.linear(linear_glu(input, gate, up, ...), down, down_bias)``, as one node of
    the graph. It keeps two tensors of the hidden size, where torch keeps four: what lies between
    the two layers is computed again in the backward, in a pass over memory that it makes anyway.

    With ``memory='low'`` it keeps one, and the backward makes the product with ``up`` again, a
    tenth one in a training step. (Where ``gate`` is both weights it keeps both.)

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; fp64, fp32, fp16 or bf16.
        gate, up: as :func:`linear_glu`.
        down: :math:`(\text{out\_features}, \text{hidden\_features})`.
        gate_bias, up_bias: as :func:`linear_glu`.
        down_bias: :math:`(\text{out\_features})` or ``None``.
        activation, memory: as :func:`linear_glu`.
        precision: ``'default'``, the dtype of ``input``, or ``'float8'`` to run
            :func:`float8_gated_mlp`.

    Returns:
        :math:`(*, \text{out\_features})`.

    Raises:
        RuntimeError, NotImplementedError, ValueError: as :func:`linear_glu`.
        ValueError: ``precision`` is neither of these, or ``memory='low'`` is given with
            ``'float8'``.
    """
    if precision != "default":
        check_precision("gated_mlp", precision, memory)
        return float8_gated_mlp(
            input, gate, up, down, gate_bias, up_bias, down_bias, activation=activation
        )
    tensors = (input, gate, up, down, gate_bias, up_bias, down_bias)
    if is_compiling() or (y := direct.gated_mlp(*tensors, activation, memory)) is None:
        y = _dispatched("gated_mlp", *tensors, activation=activation, memory=memory)
    return y


def float8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | Literal["none"] = "none",
) -> Tensor:
    r"""Applies :math:`y = \text{act}(xW^T + b)` with products in FP8.

    The recipe is torchao's ``tensorwise``: the input and the weight are cast to ``float8_e4m3fn``
    and the gradient of the output to ``float8_e5m2``, each with one scale for the tensor, made of
    its largest absolute value. The casts have torchao's bits. The bias is added before the result
    is rounded, once. :func:`float8_mlp` and :func:`float8_gated_mlp` are whole blocks.

    Sizes that FP8 products cannot have run in the dtype of ``input`` instead: features that are no
    multiple of 16; a number of rows that is none, where the weight's gradient is wanted; nothing at
    all. So does a GPU without FP8, which needs compute capability 8.9. :class:`explain` says so.

    The gradients cannot be differentiated again. Weights' gradients are not added to what is there
    (:func:`accumulate_gradients`). ``vmap``, ``torch.func`` and forward-mode AD raise.

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; bf16, fp16 or fp32.
        weight: :math:`(\text{out\_features}, \text{in\_features})`, any of these dtypes: a master
            weight in fp32 is cast to FP8 as it is.
        bias: :math:`(\text{out\_features})` or ``None``, any of these dtypes.
        activation: ``'none'``, ``'relu'``, ``'gelu_tanh'``, ``'gelu_erf'``, ``'silu'`` or
            ``'relu2'``.

    Returns:
        :math:`(*, \text{out\_features})`, in the dtype of ``input``; under autocast in autocast's.

    Raises:
        RuntimeError: shapes or devices do not fit.
        NotImplementedError: a dtype, layout or class of tensors that FP8 has no kernel for.
        ValueError: ``activation`` is none of these.

    Example::

        >>> x, w = torch.randn(64, 32), torch.randn(16, 32)
        >>> torch_fused_linear.float8_linear(x, w, activation="relu").shape
        torch.Size([64, 16])
    """
    if is_compiling() or (y := direct.float8_linear(input, weight, bias, activation)) is None:
        y = _dispatched("float8_linear", input, weight, bias, activation)
    return y


def float8_mlp(
    input: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    activation: Activation = "relu",
) -> Tensor:
    r"""Applies linear layers in a chain with products in FP8, the activation between them.

    It is :func:`mlp` by the recipe of :func:`float8_linear`, as one node of the graph. An
    activation and the next layer's cast are one pass over memory, and so are an activation's
    derivative, its cast and the bias's gradient. The backward keeps the FP8 copies of inputs and
    weights, and each hidden pre-activation; of ReLU one bit for each element.

    Args:
        input: :math:`(*, \text{features}_0)`, any strides; bf16, fp16 or fp32.
        weights: one or more, :math:`(\text{features}_{i+1}, \text{features}_i)`.
        biases: for each weight :math:`(\text{features}_{i+1})` or ``None``.
        activation: ``'relu'``, ``'gelu_tanh'``, ``'gelu_erf'``, ``'silu'`` or ``'relu2'``.

    Returns:
        :math:`(*, \text{features}_n)`, in the dtype of ``input``; under autocast in autocast's.

    Raises:
        RuntimeError: shapes or devices do not fit.
        NotImplementedError: a dtype, layout or class of tensors that FP8 has no kernel for.
        ValueError: there is no weight, not a bias for each, or ``activation`` is none of these.
    """
    if is_compiling() or (y := direct.float8_mlp(input, weights, biases, activation)) is None:
        y = _dispatched("float8_mlp", input, weights, biases, activation)
    return y


def float8_gated_mlp(
    input: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
) -> Tensor:
    r"""Applies the gated feed-forward block of language models with products in FP8.

    It is :func:`gated_mlp` by the recipe of :func:`float8_linear`, as one node of the graph.
    ``gate`` and ``up`` have a scale each, as two layers of torchao's have; one weight for both has
    one. The backward keeps the FP8 copies of the input, of what goes into ``down`` and of the
    weights, and the two pre-activations.

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; bf16, fp16 or fp32.
        gate: :math:`(\text{hidden\_features}, \text{in\_features})`; without ``up`` both weights,
            :math:`(2 \cdot \text{hidden\_features}, \text{in\_features})`, gate's rows first.
        up: :math:`(\text{hidden\_features}, \text{in\_features})` or ``None``.
        down: :math:`(\text{out\_features}, \text{hidden\_features})`.
        gate_bias: :math:`(\text{hidden\_features})`, without ``up`` twice that, or ``None``.
        up_bias: :math:`(\text{hidden\_features})` or ``None``.
        down_bias: :math:`(\text{out\_features})` or ``None``.
        activation: ``'silu'``, ``'gelu_tanh'``, ``'gelu_erf'``, ``'relu'`` or ``'relu2'``.

    Returns:
        :math:`(*, \text{out\_features})`, in the dtype of ``input``; under autocast in autocast's.

    Raises:
        RuntimeError: shapes or devices do not fit.
        NotImplementedError: a dtype, layout or class of tensors that FP8 has no kernel for.
        ValueError: ``activation`` is none of these; without ``up``, ``gate`` cannot be halved or
            ``up_bias`` is given.
    """
    tensors = (input, gate, up, down, gate_bias, up_bias, down_bias)
    if is_compiling() or (y := direct.float8_gated_mlp(*tensors, activation)) is None:
        y = _dispatched("float8_gated_mlp", *tensors, activation)
    return y


def conv2d_relu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    r"""Applies :math:`y = \max(\text{conv2d}(x, W) + b, 0)`.

    Equivalent to ``F.relu(F.conv2d(input, weight, bias, stride, padding, dilation, groups))``. On a
    GPU it is cuDNN's convolution with bias and ReLU in one call where a trial, made once for each
    problem, finds that quicker and right, else cuDNN's convolution and one pass over memory for
    both. The backward keeps the output; one pass gives the gradients of ReLU and of the bias, then
    cuDNN's two products follow. The gradient where :math:`y = 0` is 0 under every policy.

    Args:
        input: :math:`(N, C_\text{in}, H, W)` or :math:`(C_\text{in}, H, W)`, any strides; fp64,
            fp32, fp16 or bf16.
        weight: :math:`(C_\text{out}, C_\text{in} / \text{groups}, k_H, k_W)`, dtype and device of
            ``input``.
        bias: :math:`(C_\text{out})` or ``None``.
        stride, padding, dilation: one number or (height, width); zeros are put on both sides.
        groups: into how many the channels are divided.

    Returns:
        :math:`(N, C_\text{out}, H_\text{out}, W_\text{out})`, without :math:`N` where ``input`` is,
        channels-last where ``input`` or ``weight`` is, else contiguous.

    Raises:
        RuntimeError, NotImplementedError: as :func:`torch.nn.functional.conv2d`.
        TypeError: ``stride``, ``padding`` or ``dilation`` is no number: ``padding='same'`` is for
            the layer, :class:`FusedConv2dReLU`.
    """
    pairs = _pair("stride", stride), _pair("padding", padding), _pair("dilation", dilation)
    if is_compiling() or (y := direct.conv2d_relu(input, weight, bias, *pairs, groups)) is None:
        y = _dispatched("conv2d_relu", input, weight, bias, *pairs, groups)
    return y


def _pair(name: str, value: int | Sequence[int]) -> list[int]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if not isinstance(value, (int, torch.SymInt)) and not hasattr(value, "__index__"):
        raise TypeError(f"conv2d_relu: {name} must be an int or two of them, got {value!r}")
    return [value, value]


def _dispatched(name: str, *arguments, **options: str) -> Tensor:
    """Calls the operator, or for a tensor of a class of its own torch's functions."""
    for (what, kind), given in () if is_compiling() else zip(_tensors(name), arguments):
        _expect(what, kind, given)
    flat = [each for x in arguments for each in (x if isinstance(x, (list, tuple)) else [x])]
    foreign = next(filter(subclasses.is_foreign, flat), None)
    if foreign is not None:
        if name not in subclasses.COMPUTES:
            what = f"tensors of the class {type(foreign).__name__}"
            raise NotImplementedError(f"{name}: {what} are not implemented for FP8")
        return subclasses.COMPUTES[name](*arguments, **options)
    return getattr(torch.ops.fused, name)(*arguments, **options)


@cache
def _tensors(name: str) -> list[tuple[str, str]]:
    """The tensors of an operator, which come first: how an error begins, and the type."""
    schema = getattr(torch.ops.fused, name).default._schema.arguments
    kinds = [(f"{name}: expected {a.name}", str(a.type)) for a in schema]
    return [(what, kind) for what, kind in kinds if "Tensor" in kind]


def _expect(what: str, kind: str, given: object) -> None:
    """Raises where the schema wants tensors and something else is given."""
    is_list, is_tensor = kind.startswith("List["), hasattr(type(given), "__torch_function__")
    is_free = given is None and kind.startswith("Optional")
    if is_list and hasattr(given, "__len__") and not is_tensor:
        for k, each in enumerate(given):
            _expect(f"{what}[{k}]", kind[5:-1], each)
    elif not is_free and (not is_tensor or (is_list and isinstance(given, Tensor))):
        raise TypeError(f"{what} to be of type {kind}, got {type(given).__name__}")


# TorchScript takes the operators for them; it knows no arguments by name alone.
for _name in (*subclasses.COMPUTES, "float8_linear", "float8_mlp", "float8_gated_mlp"):
    register_builtin(globals()[_name], f"fused::{_name}")
