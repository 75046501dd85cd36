"""The faults in short, with the shim; and that what they would find is reported."""

import dataclasses
import gc
import json

import pytest
import torch
from helpers import one_thread  # noqa: F401

from certify import faults, fuzz_cases
from certify.test_record import certify


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A record of the files of plans, unit 0, and of a few cases."""
    if not faults.compiler():
        pytest.skip("needs a compiler for C++")
    folder = tmp_path_factory.mktemp("records")
    run = certify("faults", "--count", 4, "--records", folder)
    record = json.loads((folder / "faults_cpu.json").read_text())
    assert record["finished"] and not record["crashed"], run.stdout + run.stderr
    return record


def test_allocations_fail_one_by_one(found):
    assert found["found"]["failed calls"]["posix_memalign"] > 20
    assert [f for f in found["failures"] if f["unit"] != 0] == [] == found["verdict"]


def test_the_calls_of_plan_files_fail_one_by_one(found):
    assert [f for f in found["failures"] if f["unit"] == 0] == []


class Shim:
    """In place of the library: an operator asks it whether this call fails."""

    def __init__(self):
        self.first = self.seen = 0
        # functions, which ctypes gives the types of their arguments
        self.faults_arm = lambda *arguments: self.arm(*arguments)
        self.faults_disarm = lambda: self.disarm()

    def arm(self, name, first, count):
        self.first, self.seen = first, 0

    def disarm(self):
        self.first = 0
        return self.seen

    def fails(self):
        self.seen += self.first > 0
        return 0 < self.seen == self.first


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
def test_a_leak_is_what_only_failures_leave_behind(grows, is_leak, monkeypatch):
    trial = faults.Trial("cpu", measured=False)
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
        (Broken(), "the next call: output is wrong"),
        (None, None),
    ],
    ids=["wrong", "unclear", "leak", "broken", "nothing"],
)
def test_what_a_fault_breaks_is_reported(monkeypatch, on_failure, words):
    def refused(y):
        raise RuntimeError("not enough memory")

    shim, broken = Shim(), on_failure or refused
    monkeypatch.setattr(faults, "preloaded", lambda: shim)
    trial = faults.Trial("cpu", measured=False)
    for name, operator in list(fuzz_cases.OPERATORS.items()):

        def ours(where, x, layer, operator=operator):
            y = operator.ours(where, x, layer)
            if shim.fails():
                return broken(y)
            return y * 1.5 if getattr(broken, "is_broken", False) else y

        changed = dataclasses.replace(operator, ours=ours)
        monkeypatch.setitem(fuzz_cases.OPERATORS, name, changed)
    failures = [text for unit in range(1, 6) for text in trial.one(1, unit).get("failures", [])]
    KEPT.clear()
    assert bool(failures) == (words is not None), failures[:3]
    assert words is None or any(words in text for text in failures), failures[:3]


def test_a_call_that_never_happens_is_reported(monkeypatch):
    monkeypatch.setattr(faults, "preloaded", lambda: Shim())
    trial = faults.Trial("cpu", measured=False)
    assert trial.verdict({}) == ["posix_memalign was never called"]
