"""The verdict of the gate of speed, on made-up records."""

import gpu_gate

from benchmarks.cases import Case
from benchmarks.results import Record
from torch_fused_linear.timing import Number

CASE = Case("layer", (64, 64), 8, "bf16", "relu", "step")


def record(ours, eager, failed=None):
    numbers = {"ours": Number.once(ours), "eager": Number.once(eager)}
    return Record(CASE, "us", numbers, failed or {})


def no_second_look(case, name):
    raise AssertionError("measured again without need")


def test_what_is_fast_passes():
    verdict = gpu_gate.judge([record(100, 150), record(100, 98.5)], no_second_look)
    assert verdict["below"] == []
    assert verdict["measured"] == 1  # one case, twice
    assert list(verdict["worst_ratios"].values()) == [0.985]


def test_what_is_slow_once_is_measured_again():
    ratios = iter([0.9, 1.2])
    verdict = gpu_gate.judge([record(100, 80)], lambda case, name: next(ratios))
    assert verdict["below"] == []
    assert list(verdict["worst_ratios"].values()) == [1.2]
    assert next(ratios, None) is None


def test_what_is_slow_every_time_is_below():
    looks = []

    def again(case, name):
        looks.append((case, name))
        return 0.95

    verdict = gpu_gate.judge([record(100, 80)], again)
    assert verdict["below"] == [f"{CASE} ours"]
    assert verdict["worst_ratios"] == {f"{CASE} ours": 0.95}
    assert looks == [(CASE, "ours")] * gpu_gate.REPEATS


def test_what_does_not_run_is_below():
    failed = Record(CASE, "us", {"eager": Number.once(80)}, {"ours": "RuntimeError: no"})
    assert gpu_gate.judge([failed], no_second_look)["below"] == [f"{CASE} ours"]


def test_only_the_worst_are_listed():
    records = []
    for tokens in range(1, 31):
        r = record(100, 100 + tokens)
        r.case = Case("layer", (64, 64), tokens, "bf16", "relu", "step")
        records.append(r)
    verdict = gpu_gate.judge(records, no_second_look)
    assert verdict["measured"] == 30 and len(verdict["worst_ratios"]) == gpu_gate.LISTED
    assert next(iter(verdict["worst_ratios"].values())) == 1.01
