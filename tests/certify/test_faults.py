"""The faults in short, with the shim; and that what they would find is reported."""

import gc
import json

import pytest
import torch
from helpers import one_thread  # noqa: F401

from certify import faults, fuzz_cases
from certify.test_record import certify


@pytest.mark.skipif(not faults.compiler(), reason="needs a compiler for C++")
def test_the_calls_of_plan_files_and_allocations_fail_one_by_one(tmp_path):
    """Plan files fail in unit 0, and allocations in a few cases."""
    certify("faults", "--count", 4, "--records", tmp_path)
    record = json.loads((tmp_path / "faults_cpu.json").read_text())
    assert record["found"]["failed calls"]["of the plan file"] >= 7
    assert record["found"]["failed calls"]["posix_memalign"] > 20


class Shim:
    """Replaces the library: an operator asks it whether this call fails."""

    def __init__(self):
        self.first = self.seen = 0
        # functions, which ctypes gives the types of their arguments
        self.faults_arm = lambda *arguments: self.arm(*arguments)
        self.faults_disarm = lambda: self.disarm()

    def arm(self, name, first):
        self.first, self.seen = first, 0

    def disarm(self):
        self.first = 0
        return self.seen

    def fails(self):
        self.seen += self.first > 0
        return 0 < self.seen == self.first


@pytest.fixture
def trial(monkeypatch):
    monkeypatch.setattr(faults, "preloaded", Shim)
    yield faults.Trial("cpu", measured=False)
    gc.unfreeze()


KEPT = []


def keeps(y):
    KEPT.append(torch.empty(100_000))
    raise RuntimeError("not enough memory")


class Broken:
    """Right at first, and wrong after the first failure."""

    def __init__(self):
        self.is_broken = False

    def __call__(self, y):
        self.is_broken = True
        raise RuntimeError("not enough memory")


def unclear(y):
    raise RuntimeError("something else")


@pytest.mark.parametrize(
    ("grows", "is_leak"),
    [
        (lambda failed, calls: 600 * failed, True),
        (lambda failed, calls: 1_000 * calls * failed * (calls & (calls - 1) == 0), True),
        (lambda failed, calls: 300_000 * (calls in (9, 30)), False),
        (lambda failed, calls: 600, False),
        (lambda failed, calls: 400 * failed, False),
    ],
    ids=["each time", "a list that doubles", "now and then", "without a failure, too", "little"],
)
def test_a_leak_is_what_only_failures_leave_behind(trial, grows, is_leak, monkeypatch):
    used = {True: 0, False: 0, "bytes": 0}

    def call(name, nth, case):
        fails = nth > 0
        used[fails] += 1
        used["bytes"] += grows(fails, used[fails])

    monkeypatch.setattr(trial, "run", call)
    monkeypatch.setattr(faults, "memory", lambda device: {"the CPU": used["bytes"], "the GPU": 0})
    assert bool(trial.leaked("malloc", 1, None)) == is_leak


@pytest.mark.parametrize(
    "on_failure, words",
    [
        (lambda y: y * 1.5, "wrong: error"),
        (unclear, "the error is not clear: 'RuntimeError: something else'"),
        (keeps, "bytes of the CPU are lost each time"),
        (Broken(), "the next call: output: wrong"),
        (None, None),
    ],
    ids=["wrong", "unclear", "leak", "broken", "nothing"],
)
def test_damage_by_a_fault_is_reported(trial, monkeypatch, on_failure, words):
    def refused(y):
        raise RuntimeError("not enough memory")

    broken, right = on_failure or refused, fuzz_cases.one_of_ours

    def ours(*call):
        y = right(*call)
        if trial.shim.fails():
            return broken(y)
        return y * 1.5 if getattr(broken, "is_broken", False) else y

    monkeypatch.setattr(fuzz_cases, "one_of_ours", ours)
    failures = [text for unit in range(1, 6) for text in trial.one(1, unit).get("failures", [])]
    KEPT.clear()
    assert bool(failures) == (words is not None), failures[:3]
    assert words is None or any(words in text for text in failures), failures[:3]


def test_a_call_that_never_happens_is_reported():
    assert faults.Trial.verdict({}, "cpu") == ["posix_memalign was never called"]
