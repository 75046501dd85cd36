"""torch's checks, in processes of their own: to import them freezes cuDNN's flags."""

import json

import pytest

from certify.test_record import certify, python

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")


def test_every_check_of_every_operator(tmp_path):
    run = certify("torch", "--records", tmp_path)
    record = json.loads((tmp_path / "torch_cpu.json").read_text())
    assert run.returncode == 0, run.stdout
    assert record["done"] == sum(record["found"]["checks"].values()) == record["asked"]["count"]


PLANTED = """
import torch
import torch_fused_linear as tfl
from certify import torch_checks as t
right = t.OPERATORS[1].op
class Half(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, g: g / 2)
t.OPERATORS[1].op = lambda *args: Half.apply(right(*args))
trial = t.Trial("cpu", False)
public = {n for n in tfl.__all__ if hasattr(torch.ops.fused, n)}
assert {op.name.removeprefix("fused.") for op in t.OPERATORS} == public
assert len(trial.units("cpu")) == 6 * len(t.OPERATORS)
print(*(f for unit in range(12) for f in trial.one(1, unit).get("failures", [])), sep="\\n")
"""


def test_a_wrong_gradient_is_reported():
    run = python("-c", PLANTED)
    assert run.returncode == 0, run.stderr
    words = run.stdout.splitlines()
    assert words and all("of fused.linear_relu" in line for line in words), words
    checks = {line.split(" of ")[0] for line in words}
    assert {"reference", "noncontiguous", "gradients"} <= checks
