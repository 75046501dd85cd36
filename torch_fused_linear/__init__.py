"""Fused linear layers for PyTorch: ``act(x Wᵀ + b)`` as one trainable operator, on GPU and CPU.

The import registers the operators and reads the file that ``TORCH_FUSED_LINEAR_PLANS`` names. The
first call that needs one reads the other environment variables. Rules for torch's FLOP counter and
for ``DTensor`` are registered when torch's modules for these are imported.
"""

from typing import NoReturn as _NoReturn

from torch import ops as _ops

from ._support import library as _library
from .fuse import fuse_, is_fused, unfuse_

_library.say_what_is_wrong(stacklevel=3)
if _library.error is None:
    from . import flops, plans
    from ._support.library import library_path
    from ._torch import sharding as _sharding
    from .accumulation import accumulate_gradients
    from .functional import (
        conv2d_relu,
        float8_gated_mlp,
        float8_linear,
        float8_mlp,
        gated_mlp,
        linear,
        linear_gelu,
        linear_glu,
        linear_relu,
        linear_relu2,
        linear_silu,
        mlp,
    )
    from .fuse.script import fuse_script_
    from .gain import gain
    from .graph.options import compile_backend, compile_options
    from .nn.conv import FusedConv2dReLU
    from .nn.gated import FusedGatedMLP
    from .nn.linear import (
        FusedLinear,
        FusedLinearGELU,
        FusedLinearReLU,
        FusedLinearReLU2,
        FusedLinearSiLU,
    )
    from .nn.mlp import FusedMLP
    from .onnx import onnx_translation_table
    from .packing import pack_weights, unpack_weights
    from .policy import get_policy, set_policy
    from .report import explain

    flops.register_when_imported()
    _sharding.register_when_imported()

    # A file that cannot be used is told of now, not in the middle of the work.
    _ops.fused._plans_from_environment()

__all__ = [
    "FusedConv2dReLU",
    "FusedGatedMLP",
    "FusedLinear",
    "FusedLinearGELU",
    "FusedLinearReLU",
    "FusedLinearReLU2",
    "FusedLinearSiLU",
    "FusedMLP",
    "accumulate_gradients",
    "compile_backend",
    "compile_options",
    "conv2d_relu",
    "explain",
    "float8_gated_mlp",
    "float8_linear",
    "float8_mlp",
    "flops",
    "fuse_",
    "fuse_script_",
    "gain",
    "gated_mlp",
    "get_policy",
    "is_fused",
    "library_path",
    "linear",
    "linear_gelu",
    "linear_glu",
    "linear_relu",
    "linear_relu2",
    "linear_silu",
    "mlp",
    "onnx_translation_table",
    "pack_weights",
    "plans",
    "set_policy",
    "unfuse_",
    "unpack_weights",
]

__version__ = "0.2.0"


def __getattr__(name: str) -> _NoReturn:
    """Raises ``ImportError`` for a public name if the compiled library is missing."""
    if name in __all__:
        _library.require()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names; the modules behind them are imported by their own names."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
