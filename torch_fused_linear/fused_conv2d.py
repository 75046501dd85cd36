"""FusedConv2dReLU under the module it had in 0.1, for pickled models; see nn/conv.py."""

from .nn.conv import FusedConv2dReLU

__all__ = ["FusedConv2dReLU"]
