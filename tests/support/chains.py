"""Chains of layers for the tests of fused::mlp."""

import pytest
import torch
from helpers import (  # noqa: F401
    DTYPES,
    ERRORS,
    Tally,
    one_thread,
    policy,
    saved_bytes,
    typical_sizes,
    ulp,
)
from stacks import Stack

ACTIVATIONS = ["relu", "gelu_tanh", "gelu_erf", "silu", "relu2"]

activation_param = pytest.mark.parametrize("activation", ACTIVATIONS)


class Chain(Stack):
    """The parameters of a chain with one activation between all layers."""

    def __init__(self, activation, layers, **options):
        super().__init__([activation] * (layers - 1) + ["none"], **options)
        self.activation = activation

    def mlp(self):
        return torch.ops.fused.mlp(self.x, self.weights, self.biases, self.activation)

    def eager(self):
        return self(fused=False)

    def without_some_biases(self):
        self.biases = [None if k % 2 else b for k, b in enumerate(self.biases)]
        return self
