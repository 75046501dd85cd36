"""Sanitizers and speed: what they judge by, without running a tool or a GPU."""

import subprocess
from types import SimpleNamespace

import pytest

from certify import sanitizers, speed


def ended(status, text):
    return subprocess.CompletedProcess([], status, stdout=text, stderr="no compiler")


@pytest.mark.parametrize(
    "run, failures",
    [
        (ended(0, "a b: clean\n1 of 1 tests are clean under"), []),
        (ended(1, "a b: failed\na c: clean\n1 of 2 tests are clean"), ["thread: a b"]),
        (ended(1, ""), ["thread: it did not run: no compiler"]),
    ],
)
def test_a_program_that_is_not_clean_is_reported(run, failures):
    assert sanitizers.judged("thread", run)["failures"] == failures


def test_cuda_tools_are_asked_for_on_a_gpu_only():
    assert sanitizers.tools("cpu") == ("address", "thread")
    assert len(sanitizers.tools("cuda")) == 6
    assert sanitizers.Trial("cpu", False).one(1, 5) == {"without a GPU": 1}


@pytest.mark.parametrize(
    "first, later, below", [(1.2, [], 0), (0.9, [1.0], 0), (0.9, [0.9] * 3, 1)]
)
def test_what_is_slower_each_time_is_reported(first, later, below):
    case = speed.drawn(1, 2)
    result = SimpleNamespace(failed={}, speedup=lambda name: first if name == "ours" else None)
    times = iter(later)
    found = speed.judged(case, result, again=lambda case, name: next(times))
    assert (found["measured"], found["below"], len(found["failures"])) == (1, below, below)


def test_shapes_are_the_same_again_and_differ():
    cases = [speed.drawn(1, unit) for unit in range(200)]
    assert cases == [speed.drawn(1, unit) for unit in range(200)]
    assert len(set(map(str, cases))) > 190
