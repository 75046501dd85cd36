"""First calls: the problems that are promised, and a run of everything on a CPU."""

import json

from bench_records import ROOT
from helpers import one_thread  # noqa: F401

from benchmarks import first_calls as bench
from benchmarks.first_calls import problems
from benchmarks.pages.tables import cold_start, first_calls


def test_problems_are_those_promised():
    cases = problems(60)
    assert cases == problems(60) and len(set(map(str, cases))) == 60
    assert {case["dtype"] for case in cases} == {"bf16", "fp16", "fp32"}
    assert {case["activation"] for case in cases} == {"relu", "gelu", "silu"}
    assert {len(case["sizes"]) for case in cases} == {2, 3}
    assert all(64 <= case["tokens"] <= 65536 for case in cases)
    assert all(case["sizes"][0] <= 4096 and case["sizes"][1] <= 16384 for case in cases)
    assert max(case["tokens"] for case in cases) > 32768, "large ones, too"
    assert max(case["sizes"][1] for case in cases) > 8192
    measured = json.loads((ROOT / "benchmarks/results/h200_first_calls.json").read_text())
    assert cases == [result["case"] for result in measured["results"]]


def test_a_tiny_run_has_both_tables(tmp_path, monkeypatch, one_thread):  # noqa: F811
    path, in_own_process = tmp_path / "first.json", bench.in_own_process
    assert len(in_own_process("training, fp32", "ours", tiny=True)) == 2
    monkeypatch.setattr(bench, "in_own_process", bench.run)
    bench.main(["--tiny", "--repeats", "1", "--json", str(path)])
    results = json.loads(path.read_text())["results"]
    singles = [r for r in results if r["case"]["suite"] == "first-calls"]
    assert len(singles) == 2 and len(results) == 2 + 3 * 2
    for result in singles:
        medians = {name: number["median"] for name, number in result["numbers"].items()}
        assert set(medians) == {"ours", "later", "each", "eager", "limit"}
        assert medians["each"] <= medians["ours"] and medians["limit"] == 50  # as the budget is 0
    assert len(first_calls(results)) == 2 + 3 and len(cold_start(results)) == 2 + 6
