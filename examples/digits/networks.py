"""The network of nvmath-python's tutorial, fused and plain, and its loss."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_linear import FusedMLP

CLASSES = 10
# Output of the tutorial's notebook 03_backpropagation for MNIST: the loss at the first batch and
# at the last that it prints, and the accuracy. Ours differs in two things: the random numbers
# behind the initial weights, and testing on all test images (the notebook drops the last 16).
LAST_PRINTED = 220
PUBLISHED = (0.6833, 0.0566, 0.9146)


def build_networks(sizes: Sequence[int], seed: int) -> tuple[nn.Module, nn.Module]:
    """A fused network and its plain twin with the same weights; ReLU between the layers."""
    torch.manual_seed(seed)
    linears = [nn.Linear(wide, narrow) for wide, narrow in itertools.pairwise(sizes)]
    plain = nn.Sequential(*[module for linear in linears for module in (linear, nn.ReLU())][:-1])
    fused = FusedMLP(*sizes)
    fused.load_state_dict(plain.state_dict())
    return fused, plain


def sigmoid_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of ten sigmoid outputs, summed over them and averaged over the batch.

    The sigmoid is inside the loss, so the gradient of the logits is exactly sigmoid - target.
    """
    targets = F.one_hot(labels, CLASSES).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(labels)
