"""The suite of first calls: problems as promised, the worst named, all suites documented."""

import pytest
import torch

pytest.importorskip("tqdm")

from bench_records import ROOT, record_of

from benchmarks import first_calls
from benchmarks.cases import SUITES, Case, cases_of
from benchmarks.table import Table
from torch_fused_linear import plans

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_problems_are_those_promised():
    cases = cases_of("first-calls", CUDA)
    assert cases == cases_of("first-calls", CUDA) and len(set(cases)) == 60
    assert {case.dtype for case in cases} == {"bf16", "fp16", "fp32"}
    assert {case.activation for case in cases} == {"relu", "gelu", "silu"}
    assert {len(case.sizes) for case in cases} == {2, 3}
    assert all(64 <= case.tokens <= 65536 for case in cases)
    assert all(case.sizes[0] <= 4096 and case.sizes[1] <= 16384 for case in cases)
    assert max(case.tokens for case in cases) > 32768, "large ones, too"
    assert max(case.sizes[1] for case in cases) > 8192
    assert not cases_of("first-calls", CPU), "without a GPU nothing is measured"


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("sizes", [(8, 16), (8, 16, 8)])
def test_a_record_has_both_steps_and_the_limit(activation, sizes, monkeypatch):
    monkeypatch.setattr(first_calls, "two_steps", lambda case, name, device: [40.0, 10.0])
    monkeypatch.setattr(plans, "show", lambda: "one\ntwo\nthree")
    case = Case("first-calls", sizes, 4, "fp32", activation, "first step")
    with plans.budget(100):
        record = first_calls.first_calls_record(case, ["ours", "eager"], CPU)
    assert record.unit == "ms" and not record.failed
    medians = {name: number.median for name, number in record.numbers.items()}
    assert medians == {"ours": 40, "later": 10, "each": 10, "eager": 40, "limit": 200}


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("sizes", [(8, 16), (8, 16, 8)])
def test_every_kind_runs(activation, sizes):
    case = Case("first-calls", sizes, 4, "fp32", activation, "first step")
    record = first_calls.first_calls_record(case, ["ours", "eager"], CPU)
    assert not record.failed and {"ours", "later", "each", "eager"} <= set(record.numbers)


def test_the_worst_is_named():
    cases = [Case("first-calls", (8, n), 4, "fp32", "relu", "first step") for n in (16, 24, 32)]
    times = [(30, 3), (900, 4), (60, 500)]
    records = [
        record_of(case, ours=ours, eager=1, later=1, each=each, limit=350)
        for case, (ours, each) in zip(cases, times)
    ]
    table = Table(cases, ["ours", "eager"])
    assert "900.0" in table.line(records[1]) and "350.0" in table.line(records[1])
    foot = table.foot(records)
    steps, each = foot.splitlines()[1:]
    assert "median 60.0 ms, worst 900.0 ms, 1 of 3 above" in steps and str(cases[1]) in steps
    assert "median 4.0 ms, worst 500.0 ms, 1 of 3 above" in each and str(cases[2]) in each


def test_every_suite_is_documented():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert [name for name in SUITES if f"`{name}`" not in page] == []
