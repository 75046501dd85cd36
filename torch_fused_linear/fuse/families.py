"""Activation classes of other libraries that ``fuse_`` knows, and why it refuses others.

A block needs no entry: ``fuse_`` reads it from the code of its ``forward`` (runs.py).
"""

import torch
import torch.nn.functional as F

# The function of each activation class, by the operators' names. Every formula here is the very
# function, whatever operations it is written in; approximations of another kind are left out.
ACTIVATIONS = {
    "torch_fused_linear.activations.SquaredReLU": "relu2",
    "transformers.activations.ReLUSquaredActivation": "relu2",
    "timm.layers.activations.GELU": "gelu_erf",
    "timm.layers.activations.Swish": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.GELUActivation": "gelu_erf",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.PytorchGELUTanh": "gelu_tanh",  # before transformers 5
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.FastGELUActivation": "gelu_tanh",  # sqrt(2 / pi) to ten digits
    "transformers.activations.AccurateGELUActivation": "gelu_tanh",
}
# Modules whose classes are activations, fused or not: what is left alone gets a reason.
ACTIVATION_LIBRARIES = {"torch.nn.modules.activation"}
ACTIVATION_LIBRARIES |= {name.rpartition(".")[0] for name in ACTIVATIONS}
REFUSALS = {
    "QuickGELU": "it is x·sigmoid(1.702x), not GELU",
    "QuickGELUActivation": "it is x·sigmoid(1.702x), not GELU",
    "ClippedGELUActivation": "it clips GELU's output",
}

# Functions that are activations, fused or not.
NAMES = ("relu", "gelu", "silu", "mish", "tanh", "sigmoid", "elu", "selu", "leaky_relu", "relu6")
ACTIVATION_FUNCTIONS = [getattr(lib, n) for lib in (torch, F) for n in NAMES if hasattr(lib, n)]

CONV1D = "transformers.pytorch_utils.Conv1D"


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
