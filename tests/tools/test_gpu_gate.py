"""The verdict of the gate of speed, on made-up records."""

import gpu_gate
import pytest
from bench_records import STEP, record_of

from benchmarks.cases import Case

OURS = f"{STEP} ours"


# times of ours and eager, how much faster each further look finds it, below, and the worst ratio
@pytest.mark.parametrize(
    ("times", "looks", "below", "worst"),
    [
        ([(100, 150), (100, 98.5)], [], [], 0.985),
        ([(100, 80)], [0.9, 1.2], [], 1.2),
        ([(100, 80)], [0.95] * gpu_gate.REPEATS, [OURS], 0.95),
        ([(None, 80)], [], [OURS], 0.0),
    ],
    ids=["fast", "slow once", "slow every time", "does not run"],
)
def test_verdict(times, looks, below, worst):
    records = [record_of(**{n: t for n, t in zip(("ours", "eager"), pair) if t}) for pair in times]
    for record in records:
        record.failed = {} if "ours" in record.numbers else {"ours": "RuntimeError: no"}
    left, asked = iter(looks), []

    def again(case, name):
        asked.append((case, name))
        return next(left)

    verdict = gpu_gate.judge(records, again)
    assert verdict == {"measured": 1, "worst_ratios": {OURS: worst}, "below": below}
    assert asked == [(STEP, "ours")] * len(looks) and next(left, None) is None


def test_only_the_worst_are_listed():
    cases = [Case("layer", (64, 64), tokens, "bf16", "relu", "step") for tokens in range(1, 31)]
    records = [record_of(case, ours=100, eager=100 + case.tokens) for case in cases]
    verdict = gpu_gate.judge(records, again=None)
    assert verdict["measured"] == 30 and len(verdict["worst_ratios"]) == gpu_gate.LISTED
    assert next(iter(verdict["worst_ratios"].values())) == 1.01
