"""How exact products are with TF32 and without."""

import pytest
import torch
from numerics import in_double, names, run
from operators import Case

FLOAT32_LEVEL, TF32_LEVEL = 2e-6, 2e-5  # relative errors below and above which no doubt is left
needs_tf32 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0),
    reason="needs a GPU with TF32",
)


def off_zero(op, case, least=1e-2):
    """Returns the case without values whose sign rounding may change."""
    near = op.product(*in_double(case).inputs).abs() < least
    return Case(case.inputs, case.g.masked_fill(near, 0))


def error(got, want):
    """Mean error, relative to the size of the result."""
    return float((got.double() - want).abs().mean() / want.abs().mean())


def errors(op, case, call=None):
    """The errors of the products, by their names."""
    columns = names(case), run(call or op.call, case)[:3], run(op.eager, in_double(case))
    return {name: error(got, want) for name, got, want in zip(*columns)}
