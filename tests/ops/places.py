"""Devices with policies: what is worth running where; modes."""

import contextlib
import itertools
from collections.abc import Sequence

import pytest
import torch
from operators import POLICIES

import torch_fused_linear as tfl

MODES = {
    "gradients": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "eager": lambda: tfl.set_policy("eager"),
}


def places(on_cpu: Sequence[str] = ("auto", "eager"), on_cuda: Sequence[str] = POLICIES):
    """On a CPU only the nodes of ReLU's own layer tell "cublaslt" from "auto"."""
    pairs = [*itertools.product(["cpu"], on_cpu), *itertools.product(["cuda"], on_cuda)]
    marks = {"cpu": (), "cuda": pytest.mark.cuda}
    values = [pytest.param(torch.device(d), policy, marks=marks[d]) for d, policy in pairs]
    return pytest.mark.parametrize("device, policy", values, ids=["-".join(p) for p in pairs])
