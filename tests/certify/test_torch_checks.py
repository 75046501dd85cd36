"""torch's checks: of one operator, of all on request, and that they report a fault."""

from dataclasses import replace

import pytest
import torch
from helpers import one_thread  # noqa: F401
from operators import RELU

import torch_fused_linear as tfl
from certify import torch_checks


def failures():
    trial = torch_checks.Trial("cpu", measured=False)
    found = [trial.one(1, unit) for unit in range(len(trial.units("cpu")))]
    assert [list(one["checks"]) for one in found[:5]] == [
        [check.__name__] for check in torch_checks.CHECKS
    ]
    return [text for one in found for text in one.get("failures", [])]


# The others' findings are those of tests/ops and tests/autograd.
@pytest.mark.parametrize("rows", [(RELU,), pytest.param(torch_checks.ROWS, marks=pytest.mark.long)])
def test_every_check_of_operators(rows, monkeypatch):
    monkeypatch.setattr(torch_checks, "ROWS", rows)
    assert failures() == []


def test_every_public_operator_has_a_row():
    public = {name for name in tfl.__all__ if hasattr(torch.ops.fused, name)}
    assert {row.name for row in torch_checks.ROWS} == public


class Half(torch.autograd.Function):
    """The identity, with half its gradient."""

    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, g: g / 2)


def test_a_wrong_gradient_is_reported(monkeypatch):
    wrong = replace(RELU, function=lambda *tensors: Half.apply(RELU.function(*tensors)))
    monkeypatch.setattr(torch_checks, "ROWS", (wrong,))
    checks = [text.split(" of linear_relu relu: ")[0] for text in failures()]
    assert checks == ["reference", "noncontiguous", "gradients"]
