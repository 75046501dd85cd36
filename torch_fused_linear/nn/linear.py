"""Layers that stand where ``nn.Linear`` and its activation stood."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device
from typing_extensions import Self

from .._arguments import Approximate, Memory, check
from ..activations import SquaredReLU
from ..functional import linear, linear_gelu, linear_relu, linear_relu2, linear_silu
from .taking_over import check_given_back, check_plain, made_like


def memory_repr(memory: str) -> str:
    """What the layer's repr says of it: nothing, of the default."""
    return "" if memory == "default" else f", memory={memory!r}"


def precision_repr(precision: str) -> str:
    """What the layer's repr says of it: nothing, of the default."""
    return "" if precision == "default" else f", precision={precision!r}"


class FusedLinear(nn.Linear):
    r"""Applies :math:`y = xW^T + b`, as :class:`torch.nn.Linear` does.

    A pair of separate layers is two operators. :class:`FusedMLP` is the block in one operator.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: if ``False``, the layer has no bias. Default: ``True``.
        device: where the parameters are made.
        dtype: of the parameters: fp64, fp32, fp16 or bf16.

    Shape:
        - Input: :math:`(*, H_\text{in})` with :math:`H_\text{in} = \text{in\_features}`.
        - Output: :math:`(*, H_\text{out})` with :math:`H_\text{out} = \text{out\_features}`.

    Attributes:
        weight: :math:`(\text{out\_features}, \text{in\_features})`, initialised as in
            :class:`torch.nn.Linear`, whose ``state_dict`` loads as it is.
        bias: :math:`(\text{out\_features})`.
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
        """A fused layer that shares ``linear``'s parameters (the same objects, not copies).

        Args:
            linear: the layer to take over: exactly an ``nn.Linear`` or a ``FusedLinear``, without
                hooks or anything else that the fused layer would not have.
            device: where the parameters shall be. Default: where they are.
            dtype: of the parameters. Default: the one they have. A parameter that is of another
                device or dtype is copied.
            kwargs: what else the class's constructor takes, such as ``approximate``.

        Returns:
            The fused layer, in the mode (training or not) of ``linear``.

        Raises:
            TypeError: ``linear`` is something else, a subclass, lazy, parametrised, has hooks,
                other parameters, a ``forward`` set on the object, or was compiled.
        """
        check_plain(f"{cls.__name__}.from_linear", linear, (nn.Linear, FusedLinear))
        sizes = linear.in_features, linear.out_features
        return made_like(linear, cls, *sizes, device=device, dtype=dtype, **kwargs)

    def to_linear(self) -> nn.Linear:
        """An ``nn.Linear`` that shares this layer's parameters; the activation is left out.

        Raises:
            TypeError: the layer has what would be lost: it is a subclass, has hooks, a
                parametrisation, pruned or other parameters, a ``forward`` set on the object, or
                was compiled. ``to_unfused`` raises the same.
        """
        check_given_back("to_linear", self, (FusedLinear, *_WithActivation.__subclasses__()))
        return made_like(self, nn.Linear, self.in_features, self.out_features)

    def to_unfused(self) -> nn.Module:
        """The same layer in plain ``torch.nn``, sharing this layer's parameters."""
        return self.to_linear()


class _WithActivation(FusedLinear):
    """What the layers with an activation have in common."""

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
        """``nn.Sequential`` of an ``nn.Linear`` that shares this layer's parameters, and the
        activation's layer."""
        return nn.Sequential(self.to_linear(), self._plain_activation()).train(self.training)

    def extra_repr(self) -> str:
        return super().extra_repr() + memory_repr(self.memory)


class FusedLinearReLU(_WithActivation):
    r"""Applies :math:`y = \max(xW^T + b, 0)`; equivalent to ``nn.Linear`` then ``nn.ReLU``.

    On a GPU the forward is one cuBLASLt product with the epilogue ``RELU_BIAS``, the backward one
    pass over memory for the gradient of ReLU and of the bias, then the two products. See
    :func:`torch_fused_linear.linear_relu` for what happens at exactly 0.

    Shapes and parameters are those of :class:`FusedLinear`.

    Note:
        This layer, like the others with an activation, is an ``nn.Linear`` whose result has the
        activation in it. A LoRA wrapper that adds its product to the result of any ``nn.Linear``
        would add it behind the activation: wrap the plain model, and call :func:`fuse_` on it.

    Args:
        in_features, out_features, bias, device, dtype: as for :class:`FusedLinear`.
        memory: ``'default'``, or ``'low'`` to keep one bit for each element of the output instead
            of the output itself. It pays where nobody else keeps the output: the linear layer after
            it does, dropout, pooling or a sum does not. Default: ``'default'``.

    Raises:
        ValueError: ``memory`` is neither of these.
    """

    _plain_activation = nn.ReLU

    def forward(self, input: Tensor) -> Tensor:
        return linear_relu(input, self.weight, self.bias, memory=self.memory)


class FusedLinearGELU(_WithActivation):
    r"""Applies :math:`y = \text{GELU}(xW^T + b)`; equivalent to ``nn.Linear`` then ``nn.GELU``.

    Mind the default: ``approximate='tanh'`` is what cuBLASLt's epilogue computes, while
    :class:`torch.nn.GELU` defaults to ``'none'`` (erf), which is honoured exactly when asked for.

    Shapes and parameters are those of :class:`FusedLinear`; for LoRA see :class:`FusedLinearReLU`.

    Args:
        in_features, out_features, bias, device, dtype: as for :class:`FusedLinear`.
        approximate: ``'tanh'`` or ``'none'``. Default: ``'tanh'``.
        memory: ``'default'`` or ``'low'``, which changes nothing here: a layer alone keeps as
            little as it can. Low memory is in :class:`FusedMLP`. Default: ``'default'``.

    Raises:
        ValueError: ``approximate`` or ``memory`` is none of these.
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
    r"""Applies :math:`y = z \cdot \sigma(z)`, :math:`z = xW^T + b`; ``nn.Linear`` then ``nn.SiLU``.

    See :func:`torch_fused_linear.linear_silu`; for SiLU in a gated block,
    :math:`\text{SiLU}(xW^T) \odot xV^T`, :class:`torch_fused_linear.FusedGatedMLP`.

    Shapes and parameters are those of :class:`FusedLinear`; for LoRA see :class:`FusedLinearReLU`.

    Args:
        in_features, out_features, bias, device, dtype, memory: as for :class:`FusedLinearGELU`,
            errors too.
    """

    _plain_activation = nn.SiLU

    def forward(self, input: Tensor) -> Tensor:
        return linear_silu(input, self.weight, self.bias, memory=self.memory)


class FusedLinearReLU2(_WithActivation):
    r"""Applies :math:`y = \max(xW^T + b, 0)^2`, the squared ReLU; see
    :func:`torch_fused_linear.linear_relu2`.

    Shapes and parameters are those of :class:`FusedLinear`; for LoRA see :class:`FusedLinearReLU`.

    Args:
        in_features, out_features, bias, device, dtype, memory: as for :class:`FusedLinearGELU`,
            errors too.
    """

    _plain_activation = SquaredReLU

    def forward(self, input: Tensor) -> Tensor:
        return linear_relu2(input, self.weight, self.bias, memory=self.memory)
