"""The tables of the docs say what the results and records say."""

import json
import shutil
from dataclasses import replace

import pytest
from bench_records import record_of
from processes import ROOT

from benchmarks import results
from benchmarks.cases import Case
from benchmarks.pages.__main__ import CHART, main, render
from benchmarks.pages.results import by_machine


def test_no_table_and_no_chart_is_old(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().out


HEADER = {"machine": "NVIDIA X1", "device": "cuda", "torch": "2.11", "cublaslt": "13.1.0"}
HEADER |= {"driver": "580", "date": "2026-01-02T03:04:05+00:00"}
LATER = {**HEADER, "date": "2026-03-02T03:04:05+00:00"}
FORWARD = Case("layer", (768, 3072), 8192, "bf16", "relu", "forward")
STEP = replace(FORWARD, mode="step")
LAYERS = [
    record_of(FORWARD, ours=50, eager=65),
    record_of(STEP, **{"ours": 200, "eager": 250, "compile": 300, "max_autotune": 260}),
    record_of(Case("layer", (768, 3072), 64, "fp16", "gelu", "step"), ours=100, eager=90),
    record_of(Case("ffn", (8, 32, 8), 8192, "bf16", "relu", "step"), ours=1, mlp=4, eager=2),
]


@pytest.fixture
def tables(tmp_path):
    """What a page makes of records, each list with its header."""

    def made(*files, page="everything"):
        for k, (header, records) in enumerate(files):
            results.save(tmp_path / f"{k}.json", header, records)
        return render(page, by_machine(sorted(tmp_path.glob("*.json"))))

    return made


def test_tables_say_what_the_results_say(tables):
    text = tables((HEADER, LAYERS))
    assert "NVIDIA X1 (torch 2.11, cuBLASLt 13.1.0, driver 580), 2026-01-02" in text
    assert "| 768→3072 | 8192 | relu | 50.0 µs | 65.0 µs | 1.30 |" in text
    assert "| 768→3072 | 8192 | relu | 200 µs | 250 µs | 1.25 | 1.30 |" in text
    assert "2 of 5 measurements of layers and blocks are more than 2% slower" in text
    assert "| layer: 768→3072, 64, fp16, gelu, step, ours | 100 µs | 90.0 µs | 0.90 |" in text
    assert "| ffn: 8→32→8, 8192, bf16, relu, step, `FusedMLP` | 4.0 µs | 2.0 µs | 0.50 |" in text

    case = Case("models", (8, 1024), 8192, "bf16", "gelu", "step", "GPT-2 small")
    ways = {"eager": 50, "fused": 40, "compile": 30, "reduce-overhead": 21, "compile+pass": 20}
    row = "| GPT-2 small, GELU (tanh) | bf16 |  |  | 1.25 | 1.05 | our pass |"
    assert row in tables((HEADER, [record_of(case, **ways)]), page="expect"), "of the faster mode"


def test_later_results_replace_earlier_ones_but_for_who_took_part_before(tables):
    again = [record_of(FORWARD, ours=40, eager=65), record_of(STEP, ours=100, eager=250)]
    text = tables((LATER, again), (HEADER, LAYERS))
    assert "| 40.0 µs | 65.0 µs | 1.62 |" in text and "50.0 µs" not in text
    assert "| 100 µs | 250 µs | 2.50 | 1.30 |" in text, "the compiler's, of the earlier run"


@pytest.fixture
def copies(tmp_path):
    """Pages and records that may be changed, and how to run the command on them."""
    docs, kept = tmp_path / "docs", tmp_path / "records"
    shutil.copytree(ROOT / "docs", docs)
    shutil.copytree(ROOT / "tests" / "certify" / "records", kept)

    def run(*arguments):
        return main([*arguments, "--docs", str(docs), "--records", str(kept)])

    return docs, kept, run


def test_a_page_or_chart_that_is_old_is_made_anew(copies):
    docs, kept, run = copies
    path = next(kept.glob("fuzz*.json"))
    record = json.loads(path.read_text())
    record["failed"] += 1
    record["failures"].insert(0, {"unit": 17, "what": "a failure [planted]"})
    record["crashed"]["18"] = "SIGSEGV"
    path.write_text(json.dumps(record))
    assert run("--check") == 1
    assert run() == 0
    text = (docs / "reliability.md").read_text()
    assert r"17: a failure \[planted\]" in text and "18: ended by SIGSEGV" in text
    assert run("--check") == 0
    before = (docs / CHART).read_text()
    (docs / CHART).write_text("")
    assert run("--check") == 1 and run() == 0
    assert (docs / CHART).read_text() == before


def test_a_page_without_a_place_is_refused(copies, capsys):
    docs, _, run = copies
    page = docs / "reliability.md"
    page.write_text(page.read_text().replace("results: faults: begin", "results: begin"))
    before = page.read_text()
    assert run() == 2 and "places for" in capsys.readouterr().err
    assert page.read_text() == before
