"""The layers under the module they had in 0.1, for pickled models; see nn/linear.py."""

from .nn.linear import FusedLinear, FusedLinearGELU, FusedLinearReLU

__all__ = ["FusedLinear", "FusedLinearGELU", "FusedLinearReLU"]
