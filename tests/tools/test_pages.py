"""The tables of the docs say what the results and records say."""

import json
import shutil
import statistics
from dataclasses import replace

import pytest
from bench_records import record_of
from processes import ROOT

from benchmarks import float8_training, results
from benchmarks.cases import Case
from benchmarks.pages.__main__ import CHART, DOCS, RESULTS, main, render
from benchmarks.pages.results import by_machine, find, median
from torch_fused_linear.timing import Number


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
    """The text that a page makes of records, each list with its header."""

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


def rows_of(text):
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "|" in line
    ]


def invariance(sizes, activation, tokens, mode, **numbers):
    case = {"suite": "invariance", "sizes": sizes, "tokens": tokens, "dtype": "bf16"}
    case |= {"activation": activation, "mode": mode}
    return results.result(case, "us", {n: Number.once(v) for n, v in numbers.items()})


def test_the_tables_of_batch_invariance(tmp_path):
    block = ([768, 3072, 768], "gelu")
    triton = {"triton 128x128": 400, "triton 128x256": 300}
    found = [
        invariance([4096, 4096], "none", 4096, "forward", auto=190, batch_invariant=200, **triton),
        invariance(*block, 64, "forward", auto=20, batch_invariant=25),
        invariance(*block, 64, "forward, captured", auto=16, batch_invariant=10),
        invariance(*block, 8192, "forward", auto=99, batch_invariant=100),
        invariance(*block, 8192, "step", auto=380),
    ]
    results.write(tmp_path / "h.json", HEADER, found)
    machines = by_machine([tmp_path / "h.json"])
    text = render("batch invariance", machines)
    assert text.startswith("NVIDIA X1, torch 2.11, 2026-01-02:")
    assert rows_of(text)[2:] == [
        ["768→3072→768, gelu", "64", "20.0 µs / 25.0 µs: 0.80", "16.0 µs / 10.0 µs: 1.60", ""],
        ["768→3072→768, gelu", "8192", "99.0 µs / 100 µs: 0.99", "", "380 µs: failed"],
    ]
    (row,) = rows_of(render("a batch-invariant product", machines))[2:]
    times = ["200 µs", "190 µs", "400 µs", "300 µs"]
    assert row == ["4096 x 4096→4096", *times, "0.95", "2.00", "1.50"]
    assert render("everything", machines) == "Not measured yet.", "they have a page of their own"


def test_the_table_of_training_in_fp8(tmp_path):
    runs = {
        "bf16": [
            {"seed": k, "validation": v, "speed": 9e3, "losses": [v]} for k, v in ((0, 2), (1, 4))
        ],
        "ours": [
            {"seed": k, "validation": v, "speed": 8e3, "losses": [v]} for k, v in ((0, 3), (1, 4))
        ],
    }
    results.write(tmp_path / "h.json", HEADER, float8_training.as_results(runs))
    rows = rows_of(render("FP8 training", by_machine([tmp_path / "h.json"])))[2:]
    assert rows == [
        ["bf16", "2", "3.0000 ± 1.4142", "", "9,000"],
        ["ours", "2", "3.5000 ± 0.7071", "+0.5000 ± 0.7071", "8,000"],
    ]


H200 = by_machine(sorted(RESULTS.glob("*.json")))["NVIDIA H200"]


def fp8(**case):
    """By block, how many times as much as ours the others take."""
    others, found = ("torchao", "ours in bf16"), find(H200, suite="float8", **case)
    return {
        (r["case"]["sizes"][0], r["case"]["activation"]): {
            other: median(r, other) / median(r, "ours") for other in others
        }
        for r in found
    }


def test_numbers_on_the_page_of_steps_in_fp8():
    clock, captured = fp8(mode="step"), fp8(mode="step, captured")
    kernels, saved = fp8(mode="kernels"), fp8(mode="saved")
    gated = (2048, "silu")
    assert len(clock) == len(captured) == len(kernels) == 4
    for block in clock:
        assert clock[block]["torchao"] > 1.1 and captured[block]["torchao"] > 1.1
        assert kernels[block]["torchao"] < captured[block]["torchao"] < clock[block]["torchao"]
        pays = min(times[block]["ours in bf16"] for times in (clock, captured, kernels))
        assert (pays > 1.15) == (block[0] >= 2048)
    gains = [captured[width, "gelu"]["torchao"] for width in (1024, 2048, 4096)]
    assert gains == sorted(gains, reverse=True)
    assert kernels[gated]["torchao"] == pytest.approx(1, abs=0.03)
    assert kernels[1024, "gelu"]["ours in bf16"] == pytest.approx(1, abs=0.03)
    assert clock[1024, "gelu"]["ours in bf16"] < 1
    assert {*saved} == {*clock} and all(kept["torchao"] < 1 for kept in saved.values())
    assert 0.8 < saved[1024, "gelu"]["torchao"] < 1 < saved[1024, "gelu"]["ours in bf16"]
    assert all(saved[block]["ours in bf16"] > 1 for block in saved if block != gated)
    assert 0.9 < saved[gated]["ours in bf16"] < 1


def of_autos_speed(mode):
    """By block and tokens, auto's time divided by batch_invariant's."""
    found = find(H200, suite="invariance", mode=mode)
    return {
        (r["case"]["sizes"][0], r["case"]["tokens"], r["case"]["activation"]): (
            median(r, "auto") / median(r, "batch_invariant")
        )
        for r in found
    }


def test_numbers_on_the_page_of_batch_invariance():
    steps, forward, few = map(of_autos_speed, ("step", "forward", "forward, captured"))
    assert len(steps) == 12 and all(abs(speed - 1) < 0.045 for speed in steps.values())
    slow = {key: speed for key, speed in forward.items() if key[1] >= 4096 and speed < 0.97}
    assert {*slow} == {(768, 4096, "gelu"), (768, 4096, "silu")}
    assert [*slow.values()] == pytest.approx([0.9, 0.9], abs=0.02)
    largest = [few.pop((4096, 1, activation)) for activation in ("gelu", "silu")]
    assert largest == pytest.approx([0.6, 0.6], abs=0.01)
    assert min(few.values()) > 0.815 and max(few.values()) < 1.195


def test_numbers_on_the_page_of_training_in_fp8():
    found = sorted(find(H200, suite="float8-training"), key=lambda r: r["case"]["seed"])
    assert [r["case"]["seed"] for r in found] == [0, 1, 2, 3]
    losses = {arm: [median(r, arm) for r in found] for arm in ("bf16", "torchao", "ours")}
    speeds = {arm: statistics.median(r["speed"][arm] for r in found) for arm in losses}
    for arm in ("torchao", "ours"):
        apart = statistics.fmean(losses[arm]) - statistics.fmean(losses["bf16"])
        assert abs(apart) < statistics.stdev(losses["bf16"])
    assert max(speeds, key=speeds.get) == "bf16"


def test_the_picture_of_training_in_fp8_is_of_the_results():
    found = find(H200, suite="float8-training")
    runs = {a: [{"losses": r["losses"][a]} for r in found] for a in ("bf16", "torchao", "ours")}
    picture = float8_training.picture(runs)
    assert (DOCS / "figures" / "float8_training.svg").read_text() == picture


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
