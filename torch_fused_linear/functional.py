"""The operators ``torch.ops.fused.<name>`` as functions, a microsecond faster in eager mode.

They work under autocast, ``torch.compile``, ``torch.func``, ``torch.export`` and in TorchScript.
"""

from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling as is_compiling

from ._support.arguments import Activation, Approximate, Memory, Precision, check_precision
from ._support.library import direct
from ._support.torch_internals import register_builtin
from ._torch import subclasses


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Applies a linear layer, :math:`y = xW^T + b`.

    Computes the same as :func:`torch.nn.functional.linear`, and trains with this package's
    backward.

    If there is no kernel for the arguments, PyTorch's own functions run, and :class:`explain` says
    so. This concerns other dtypes and layouts, a one-dimensional weight, a bias that is broadcast,
    nested and quantised tensors, and other tensor subclasses. It is the same for all functions
    here.

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; fp64, fp32, fp16 or bf16.
        weight: :math:`(\text{out\_features}, \text{in\_features})`, of ``input``'s dtype and
            device.
        bias: :math:`(\text{out\_features})`, of the same dtype and device, or ``None``.

    Returns:
        :math:`(*, \text{out\_features})`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, as in PyTorch's own function.
        NotImplementedError: PyTorch has no kernel for the dtype or layout either.

    Examples::

        >>> x, w, b = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32)
        >>> linear(x, w, b).shape
        torch.Size([8, 32])
    """
    if is_compiling() or (y := direct.linear(input, weight, bias)) is None:
        y = _dispatched("linear", input, weight, bias)
    return y


def linear_relu(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, memory: Memory = "default"
) -> Tensor:
    r"""Applies a linear layer and ReLU, :math:`y = \max(xW^T + b, 0)`.

    Equivalent to ``F.relu(F.linear(input, weight, bias))``. On a GPU this is one cuBLASLt product
    with the epilogue ``RELU_BIAS``, or a way that was measured to be faster.

    As in PyTorch, the gradient is 0 where :math:`y = 0`, and NaN is passed on. Under
    ``set_policy("cublaslt")`` the gradient is 1 where the pre-activation is exactly 0, because of
    the library's bit mask.

    The backward keeps the output. With ``memory='low'`` it keeps one bit for each element instead.
    That is less if nothing else keeps the output: dropout, pooling or a sum follows. It is more if
    the next layer keeps the output, as a linear layer does.

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; fp64, fp32, fp16 or bf16.
        weight: :math:`(\text{out\_features}, \text{in\_features})`, of ``input``'s dtype and
            device.
        bias: :math:`(\text{out\_features})`, of the same dtype and device, or ``None``.
        memory: ``'default'``, or ``'low'`` to keep bits for the backward.

    Returns:
        :math:`(*, \text{out\_features})`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, as in PyTorch's own function.
        NotImplementedError: PyTorch has no kernel for the dtype or layout either.
        ValueError: ``memory`` is neither ``'default'`` nor ``'low'``.

    Examples::

        >>> x, w, b = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32)
        >>> y = linear_relu(x, w, b)
        >>> torch.testing.assert_close(y, F.relu(F.linear(x, w, b)))
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
    r"""Applies a linear layer and GELU, :math:`y = \text{GELU}(xW^T + b)`.

    Equivalent to ``F.gelu(F.linear(input, weight, bias), approximate=approximate)``. **The default
    is** ``approximate='tanh'``, which cuBLASLt computes in its epilogue; PyTorch's default is
    ``'none'``. The two forms are never swapped. See `Gaussian Error Linear Units
    <https://arxiv.org/abs/1606.08415>`_.

    The backward keeps the pre-activation :math:`z`, and the next layer keeps its input :math:`y`:
    two tensors, as in PyTorch. ``memory='low'`` changes nothing, because a layer alone cannot keep
    less. :func:`mlp` can.

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; fp64, fp32, fp16 or bf16.
        weight: :math:`(\text{out\_features}, \text{in\_features})`, of ``input``'s dtype and
            device.
        bias: :math:`(\text{out\_features})`, of the same dtype and device, or ``None``.
        approximate: ``'tanh'``, or ``'none'`` for erf.
        memory: ``'default'`` or ``'low'``; no difference here.

    Returns:
        :math:`(*, \text{out\_features})`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, as in PyTorch's own function.
        NotImplementedError: PyTorch has no kernel for the dtype or layout either.
        ValueError: ``approximate`` or ``memory`` is none of these.

    Examples::

        >>> x, w, b = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32)
        >>> y = linear_gelu(x, w, b, approximate="none")
        >>> torch.testing.assert_close(y, F.gelu(F.linear(x, w, b)))
    """
    tensors = (input, weight, bias)
    if is_compiling() or (y := direct.linear_gelu(*tensors, approximate, memory)) is None:
        y = _dispatched("linear_gelu", *tensors, approximate=approximate, memory=memory)
    return y


