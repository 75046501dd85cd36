"""FusedMLP under the module it had in 0.1, for pickled models; see nn/mlp.py."""

from .nn.mlp import FusedMLP

__all__ = ["FusedMLP"]
