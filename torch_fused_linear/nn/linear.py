"""Layers that stand in the place of ``nn.Linear`` and its activation."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device
from typing_extensions import Self

from .._support.arguments import Approximate, Memory, check
from ..activations import SquaredReLU
from ..functional import linear, linear_gelu, linear_relu, linear_relu2, linear_silu
from .taking_over import check_given_back, check_plain, made_like


def memory_repr(memory: str) -> str:
    """Returns the part of a layer's repr about memory: nothing for the default."""
    return "" if memory == "default" else f", memory={memory!r}"


def precision_repr(precision: str) -> str:
    """Returns the part of a layer's repr about precision: nothing for the default."""
    return "" if precision == "default" else f", precision={precision!r}"


class FusedLinear(nn.Linear):
    r"""Applies a linear layer, :math:`y = xW^T + b`, as :class:`torch.nn.Linear` does.

    Layers that you call one by one are one operator each. :class:`FusedMLP` runs several layers as
    one operator.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: if ``False``, the layer has no bias. Default: ``True``.
        device: device of the parameters. Default: PyTorch's default device.
        dtype: dtype of the parameters: fp64, fp32, fp16 or bf16. Default: PyTorch's default dtype.

    Shape:
        - Input: :math:`(*, \text{in\_features})`.
        - Output: :math:`(*, \text{out\_features})`.

    Attributes:
        weight: :math:`(\text{out\_features}, \text{in\_features})`, initialised as in
            :class:`torch.nn.Linear`, whose ``state_dict`` loads as it is.
        bias: :math:`(\text{out\_features})`, or ``None``.

    Examples::

        >>> layer = FusedLinear(16, 32)
        >>> layer(torch.randn(8, 16)).shape
        torch.Size([8, 32])
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Self:
        """Makes a fused layer that shares ``linear``'s parameters: the same objects, not copies.

        Args:
            linear: exactly an ``nn.Linear`` or a ``FusedLinear``, without hooks or anything else
                that the fused layer would not have.
            device: device of the parameters. Default: where they are. A parameter on another device
                is copied.
            dtype: dtype of the parameters. Default: the one they have. A parameter of another dtype
                is copied.
            kwargs: further arguments of the class's constructor, such as ``approximate``.

        Returns:
            The fused layer, in the mode (training or not) of ``linear``.

        Raises:
            TypeError: ``linear`` is something else, a subclass, lazy, parametrised, has hooks,
                other parameters, a ``forward`` set on the object, or was compiled.

        Examples::

            >>> linear = nn.Linear(16, 32)
            >>> fused = FusedLinearReLU.from_linear(linear)
            >>> fused.weight is linear.weight
            True
        """
        check_plain(f"{cls.__name__}.from_linear", linear, (nn.Linear, FusedLinear))
        sizes = linear.in_features, linear.out_features
        return made_like(linear, cls, *sizes, device=device, dtype=dtype, **kwargs)

    def to_linear(self) -> nn.Linear:
        """Returns an ``nn.Linear`` that shares this layer's parameters, without the activation.

        Returns:
            The plain layer, in the mode (training or not) of this one.

        Raises:
            TypeError: something would be lost: the layer is a subclass, has hooks, a
                parametrisation, pruned or other parameters, a ``forward`` set on the object, or was
                compiled.

        Examples::

            >>> FusedLinearReLU(16, 32).to_linear()
            Linear(in_features=16, out_features=32, bias=True)
        """
        check_given_back("to_linear", self, (FusedLinear, *_WithActivation.__subclasses__()))
        return made_like(self, nn.Linear, self.in_features, self.out_features)

    def to_unfused(self) -> nn.Module:
        """Returns the layer in plain ``torch.nn``, sharing this layer's parameters.

        Returns:
            An ``nn.Linear``.

        Raises:
            TypeError: something would be lost, as for :meth:`to_linear`.

        Examples::

            >>> FusedLinear(16, 32).to_unfused()
            Linear(in_features=16, out_features=32, bias=True)
        """
        return self.to_linear()


class _WithActivation(FusedLinear):
    """The base of the layers with an activation."""

    __constants__ = (*nn.Linear.__constants__, "memory")
    memory: Memory

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        memory: Memory = "default",
    ) -> None:
        check(type(self).__name__, memory=memory)
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.memory = memory

    def to_unfused(self) -> nn.Module:
        """Returns the layer in plain ``torch.nn``, sharing this layer's parameters.

        Returns:
            An ``nn.Sequential`` of ``nn.Linear`` and the activation's layer.

        Raises:
            TypeError: something would be lost, as for :meth:`FusedLinear.to_linear`.

        Examples::

            >>> FusedLinearReLU(16, 32).to_unfused()
            Sequential(
              (0): Linear(in_features=16, out_features=32, bias=True)
              (1): ReLU()
            )
        """
        return nn.Sequential(self.to_linear(), self._plain_activation()).train(self.training)

    def extra_repr(self) -> str:
        return super().extra_repr() + memory_repr(self.memory)


class FusedLinearReLU(_WithActivation):
    r"""Applies a linear layer and ReLU, :math:`y = \max(xW^T + b, 0)`.

    Equivalent to ``nn.Linear`` followed by ``nn.ReLU``. On a GPU the forward is one cuBLASLt
    product with the epilogue ``RELU_BIAS``. The backward is one pass over memory for the gradients
    of ReLU and of the bias, followed by two products. :func:`torch_fused_linear.linear_relu` says
    what happens at exactly 0.

    Note:
        The layer is an ``nn.Linear`` whose output has the activation in it. A LoRA wrapper that
        adds its product to the output of any ``nn.Linear`` would add it after the activation. Wrap
        the plain model instead, and call :func:`fuse_` on it.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: if ``False``, the layer has no bias. Default: ``True``.
        device: device of the parameters. Default: PyTorch's default device.
        dtype: dtype of the parameters: fp64, fp32, fp16 or bf16. Default: PyTorch's default dtype.
        memory: ``'default'``, or ``'low'`` to keep one bit for each element of the output instead
            of the output itself. It pays if nothing else keeps the output: dropout, pooling or a
            sum follows, not a linear layer. Default: ``'default'``.

    Shape:
        - Input: :math:`(*, \text{in\_features})`.
        - Output: :math:`(*, \text{out\_features})`.

    Attributes:
        weight: :math:`(\text{out\_features}, \text{in\_features})`, initialised as in
            :class:`torch.nn.Linear`, whose ``state_dict`` loads as it is.
        bias: :math:`(\text{out\_features})`, or ``None``.

    Raises:
        ValueError: ``memory`` is neither ``'default'`` nor ``'low'``.

    Examples::

        >>> layer = FusedLinearReLU(16, 32)
        >>> x = torch.randn(8, 16)
        >>> torch.testing.assert_close(layer(x), F.relu(F.linear(x, layer.weight, layer.bias)))
    """

    _plain_activation = nn.ReLU

    def forward(self, input: Tensor) -> Tensor:
        return linear_relu(input, self.weight, self.bias, memory=self.memory)


class FusedLinearGELU(_WithActivation):
    r"""Applies a linear layer and GELU, :math:`y = \text{GELU}(xW^T + b)`.

    Equivalent to ``nn.Linear`` followed by ``nn.GELU(approximate=approximate)``. **The default is**
    ``approximate='tanh'``, which cuBLASLt's epilogue computes; the default of
    :class:`torch.nn.GELU` is ``'none'`` (erf). The two forms are never swapped.

    Note:
        The layer is an ``nn.Linear`` whose output has the activation in it. A LoRA wrapper that
        adds its product to the output of any ``nn.Linear`` would add it after the activation. Wrap
        the plain model instead, and call :func:`fuse_` on it.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: if ``False``, the layer has no bias. Default: ``True``.
        device: device of the parameters. Default: PyTorch's default device.
        dtype: dtype of the parameters: fp64, fp32, fp16 or bf16. Default: PyTorch's default dtype.
        approximate: ``'tanh'``, or ``'none'`` for erf. Default: ``'tanh'``.
        memory: ``'default'`` or ``'low'``; no difference here, because a layer alone cannot keep
            less. :class:`FusedMLP` can. Default: ``'default'``.

    Shape:
        - Input: :math:`(*, \text{in\_features})`.
        - Output: :math:`(*, \text{out\_features})`.

    Attributes:
        weight: :math:`(\text{out\_features}, \text{in\_features})`, initialised as in
            :class:`torch.nn.Linear`, whose ``state_dict`` loads as it is.
        bias: :math:`(\text{out\_features})`, or ``None``.

    Raises:
        ValueError: ``approximate`` or ``memory`` is none of these.

    Examples::

        >>> layer = FusedLinearGELU(16, 32, approximate="none")
        >>> x = torch.randn(8, 16)
        >>> torch.testing.assert_close(layer(x), F.gelu(F.linear(x, layer.weight, layer.bias)))
    """

    __constants__ = (*nn.Linear.__constants__, "approximate", "memory")
    approximate: Approximate

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        approximate: Approximate = "tanh",
        memory: Memory = "default",
    ) -> None:
        check("FusedLinearGELU", approximate=approximate)
        super().__init__(in_features, out_features, bias, device, dtype, memory=memory)
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:
        return linear_gelu(
            input, self.weight, self.bias, approximate=self.approximate, memory=self.memory
        )

    def _plain_activation(self) -> nn.Module:
        return nn.GELU(approximate=self.approximate)

    def extra_repr(self) -> str:
        about = f", approximate={self.approximate!r}{memory_repr(self.memory)}"
        return nn.Linear.extra_repr(self) + about


class FusedLinearSiLU(_WithActivation):
    r"""Applies a linear layer and SiLU, :math:`y = z \cdot \sigma(z)` with :math:`z = xW^T + b`.

    Equivalent to ``nn.Linear`` followed by ``nn.SiLU``. For SiLU in a gated block,
    :math:`\text{SiLU}(xW^T) \odot xV^T`, use :class:`torch_fused_linear.FusedGatedMLP`.

    Note:
        The layer is an ``nn.Linear`` whose output has the activation in it. A LoRA wrapper that
        adds its product to the output of any ``nn.Linear`` would add it after the activation. Wrap
        the plain model instead, and call :func:`fuse_` on it.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: if ``False``, the layer has no bias. Default: ``True``.
        device: device of the parameters. Default: PyTorch's default device.
        dtype: dtype of the parameters: fp64, fp32, fp16 or bf16. Default: PyTorch's default dtype.
        memory: ``'default'`` or ``'low'``; no difference here, because a layer alone cannot keep
            less. :class:`FusedMLP` can. Default: ``'default'``.

    Shape:
        - Input: :math:`(*, \text{in\_features})`.
        - Output: :math:`(*, \text{out\_features})`.

    Attributes:
        weight: :math:`(\text{out\_features}, \text{in\_features})`, initialised as in
            :class:`torch.nn.Linear`, whose ``state_dict`` loads as it is.
        bias: :math:`(\text{out\_features})`, or ``None``.

    Raises:
        ValueError: ``memory`` is neither ``'default'`` nor ``'low'``.

    Examples::

        >>> layer = FusedLinearSiLU(16, 32)
        >>> x = torch.randn(8, 16)
        >>> torch.testing.assert_close(layer(x), F.silu(F.linear(x, layer.weight, layer.bias)))
    """

    _plain_activation = nn.SiLU

    def forward(self, input: Tensor) -> Tensor:
        return linear_silu(input, self.weight, self.bias, memory=self.memory)


class FusedLinearReLU2(_WithActivation):
    r"""Applies a linear layer and squared ReLU, :math:`y = \max(xW^T + b, 0)^2`.

    Equivalent to ``nn.Linear``, ``nn.ReLU`` and a square.

    Note:
        The layer is an ``nn.Linear`` whose output has the activation in it. A LoRA wrapper that
        adds its product to the output of any ``nn.Linear`` would add it after the activation. Wrap
        the plain model instead, and call :func:`fuse_` on it.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: if ``False``, the layer has no bias. Default: ``True``.
        device: device of the parameters. Default: PyTorch's default device.
        dtype: dtype of the parameters: fp64, fp32, fp16 or bf16. Default: PyTorch's default dtype.
        memory: ``'default'`` or ``'low'``; no difference here, because a layer alone cannot keep
            less. :class:`FusedMLP` can. Default: ``'default'``.

    Shape:
        - Input: :math:`(*, \text{in\_features})`.
        - Output: :math:`(*, \text{out\_features})`.

    Attributes:
        weight: :math:`(\text{out\_features}, \text{in\_features})`, initialised as in
            :class:`torch.nn.Linear`, whose ``state_dict`` loads as it is.
        bias: :math:`(\text{out\_features})`, or ``None``.

    Raises:
        ValueError: ``memory`` is neither ``'default'`` nor ``'low'``.

    Examples::

        >>> layer = FusedLinearReLU2(16, 32)
        >>> x = torch.randn(8, 16)
        >>> y = F.relu(F.linear(x, layer.weight, layer.bias)).square()
        >>> torch.testing.assert_close(layer(x), y)
    """

    _plain_activation = SquaredReLU

    def forward(self, input: Tensor) -> Tensor:
        return linear_relu2(input, self.weight, self.bias, memory=self.memory)