def linear_silu(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, memory: Memory = "default"
) -> Tensor:
    r"""Applies a linear layer and SiLU, :math:`y = z \cdot \sigma(z)` with :math:`z = xW^T + b`.

    Equivalent to ``F.silu(F.linear(input, weight, bias))``; SiLU is also called Swish. cuBLASLt has
    no epilogue for it. On a GPU it is a product with bias followed by one kernel, or on Hopper GPUs
    one kernel of our own.

    The backward keeps :math:`z`. ``memory='low'`` changes nothing, because a layer alone cannot
    keep less. :func:`mlp` can.

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; fp64, fp32, fp16 or bf16.
        weight: :math:`(\text{out\_features}, \text{in\_features})`, of ``input``'s dtype and
            device.
        bias: :math:`(\text{out\_features})`, of the same dtype and device, or ``None``.
        memory: ``'default'`` or ``'low'``; no difference here.

    Returns:
        :math:`(*, \text{out\_features})`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, as in PyTorch's own function.
        NotImplementedError: PyTorch has no kernel for the dtype or layout either.
        ValueError: ``memory`` is neither ``'default'`` nor ``'low'``.

    Examples::

        >>> x, w, b = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32)
        >>> torch.testing.assert_close(linear_silu(x, w, b), F.silu(F.linear(x, w, b)))
    """
    if is_compiling() or (y := direct.linear_silu(input, weight, bias, memory)) is None:
        y = _dispatched("linear_silu", input, weight, bias, memory=memory)
    return y


