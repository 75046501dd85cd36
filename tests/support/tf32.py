"""How exact products are with TF32 and without."""

import pytest
import torch
from numerics import in_double, names, run

FLOAT32_LEVEL, TF32_LEVEL = 2e-6, 2e-5  # relative errors below and above which no doubt is left
needs_tf32 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0),
    reason="needs a GPU with TF32",
)


def errors(op, case):
    """Relative to the size of the result: mean error of the products."""
    truth = run(op.eager, in_double(case))
    found = {}
    for name, got, want in zip(names(case), run(op.call, case)[:3], truth):
        found[name] = float((got.double() - want).abs().mean() / want.abs().mean())
    return found
