"""Linear layers with their activation fused in: ``act(x Wᵀ + b)``, trainable, on GPU and CPU."""

from . import _library

if _library.load():
    from .functional import linear, linear_gelu, linear_relu, mlp
    from .fused_mlp import FusedMLP
    from .modules import FusedLinear, FusedLinearGELU, FusedLinearReLU
    from .policy import get_policy, handover, set_policy
    from .report import explain

    __all__ = [
        "FusedLinear",
        "FusedLinearGELU",
        "FusedLinearReLU",
        "FusedMLP",
        "explain",
        "get_policy",
        "handover",
        "linear",
        "linear_gelu",
        "linear_relu",
        "mlp",
        "set_policy",
    ]

__version__ = "0.1.0"
