"""The layer that stands in the place of ``nn.Conv2d`` and its ReLU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device
from typing_extensions import Self

from ..functional import conv2d_relu
from .taking_over import Layer, check_given_back, check_plain, made_like


class FusedConv2dReLU(nn.Conv2d):
    r"""Applies a convolution and ReLU, :math:`y = \max(\text{conv2d}(x, W) + b, 0)`.

    Equivalent to ``nn.Conv2d`` followed by ``nn.ReLU``. On a GPU cuDNN applies bias and ReLU within
    its convolution if that is faster and right; otherwise one pass of our own does. The backward is
    one pass over memory for the gradients of ReLU and of the bias, followed by cuDNN's two
    products. See :func:`torch_fused_linear.conv2d_relu`.

    Args:
        in_channels: number of channels of the image.
        out_channels: number of channels of the result.
        kernel_size: one number or (height, width).
        stride, padding, dilation: one number or (height, width); padding also ``'same'`` or
            ``'valid'``. Default: 1, 0 and 1.
        groups: number of groups that the channels are divided into. Default: 1.
        bias: if ``False``, the layer has no bias. Default: ``True``.
        padding_mode: ``'zeros'``, ``'reflect'``, ``'replicate'`` or ``'circular'``. All except
            zeros are put around the image before the operator. Default: ``'zeros'``.
        device, dtype: device and dtype of the parameters. Default: PyTorch's defaults.

    Shape:
        - Input: :math:`(N, C_\text{in}, H, W)` or :math:`(C_\text{in}, H, W)`, contiguous or
          channels-last.
        - Output: :math:`(N, C_\text{out}, H_\text{out}, W_\text{out})` or
          :math:`(C_\text{out}, H_\text{out}, W_\text{out})`, with the sizes that
          :class:`torch.nn.Conv2d` gives.

    Attributes:
        weight, bias: as in :class:`torch.nn.Conv2d`, whose ``state_dict`` loads as it is.

    Raises:
        RuntimeError: ``padding`` was set to another word after the layer was made.

    Examples::

        >>> layer = FusedConv2dReLU(3, 8, 3, padding=1)
        >>> layer(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    def forward(self, input: Tensor) -> Tensor:
        padding = [0, 0]
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        elif isinstance(self.padding, str):
            if self.padding == "same":
                rows, columns = self.kernel_size
                if not torch.jit.is_tracing():  # which would trace the shape
                    rows, columns = self.weight.shape[2], self.weight.shape[3]
                step = self.dilation
                if isinstance(step, int):  # set later
                    step = (step, step)
                height, width = step[0] * (rows - 1), step[-1] * (columns - 1)
                padding = [height // 2, width // 2]
                if height % 2 != 0 or width % 2 != 0:  # one more below and to the right
                    input = F.pad(input, [0, width % 2, 0, height % 2])
            elif self.padding != "valid":
                raise RuntimeError("conv2d_relu: invalid padding " + self.padding)
        elif isinstance(self.padding, int):  # set later
            padding = [self.padding, self.padding]
        else:
            padding = list(self.padding)
        return conv2d_relu(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups
        )

    @classmethod
    def from_conv(
        cls, conv: nn.Conv2d, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Makes a fused layer that shares ``conv``'s parameters: the same objects, not copies.

        Args:
            conv: exactly an ``nn.Conv2d``, without hooks or anything else that the fused layer
                would not have.
            device, dtype: device and dtype of the parameters. Default: the ones they have. A
                parameter of another device or dtype is copied.

        Returns:
            The fused layer, in the mode (training or not) of ``conv``.

        Raises:
            TypeError: ``conv`` is something else or has more, as for
                :meth:`FusedLinear.from_linear`.

        Examples::

            >>> conv = nn.Conv2d(3, 8, 3)
            >>> FusedConv2dReLU.from_conv(conv).weight is conv.weight
            True
        """
        check_plain(f"{cls.__name__}.from_conv", conv, (nn.Conv2d,))
        return _like(conv, cls, device, dtype)

    def to_conv(self) -> nn.Conv2d:
        """Returns an ``nn.Conv2d`` that shares this layer's parameters, without the ReLU.

        Returns:
            The plain layer, in the mode (training or not) of this one.

        Raises:
            TypeError: something would be lost, as for :meth:`FusedLinear.to_linear`.

        Examples::

            >>> FusedConv2dReLU(3, 8, 3).to_conv()
            Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
        """
        check_given_back("to_conv", self, (FusedConv2dReLU,))
        return _like(self, nn.Conv2d)

    def to_unfused(self) -> nn.Module:
        """Returns the layer in plain ``torch.nn``, sharing this layer's parameters.

        Returns:
            An ``nn.Sequential`` of ``nn.Conv2d`` and ``nn.ReLU``.

        Raises:
            TypeError: something would be lost, as for :meth:`FusedLinear.to_linear`.

        Examples::

            >>> len(FusedConv2dReLU(3, 8, 3).to_unfused())
            2
        """
        return nn.Sequential(self.to_conv(), nn.ReLU()).train(self.training)


def _like(conv: nn.Conv2d, cls: type[Layer], device=None, dtype=None) -> Layer:
    sizes = conv.in_channels, conv.out_channels, conv.kernel_size
    names = ("stride", "padding", "dilation", "groups", "padding_mode")
    how = {name: getattr(conv, name) for name in names}
    return made_like(conv, cls, *sizes, device=device, dtype=dtype, **how)
