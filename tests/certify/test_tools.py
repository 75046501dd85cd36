"""Sanitizers and speed: what they judge by, without running a tool or a GPU."""

import pytest
from bench_records import record_of

from certify import sanitizers, speed


def test_a_program_that_is_not_clean_is_reported(monkeypatch):
    tested = {"a b": False, "a c": True}
    monkeypatch.setattr(sanitizers.sanitized, "tested", lambda kind: tested)
    found = sanitizers.compiled("thread")
    assert found == {"clean": {"thread": 1}, "failures": ["thread: a b"]}


def test_cuda_tools_are_asked_for_on_a_gpu_only():
    assert sanitizers.Trial.units("cpu") == ("address", "thread")
    assert len(sanitizers.Trial.units("cuda")) == 6


@pytest.mark.parametrize("again, below", [(1.0, 0), (0.9, 1)])
def test_what_is_slower_each_time_is_reported(again, below):
    record = record_of(speed.drawn(1, 2), ours=100, eager=90)
    found = speed.judged(record, again=lambda case, name: again)
    assert (found["measured"], found["below"], len(found["failures"])) == (1, below, below)


def test_shapes_are_the_same_again_and_differ():
    cases = [speed.drawn(1, unit) for unit in range(200)]
    assert cases == [speed.drawn(1, unit) for unit in range(200)]
    assert len(set(map(str, cases))) > 190
