"""The soak, torch's checks, sanitizers and speed in short, and that they report what is wrong."""

import threading
from dataclasses import replace

import pytest
import torch
from bench_records import record_of
from helpers import one_thread  # noqa: F401
from operators import RELU

import torch_fused_linear as tfl
from certify import sanitizers, soak, speed, torch_checks
from certify.test_fuzz import Backward


def test_training_in_threads(device):
    found = soak.Trial(device.type, measured=False).one(1, 0)
    assert found["failures"] == [] and found["rounds"] >= 1


@pytest.mark.parametrize(
    "in_threads, serial, words",
    [(1.001, 1, "other bits"), (1.5, 1.5, "losses"), (None, 1, "ValueError: planted")],
    ids=["bits", "losses", "error"],
)
def test_a_wrong_result_is_reported(monkeypatch, in_threads, serial, words):
    trained = soak.Work.trained

    def changed(self, fused):
        losses, parameters = trained(self, fused)
        in_main = threading.current_thread() is threading.main_thread()
        factor = in_threads if not in_main else serial if fused else 1
        if factor is None:
            raise ValueError("planted")
        return [factor * loss for loss in losses], parameters

    monkeypatch.setattr(soak.Work, "trained", changed)
    work = [soak.Work(f"1 {k}", "cpu") for k in range(2)]
    failures = soak.Trial("cpu", measured=False).compared(work)
    assert len(failures) == 2 and all(words in text for text in failures), failures


def test_memory_that_grows_is_reported():
    trial, mib = soak.Trial("cpu", measured=False), 1 << 20
    assert trial.verdict({"memory": [(300 + k % 7) * mib for k in range(100)]}) == []
    wrong = trial.verdict({"memory": [(300 + k) * mib for k in range(100)]})
    assert wrong == ["memory grew from 349 to 375 MiB"]


def failures():
    trial = torch_checks.Trial("cpu", measured=False)
    found = [trial.one(1, unit) for unit in range(len(trial.units("cpu")))]
    names = [[check.__name__] for check in torch_checks.CHECKS]
    assert [list(one["checks"]) for one in found[:5]] == names
    return [text for one in found for text in one.get("failures", [])]


# The others' findings are those of tests/ops and tests/autograd.
@pytest.mark.parametrize("rows", [(RELU,), pytest.param(torch_checks.ROWS, marks=pytest.mark.long)])
def test_every_check_of_operators(rows, monkeypatch):
    monkeypatch.setattr(torch_checks, "ROWS", rows)
    assert failures() == []


def test_every_public_operator_has_a_row():
    public = {name for name in tfl.__all__ if hasattr(torch.ops.fused, name)}
    # torch's checks compare with fp64 within a product's error: casts to FP8 are far from it
    public -= {name for name in public if name.startswith("float8_")}
    assert {row.name for row in torch_checks.ROWS} == public


def test_a_wrong_gradient_is_reported(monkeypatch):
    wrong = replace(RELU, function=lambda *tensors: Backward.apply(RELU.function(*tensors)))
    monkeypatch.setattr(torch_checks, "ROWS", (wrong,))
    checks = [text.split(" of linear_relu relu: ")[0] for text in failures()]
    assert checks == ["reference", "noncontiguous", "gradients"]


def test_a_program_that_is_not_clean_is_reported(monkeypatch):
    monkeypatch.setattr(sanitizers.sanitized, "tested", lambda kind: {"a b": False, "a c": True})
    assert sanitizers.compiled("thread") == {"clean": {"thread": 1}, "failures": ["thread: a b"]}


@pytest.mark.parametrize("again, below", [(1.0, 0), (0.9, 1)])
def test_a_slowdown_in_every_run_is_reported(again, below):
    record = record_of(speed.drawn(1, 2), ours=100, eager=90)
    found = speed.judged(record, again=lambda case, name: again)
    assert (found["measured"], found["below"], len(found["failures"])) == (1, below, below)


def test_shapes_are_the_same_again_and_differ():
    cases = [speed.drawn(1, unit) for unit in range(200)]
    assert cases == [speed.drawn(1, unit) for unit in range(200)]
    assert len(set(map(str, cases))) > 190
