"""Linear layers with their activation fused in: ``act(x Wᵀ + b)``, trainable, on GPU and CPU."""

from . import _library

if _library.load():
    from .functional import linear, linear_gelu, linear_relu
    from .modules import FusedLinear, FusedLinearGELU, FusedLinearReLU
    from .policy import get_policy, set_policy

    __all__ = [
        "FusedLinear",
        "FusedLinearGELU",
        "FusedLinearReLU",
        "get_policy",
        "linear",
        "linear_gelu",
        "linear_relu",
        "set_policy",
    ]

__version__ = "0.1.0"
