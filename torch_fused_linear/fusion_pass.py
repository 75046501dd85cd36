"""The pass of `torch.compile` for passes and backends of your own; see graph/fusion_pass.py."""

from .graph.fusion_pass import FusionPass, apply

__all__ = ["FusionPass", "apply"]
