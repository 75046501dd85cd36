"""One model of the zoo: the same outputs and gradients before and after fuse_ and unfuse_."""

from __future__ import annotations

import contextlib
import copy
import random
import re
import time
from typing import Any

import numpy
import torch
import zoo
from torch import Tensor, nn
from torch.utils import _pytree
from tree_compare import close, size

import torch_fused_linear as tfl

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
# A larger or slower model runs in float32 and without a training step.
LARGE, SLOW = 20_000_000, 0.5


def tensors(output: Any) -> list[Tensor]:
    leaves = _pytree.tree_leaves(output)
    leaves = [t for leaf in leaves for t in (leaf.values() if isinstance(leaf, dict) else [leaf])]
    return [t for t in leaves if torch.is_tensor(t) and not t.is_nested]


def seed() -> None:
    """For all generators of random numbers that models use."""
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


def forward(model: nn.Module, inputs: dict) -> list[Tensor]:
    seed()
    with torch.no_grad():
        return [t.clone() for t in tensors(model.eval()(**inputs))]


def step(model: nn.Module, inputs: dict) -> list[Tensor | None]:
    """The gradients of one training step with fixed random numbers."""
    seed()
    model.train().zero_grad()
    outputs = [t for t in tensors(model(**inputs)) if t.requires_grad and t.is_floating_point()]
    if not outputs:
        raise RuntimeError("no output depends on a parameter")
    weights = [torch.linspace(0.5, 1.5, t.numel()).reshape(t.shape).to(t) for t in outputs]
    sum((t * w).mean() for t, w in zip(outputs, weights)).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def differ(got: list, want: list) -> str | None:
    """How far apart they are, where that is too far."""
    if len(got) != len(want):
        return f"{len(got)} tensors, plain {len(want)}"
    least = 1e-6 * max((size(t) for t in want if t is not None), default=0.0)
    for i, (ours, theirs) in enumerate(zip(got, want)):
        if ours is None or theirs is None:
            is_same = ours is theirs
        else:
            tolerance = TOLERANCE.get(theirs.dtype, 0.05) if theirs.is_floating_point() else 0.0
            is_same = close(ours, theirs, tolerance, least)
        if not is_same:
            return f"tensor {i}: {ours}, plain {theirs}"[:300]
    return None


def is_large(model: nn.Module, inputs: dict) -> bool:
    started = time.time()
    forward(model, inputs)
    return sum(p.numel() for p in model.parameters()) > LARGE or time.time() - started > SLOW


def in_double(model: nn.Module, inputs: dict) -> tuple[nn.Module, dict]:
    """In double precision where the model runs in it: then equal means to 8 digits."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with contextlib.suppress(Exception):
        other = copy.deepcopy(model).double()
        forward(other, wide)
        return other, wide
    return model, inputs


def plain_results(run, model: nn.Module, inputs: dict) -> tuple[list | None, str]:
    """The plain model's results, if they are the same twice, else the reason."""
    try:
        first, second = run(model, inputs), run(model, inputs)
    except Exception as error:
        return None, f"plain: {told(error)}"[:200]
    if reason := differ(second, first):
        return None, f"plain, twice: {reason}"
    return first, ""


def told(error: Exception) -> str:
    """In words, without this machine's folders."""
    return re.sub(r"/[^\s'\"]*/site-packages/", "", f"{type(error).__name__}: {error}")


def compare(run, model: nn.Module, inputs: dict, want: list) -> str | bool:
    try:
        return differ(run(model, inputs), want) or True
    except Exception as error:
        return told(error)[:300]


def check(name: str, steps: bool | None = None) -> dict[str, Any]:
    """The record of one model. ``skipped`` says why there is nothing to compare.

    Args:
        steps: whether a training step is compared as well; by default of small models only.
    """
    start = time.time()
    record: dict[str, Any] = {"name": name}
    try:
        model, inputs = zoo.load(name)
    except Exception as error:
        record["skipped"] = told(error)[:200]
        record["seconds"] = round(time.time() - start, 1)
        return record
    large = is_large(model, inputs) if steps is None else not steps
    if not large:
        model, inputs = in_double(model, inputs)
    record["dtype"] = str(next((p.dtype for p in model.parameters()), torch.float32))[6:]
    outputs, why = plain_results(forward, model, inputs)
    # Running statistics change in a step: every step starts from this state.
    state = copy.deepcopy(model.state_dict())
    gradients, why_not = None, "not asked for a large model"
    if not large:
        gradients, why_not = plain_results(step, model, inputs)
    if outputs is None:
        record["skipped"] = why
    else:
        model.load_state_dict(state)
        record["blocks"] = len(tfl.fuse_(model).fused)
        record["forward"] = compare(forward, model, inputs, outputs)
        record["step"] = compare(step, model, inputs, gradients) if gradients else why_not
        model.load_state_dict(state)
        tfl.unfuse_(model)
        record["unfused"] = compare(forward, model, inputs, outputs)
    record["seconds"] = round(time.time() - start, 1)
    return record