def linear_relu2(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, memory: Memory = "default"
) -> Tensor:
    r"""Applies a linear layer and squared ReLU, :math:`y = \max(xW^T + b, 0)^2`.

    Equivalent to ``F.relu(F.linear(input, weight, bias)).square()``. On a GPU it is a product with
    bias followed by one kernel, or on Hopper GPUs one kernel of our own. Under autocast it returns
    autocast's dtype, where ``square`` returns fp32 on a GPU. See `Primer: Searching for Efficient
    Transformers <https://arxiv.org/abs/2109.08668>`_.

    The backward keeps :math:`xW^T + b`. ``memory='low'`` changes nothing, because a layer alone
    cannot keep less. :func:`mlp` can.

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; fp64, fp32, fp16 or bf16.
        weight: :math:`(\text{out\_features}, \text{in\_features})`, of ``input``'s dtype and
            device.
        bias: :math:`(\text{out\_features})`, of the same dtype and device, or ``None``.
        memory: ``'default'`` or ``'low'``; no difference here.

    Returns:
        :math:`(*, \text{out\_features})`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, as in PyTorch's own function.
        NotImplementedError: PyTorch has no kernel for the dtype or layout either.
        ValueError: ``memory`` is neither ``'default'`` nor ``'low'``.

    Examples::

        >>> x, w, b = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32)
        >>> y = linear_relu2(x, w, b)
        >>> torch.testing.assert_close(y, F.relu(F.linear(x, w, b)).square())
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
    r"""Applies linear layers one after the other, with an activation between them and none after
    the last.

    Equivalent to, for ReLU::

        for weight, bias in zip(weights[:-1], biases[:-1]):
            input = F.relu(F.linear(input, weight, bias))
        return F.linear(input, weights[-1], biases[-1])

    It is one node of the autograd graph. The backward applies each hidden layer's activation
    derivative, and sums its bias gradient, together with the next layer's product (cuBLASLt's
    ``DRELU_BGRAD`` and ``DGELU_BGRAD``, or a faster way). Unless the graph is retained, it frees
    each saved tensor as soon as it has read it.

    With ``memory='low'`` the backward keeps one tensor for each hidden layer instead of two, and
    computes the layer's output again, bit for bit. ReLU keeps one in any case: the output, or one
    bit for each element if the weight after it is frozen.

    Args:
        input: :math:`(*, \text{features}_0)`, any strides; fp64, fp32, fp16 or bf16.
        weights: one or more, :math:`(\text{features}_{i+1}, \text{features}_i)`, of ``input``'s
            dtype and device.
        biases: for each weight :math:`(\text{features}_{i+1})` or ``None``.
        activation: ``'relu'``, ``'gelu_tanh'``, ``'gelu_erf'``, ``'silu'`` or ``'relu2'``.
        memory: ``'default'``, or ``'low'`` to keep less for the backward.
        precision: ``'default'``, the dtype of ``input``, or ``'float8'`` to run :func:`float8_mlp`.

    Returns:
        :math:`(*, \text{features}_n)`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, as in PyTorch's own function.
        NotImplementedError: PyTorch has no kernel for the dtype or layout either.
        ValueError: there is no weight, the number of biases differs from that of weights, or
            ``activation``, ``memory`` or ``precision`` is none of these, or ``memory='low'`` is
            given with ``'float8'``.

    Examples::

        >>> x, w1, w2 = torch.randn(8, 16), torch.randn(32, 16), torch.randn(4, 32)
        >>> y = mlp(x, [w1, w2], [torch.zeros(32), None], "gelu_erf")
        >>> torch.testing.assert_close(y, F.linear(F.gelu(F.linear(x, w1)), w2))
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
    r"""Applies a gated linear unit, :math:`y = \text{act}(xW_\text{gate}^T + b_\text{gate}) \odot
    (xW_\text{up}^T + b_\text{up})`.

    Equivalent to, for SiLU::

        F.silu(F.linear(input, gate, gate_bias)) * F.linear(input, up, up_bias)

    Without ``up``, ``gate`` holds both weights, gate's rows first, and ``gate_bias`` both biases.
    If up's rows come first, pass the two halves. Two weights that lie next to each other in memory,
    gate first, such as the halves of one tensor, take one product. See `GLU Variants Improve
    Transformer <https://arxiv.org/abs/2002.05202>`_.

    The backward keeps the input and the two pre-activations. It computes both gradients, and the
    sums for the biases, in one pass over memory. ``memory='low'`` changes nothing here;
    :func:`gated_mlp` can keep less.

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; fp64, fp32, fp16 or bf16.
        gate: :math:`(\text{hidden\_features}, \text{in\_features})`, of ``input``'s dtype and
            device; without ``up`` :math:`(2 \cdot \text{hidden\_features}, \text{in\_features})`.
        up: :math:`(\text{hidden\_features}, \text{in\_features})` or ``None``.
        gate_bias: :math:`(\text{hidden\_features})`, without ``up`` twice that, or ``None``.
        up_bias: :math:`(\text{hidden\_features})` or ``None``.
        activation: ``'silu'``, ``'gelu_tanh'``, ``'gelu_erf'``, ``'relu'`` or ``'relu2'``.
        memory: ``'default'`` or ``'low'``; no difference here.

    Returns:
        :math:`(*, \text{hidden\_features})`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, as in PyTorch's own function.
        NotImplementedError: PyTorch has no kernel for the dtype or layout either.
        ValueError: ``activation`` or ``memory`` is none of these; without ``up``, ``gate`` has an
            odd number of rows or ``up_bias`` is given.

    Examples::

        >>> x, gate, up = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32, 16)
        >>> y = linear_glu(x, gate, up)
        >>> torch.testing.assert_close(y, F.silu(x @ gate.T) * (x @ up.T))
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
    r"""Applies a gated linear unit and a linear layer, the feed-forward block of most language
    models.

    Equivalent to ``F.linear(linear_glu(input, gate, up, ...), down, down_bias)``, as one node of
    the autograd graph. It keeps two tensors of the hidden size, where PyTorch keeps four. The
    backward computes the tensor between the two layers again, in a pass over memory that it makes
    anyway.

    With ``memory='low'`` it keeps one tensor of the hidden size, and the backward computes the
    product with ``up`` again: ten products in a training step instead of nine. If ``gate`` is both
    weights, it keeps both pre-activations.

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; fp64, fp32, fp16 or bf16.
        gate: :math:`(\text{hidden\_features}, \text{in\_features})`, of ``input``'s dtype and
            device; without ``up`` :math:`(2 \cdot \text{hidden\_features}, \text{in\_features})`.
        up: :math:`(\text{hidden\_features}, \text{in\_features})` or ``None``.
        down: :math:`(\text{out\_features}, \text{hidden\_features})`.
        gate_bias: :math:`(\text{hidden\_features})`, without ``up`` twice that, or ``None``.
        up_bias: :math:`(\text{hidden\_features})` or ``None``.
        down_bias: :math:`(\text{out\_features})` or ``None``.
        activation: ``'silu'``, ``'gelu_tanh'``, ``'gelu_erf'``, ``'relu'`` or ``'relu2'``.
        memory: ``'default'``, or ``'low'`` to keep one hidden tensor less.
        precision: ``'default'``, the dtype of ``input``, or ``'float8'`` to run
            :func:`float8_gated_mlp`.

    Returns:
        :math:`(*, \text{out\_features})`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, as in PyTorch's own function.
        NotImplementedError: PyTorch has no kernel for the dtype or layout either.
        ValueError: ``activation``, ``memory`` or ``precision`` is none of these, or
            ``memory='low'`` is given with ``'float8'``; without ``up``, ``gate`` has an odd number
            of rows or ``up_bias`` is given.

    Examples::

        >>> x, gate, up = torch.randn(8, 16), torch.randn(32, 16), torch.randn(32, 16)
        >>> gated_mlp(x, gate, up, torch.randn(16, 32)).shape
        torch.Size([8, 16])
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
    r"""Applies a linear layer with its product in FP8, :math:`y = \text{act}(xW^T + b)`.

    The recipe is torchao's ``tensorwise``. Input and weight are cast to ``float8_e4m3fn`` and the
    gradient of the output to ``float8_e5m2``. Each tensor has one scale, from its largest absolute
    value. The casts have torchao's bits. The bias is added before the result is rounded, once.

    FP8 products need sizes that are multiples of 16: the features, and the number of rows if the
    weight's gradient is wanted. Other sizes and empty inputs run in the dtype of ``input``, and so
    does a GPU without FP8, which starts at compute capability 8.9. :class:`explain` says so.

    Gradients cannot be differentiated again, and :func:`accumulate_gradients` does not cover them.
    ``vmap``, ``torch.func`` and forward-mode AD raise.

    Args:
        input: :math:`(*, \text{in\_features})`, any strides; bf16, fp16 or fp32.
        weight: :math:`(\text{out\_features}, \text{in\_features})`; bf16, fp16 or fp32. A master
            weight in fp32 is cast to FP8 directly.
        bias: :math:`(\text{out\_features})` or ``None``; bf16, fp16 or fp32.
        activation: ``'none'``, ``'relu'``, ``'gelu_tanh'``, ``'gelu_erf'``, ``'silu'`` or
            ``'relu2'``.

    Returns:
        :math:`(*, \text{out\_features})`, in the dtype of ``input``; under autocast in autocast's.

    Raises:
        RuntimeError: shapes or devices do not fit.
        NotImplementedError: FP8 has no kernel for a dtype, a layout or a tensor subclass.
        ValueError: ``activation`` is none of these.

    Examples::

        >>> x, w = torch.randn(64, 32), torch.randn(16, 32)
        >>> float8_linear(x, w, activation="relu").shape
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
    r"""Applies linear layers with products in FP8, with an activation between them and none after
    the last.

    It is :func:`mlp` by the recipe of :func:`float8_linear`, as one node of the autograd graph. An
    activation and the next layer's cast are one pass over memory. So are an activation's
    derivative, its cast and the bias's gradient. The backward keeps the FP8 copies of the input
    and the weights, and each hidden pre-activation; for ReLU the FP8 copy and one bit for each
    element instead.

    Args:
        input: :math:`(*, \text{features}_0)`, any strides; bf16, fp16 or fp32.
        weights: one or more, :math:`(\text{features}_{i+1}, \text{features}_i)`; bf16, fp16 or
            fp32.
        biases: for each weight :math:`(\text{features}_{i+1})` or ``None``.
        activation: ``'relu'``, ``'gelu_tanh'``, ``'gelu_erf'``, ``'silu'`` or ``'relu2'``.

    Returns:
        :math:`(*, \text{features}_n)`, in the dtype of ``input``; under autocast in autocast's.

    Raises:
        RuntimeError: shapes or devices do not fit.
        NotImplementedError: FP8 has no kernel for a dtype, a layout or a tensor subclass.
        ValueError: there is no weight, the number of biases differs from that of weights, or
            ``activation`` is none of these.

    Examples::

        >>> x, w1, w2 = torch.randn(32, 16), torch.randn(64, 16), torch.randn(16, 64)
        >>> float8_mlp(x, [w1, w2], [None, None], "gelu_tanh").shape
        torch.Size([32, 16])
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

    It is :func:`gated_mlp` by the recipe of :func:`float8_linear`, as one node of the autograd
    graph. ``gate`` and ``up`` have a scale each, like two layers of torchao's. If one weight holds
    both, it has one scale. The backward keeps the FP8 copies of the input and of the weights, and
    the two pre-activations.

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
        NotImplementedError: FP8 has no kernel for a dtype, a layout or a tensor subclass.
        ValueError: ``activation`` is none of these; without ``up``, ``gate`` has an odd number of
            rows or ``up_bias`` is given.

    Examples::

        >>> x, gate, up = torch.randn(32, 16), torch.randn(64, 16), torch.randn(64, 16)
        >>> float8_gated_mlp(x, gate, up, torch.randn(16, 64)).shape
        torch.Size([32, 16])
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
    r"""Applies a convolution and ReLU, :math:`y = \max(\text{conv2d}(x, W) + b, 0)`.

    Equivalent to ``F.relu(F.conv2d(input, weight, bias, stride, padding, dilation, groups))``. On a
    GPU it is cuDNN's convolution with bias and ReLU in one call, if a trial, made once for each
    problem, finds that faster and right. Otherwise it is cuDNN's convolution and one pass over
    memory for bias and ReLU. The backward keeps the output. One pass computes the gradients of ReLU
    and of the bias, followed by cuDNN's two products. The gradient is 0 where :math:`y = 0`, under
    every policy.

    Args:
        input: :math:`(N, C_\text{in}, H, W)` or :math:`(C_\text{in}, H, W)`, any strides; fp64,
            fp32, fp16 or bf16.
        weight: :math:`(C_\text{out}, C_\text{in} / \text{groups}, k_H, k_W)`, of ``input``'s dtype
            and device.
        bias: :math:`(C_\text{out})` or ``None``.
        stride, padding, dilation: one number or (height, width); padding adds zeros on both sides.
        groups: number of groups that the channels are divided into.

    Returns:
        :math:`(N, C_\text{out}, H_\text{out}, W_\text{out})`, without :math:`N` if ``input`` has
        none; channels-last if ``input`` or ``weight`` is, otherwise contiguous.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, as in
            :func:`torch.nn.functional.conv2d`.
        NotImplementedError: PyTorch has no kernel for the dtype or layout either.
        TypeError: ``stride``, ``padding`` or ``dilation`` is no number; ``padding='same'`` is for
            the layer, :class:`FusedConv2dReLU`.

    Examples::

        >>> x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
        >>> conv2d_relu(x, w, padding=1).shape
        torch.Size([2, 4, 8, 8])
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
    """Calls the operator, or torch's functions for a tensor subclass."""
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
    """Lists an operator's tensors, which come first: the beginning of an error, and the type."""
    schema = getattr(torch.ops.fused, name).default._schema.arguments
    kinds = [(f"{name}: expected {a.name}", str(a.type)) for a in schema]
    return [(what, kind) for what, kind in kinds if "Tensor" in kind]


def _expect(what: str, kind: str, given: object) -> None:
    """Raises ``TypeError`` if the schema wants tensors and something else is given."""
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
