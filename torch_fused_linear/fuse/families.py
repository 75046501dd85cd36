"""What is known about models beyond what the code of one ``forward`` tells.

A block whose ``forward`` passes a linear layer's output straight to an activation needs no entry:
that is read from its code (runs.py). An entry is needed where the next linear layer lies in
another module or behind a branch, and for an activation class of another library.
"""

import posixpath
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F

# Where the output of a block's activation goes: the block's class, as a shell pattern, and the path
# from it to the linear layer that takes that output.
FAMILIES = {
    # BERT, RoBERTa, ELECTRA and their many relatives: BertLayer holds both halves.
    "transformers.models.*Intermediate": "../output.dense",
    # T5 v1.0, mT5, LongT5: a cast to wo's dtype stands in an if between.
    "transformers.models.*DenseActDense": "wo",
}

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


def next_linear_of(path: str, block: type) -> str | None:
    """The path, in the model, of the linear layer that follows the block at `path`."""
    for pattern, following in FAMILIES.items():
        if fnmatchcase(full_name(block), pattern):
            joined = posixpath.join(path.replace(".", "/"), following)
            return posixpath.normpath(joined).replace("/", ".")
    return None
