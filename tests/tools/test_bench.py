"""The benchmarks: fair timing, the same work by all, results that survive, true tables, a gate."""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import os
import sys
import time
import weakref
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import gpu_gate
import pytest
import torch
from compiler import needs_compiler
from helpers import DEVICES, few_objects, one_thread  # noqa: F401
from rival_fakes import FAKES, HEURISTICS, TUNED
from watching import explained

pytest.importorskip("tqdm")

from bench_records import STEP, record_of
from processes import ROOT, python

import torch_fused_linear as tfl
from benchmarks import __main__ as bench
from benchmarks import (
    contenders,
    first_calls,
    float8,
    float8_casts,
    float8_training,
    gated,
    invariance,
    machine,
    operands,
    results,
    rivals,
    steps,
)
from benchmarks.__main__ import main
from benchmarks.cases import MODELS, SUITES, Case, cases_of, makes_sense
from benchmarks.convolutions import CONVOLUTIONS, TINY_CONVOLUTIONS, Convolution
from benchmarks.models import FAMILIES, Models
from benchmarks.pages import tables
from benchmarks.results import Record
from benchmarks.run import entrants, measure_case
from torch_fused_linear import timing
from torch_fused_linear.timing import Contender, measure, wall_clock

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# -------------------------------------------------------------------------------------- timing


def test_a_longer_sleep_is_slower():
    sleepers = [Contender(f"{ms} ms", lambda ms=ms: time.sleep(ms / 1e3)) for ms in (4, 1, 2)]
    numbers, failed = measure(sleepers, wall_clock, seconds=0)
    assert not failed
    assert numbers["1 ms"].median < numbers["2 ms"].median < numbers["4 ms"].median
    # A sleep never ends early, and a busy machine may make it late.
    assert 4000 <= numbers["4 ms"].median < 40000
    for number in numbers.values():
        assert number.q1 <= number.median <= number.q3
        assert number.rounds == timing.MIN_ROUNDS


def fake_clock(call, times):
    """As if each call took as long as it says."""
    return call() * times


def test_rounds_are_interleaved_and_shuffled():
    called = []
    entering = [Contender(name, lambda name=name: called.append(name) or 1e-3) for name in "abc"]
    numbers, _ = measure(entering, fake_clock, seconds=60)
    assert [number.rounds for number in numbers.values()] == [timing.MAX_ROUNDS] * 3
    timed = called[-3 * timing.MAX_ROUNDS :]
    orders = ["".join(timed[i : i + 3]) for i in range(0, len(timed), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders), "once in every round"
    assert len(set(orders)) > 3, "in changing order"


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 1), (1e-3, 3), (1e-4, 30), (1e-9, 2000)])
def test_a_batch_is_long_enough_and_no_longer(seconds, calls):
    numbers, _ = measure([Contender("a", lambda: seconds)], fake_clock, seconds=0)
    assert numbers["a"].calls == calls
    assert numbers["a"].median == pytest.approx(seconds * 1e6)


def test_rounds_end_when_the_clock_has_read_so_much():
    """Not by the process's own time, in which ranks that read one clock would differ."""
    numbers, _ = measure([Contender("a", lambda: 1.0)], fake_clock, seconds=20)
    assert numbers["a"].rounds == 21  # of one call each


def test_one_that_fails_is_left_out_and_named():
    def broken():
        raise RuntimeError("does not\ncompile")

    entering = [Contender("broken", broken), Contender("fine", lambda: None)]
    numbers, failed = measure(entering, wall_clock, seconds=0)
    assert list(numbers) == ["fine"]
    assert failed == {"broken": "RuntimeError: does not compile"}


def test_conditions_hold_around_each_call_and_end():
    case = Case("layer", (8, 16), 4, "fp32", "relu", "forward")
    data = operands.Operands.random(case, CPU)
    for name, policy in (("ours", "auto"), ("cublaslt", "cublaslt")):
        with contenders.contender(name, case, [data]).conditions():
            assert (tfl.get_policy(), torch.is_grad_enabled()) == (policy, False)
    assert (tfl.get_policy(), torch.is_grad_enabled()) == ("auto", True)


# ---------------------------------------------------------------------------------- contenders


def of_conv(conv: Convolution, mode: str, suite: str = "conv") -> Case:
    return Case(suite, (conv.channels, conv.out), 2, "fp32", "relu", mode, conv=conv)


GATED = Case("gated", (6, 10, 6), 4, "fp32", "silu", "step")
SAME_WORK = [
    *(
        Case("rivals", sizes, 4, "fp32", activation, "step")
        for sizes in ((8, 16), (6, 24, 6))
        for activation in ("relu", "gelu", "gelu-erf", "silu")
    ),
    GATED,
    *(of_conv(replace(c, last=last), "step") for c in TINY_CONVOLUTIONS for last in (True, False)),
]


@pytest.fixture
def rivals_installed(monkeypatch):
    for name, content in FAKES.items():
        parts = name.split(".")
        for k in range(len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[: k + 1]), content)


def outcome(name: str, case: Case, data: operands.Operands) -> list[torch.Tensor | None]:
    """The output, or the gradients of input and parameters, of its own where it has copies."""
    with contenders.conditions_of(name, case):
        network = contenders.network_of(name, case, data)
        if case.mode == "forward":
            return [network(data.input)]
        step = contenders.network_step(network, data)
        step()
        step()  # gradients do not add up
    leaves = [data.input, *network.parameters()] if case.is_gated else data.leaves
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


@pytest.mark.parametrize("mode", ["forward", "step"])
@pytest.mark.parametrize("case", SAME_WORK, ids=str)
def test_all_that_claim_to_do_the_same_agree(case, mode, rivals_installed):
    """Output and all gradients; a baseline that computes less would win for nothing."""
    case = replace(case, mode=mode)
    data = operands.Operands.random(case, CPU)
    known = contenders.WORK[case.kind].networks
    where = {name: CPU if name in ("packed", "addmm") else CUDA for name in known}
    names = [n for n in known if n not in ("linear", "nvmath", *contenders.COMPILED)]
    names = [name for name in names if contenders.applies(name, case, where[name])]
    assert {"ours", "eager"} <= set(names)
    want = outcome("eager", case, data)
    for name in names:
        got = outcome(name, case, data)
        if name in ("quack", "quack-tuned", "coda") and case.is_gated and mode == "step":
            both = torch.stack(want[1:3], 1).flatten(0, 1)  # rows in turn, in one weight
            torch.testing.assert_close(got, [want[0], both, want[3]])
        else:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if mode == "step" and not case.is_gated:
        leaves = [leaf for leaf in data.leaves if leaf.requires_grad]
        output = contenders.network_of("eager", case, data)(data.input)
        plain = torch.autograd.grad(output, leaves, data.grad_output)
        torch.testing.assert_close([g for g in want if g is not None], [*plain])
        # the stem of a network reads images
        assert (want[0] is None) == (case.conv is not None and case.conv.is_stem)


def test_rivals_get_what_they_are_named_for(rivals_installed):
    case = Case("rivals", (6, 24, 6), 4, "fp32", "gelu", "forward")
    data = operands.Operands.random(case, CPU)
    TUNED.clear(), HEURISTICS.clear()
    for name in rivals.BLOCKS:
        contenders.network_of(name, case, data)(data.input)
    assert (TUNED, HEURISTICS) == ([False, True], ["auto", 0])


@pytest.mark.parametrize("name", dict.fromkeys([*rivals.BLOCKS, *gated.OTHERS]))
def test_missing_libraries_are_named(name, monkeypatch):
    is_gated = name not in rivals.BLOCKS
    package = name.removesuffix("-tuned").removesuffix("-fused").replace("-", "_")
    monkeypatch.setitem(sys.modules, f"{package}{'_kernel' * is_gated}", None)
    case = GATED if is_gated else Case("rivals", (6, 24, 6), 4, "fp32", "gelu", "step")
    with pytest.raises(ModuleNotFoundError, match=package):
        contenders.contender(name, case, [operands.Operands.random(case, CPU)])


# what is asked, on which device, and who takes part
ASKED = [
    (Case("rivals", (6, 24, 6), 4, "bf16", "relu", "step"), CUDA,
     "ours mlp eager mm quack quack-tuned flash-attn"),
    (Case("rivals", (6, 24, 6), 4, "bf16", "relu", "step"), CPU, "ours mlp eager mm"),
    (Case("layer", (8, 16), 4, "bf16", "gelu", "forward"), CUDA, "ours eager addmm linear mm"),
    (Case("cpu", (8, 16), 4, "bf16", "gelu", "forward"), CPU, "ours packed eager linear mm"),
    (Case("gated-memory", (16, 24, 16), 8, "bf16", "silu", "saved"), CUDA,
     "ours fused low eager liger quack quack-tuned coda"),
    (Case("gated-memory", (16, 24, 16), 8, "bf16", "silu", "saved"), CPU, "ours fused low eager"),
    (of_conv(TINY_CONVOLUTIONS[0], "step"), CPU, "ours compile+pass eager conv"),
    (of_conv(TINY_CONVOLUTIONS[0], "saved", "memory"), CPU, "ours eager"),
    (Case("activation", (128,), 8, "bf16", "relu", "from mask"), CPU, "ours eager copy"),
    (Case("headline", (16, 24), 8, "fp16", "relu", "edge"), CUDA, "ours cublaslt eager mm"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "device", "names"), ASKED, ids=str)
def test_contenders_of_each_case(case, device, names):
    asked = [*SUITES[case.suite].ours, "eager", "addmm", "linear", "mm", "conv", "copy", "packed"]
    asked += [*rivals.BLOCKS, *gated.OTHERS, "low", "cublaslt"]
    if case.kind == "layers":
        asked = [name for name in asked if name not in ("low", "cublaslt")]
    assert {*entrants(case, asked, device)} == {*names.split()}


def operators_of(name: str, case: Case) -> list[str]:
    call = contenders.contender(name, case, contenders.data_sets(case, CPU)[:1]).call
    with torch.profiler.profile(acc_events=True) as profile:
        call()
    return [event.name for event in profile.events()]


def test_the_bare_products_are_those_of_the_mode():
    for mode, count in (("forward", 2), ("backward", 4), ("step", 6)):
        names = operators_of("mm", Case("ffn", (8, 32, 8), 4, "fp32", "relu", mode))
        assert names.count("aten::mm") == count
    for mode, backward in (("forward", 0), ("step", 1)):
        names = operators_of("conv", of_conv(TINY_CONVOLUTIONS[1], mode))
        assert names.count("aten::conv2d") == 1
        assert names.count("aten::convolution_backward") == backward
        assert not any("relu" in name or "add" in name for name in names)


@pytest.mark.parametrize("mode", ["grad", "fp32 grad"])
def test_micro_batches_leave_the_sum_of_their_gradients(mode):
    case = Case("accumulation", (6, 10, 6), 4, "bf16", "gelu", mode)
    (data,) = contenders.data_sets(case, CPU)[:1]
    exact = [p.double().requires_grad_() for p in data.parameters]
    for x, grad in data.batches:
        steps.torchs_block(x.double(), *exact).backward(grad.double())
    made = 9 if mode == "grad" else 16  # of four parameters; the first time torch's, in bf16
    for name, count in {"ours": made, "apart": 0, "eager": 0}.items():
        call = contenders.contender(name, case, [data]).call
        for _ in range(2):  # a second call begins anew
            got, report = explained(call)
            for gradient, parameter in zip(got, exact, strict=True):
                assert gradient.dtype == (torch.bfloat16 if mode == "grad" else torch.float32)
                torch.testing.assert_close(gradient.double(), parameter.grad, rtol=0.05, atol=0.2)
        assert [row.operator for row in report.calls].count("_weight_gradient") == count, report


def test_small_cases_do_not_stay_in_the_cache():
    sets = contenders.data_sets(Case("layer", (64, 64), 64, "bf16", "relu", "forward"), CPU)
    assert len(sets) == operands.MAX_SETS
    assert len({data.input.data_ptr() for data in sets}) == len(sets)
    used = []
    turn = contenders.in_turns([lambda i=i: used.append(i) for i in range(3)])
    for _ in range(6):
        turn()
    assert used == [0, 1, 2, 0, 1, 2]
    large = 2 * operands.CACHES_TO_FILL * operands.CPU_CACHE
    assert operands.sets_needed(large, CPU) == 1


# case, and what each keeps for the backward, in bytes; tests/memory has all operators
KEPT = [
    (Case("memory", (128, 256), 64, "fp32", "relu", "saved"),
     {"ours": 4 * 64 * 384, "eager": 4 * 64 * 384, "cublaslt": 4 * 64 * 128 + 64 * 256 // 8}),
    (Case("memory", (128, 256, 128), 64, "bf16", "gelu", "saved"),
     dict.fromkeys(("ours", "low", "mlp", "eager"), 2 * 64 * (128 + 2 * 256))
     | {"mlp-low": 2 * 64 * (128 + 256)}),
    # image and result; ReLU's own result is the convolution's, in place
    (of_conv(Convolution(4, 8, 3, 10), "saved", "memory"),
     dict.fromkeys(("ours", "eager"), 4 * 2 * (4 + 8) * 100)),
]  # fmt: skip


@pytest.mark.parametrize(("case", "want"), KEPT, ids=str)
def test_memory_a_step_keeps(case, want):
    record = measure_case(case, [*want], CPU, seconds=0)
    assert not record.failed
    assert {name: number.median * 2**20 for name, number in record.numbers.items()} == want


# ------------------------------------------------------------------------------------- results


def test_speedup_fraction_and_losses():
    record = record_of(ours=100, eager=90, mm=50, linear=80)
    assert record.speedup("ours") == 0.9
    assert record.fraction("ours") == 0.5
    assert record.lost()
    assert not record_of(ours=100, eager=98.5).lost()
    assert record_of(ours=100).speedup("ours") is None
    compiled = record_of(**{"fused": 50, "eager": 60, "compile": 55, "compile+pass": 44})
    assert (compiled.speedup("fused"), compiled.speedup("compile+pass")) == (1.2, 1.25)


def written(case: Case) -> dict:
    fields = json.loads(json.dumps(asdict(case)))
    return {name: value for name, value in fields.items() if value or name not in ("model", "conv")}


def cases_in(path: Path) -> list[dict]:
    return [result["case"] for result in json.loads(path.read_text())["results"]]


def test_json_holds_everything(tmp_path):
    conv, more = cases_of("conv", CPU)[0], {"failed": {"ours": "no"}, "kernels": {"mm": ["k"]}}
    records = [record_of(ours=1.5, eager=2.5), Record(conv, "us", **more)]
    results.save(tmp_path / "r.json", {"machine": "m"}, records)
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["header"] == {"machine": "m"}
    one, other = content["results"]
    medians = {name: number["median"] for name, number in one["numbers"].items()}
    assert medians == {"ours": 1.5, "eager": 2.5}
    assert (one["case"], one["unit"]) == (written(STEP), "us")
    assert other == {"case": written(conv), "unit": "us", **more}
    assert other["case"]["conv"]["channels"] == 3


@pytest.mark.parametrize("broken", ["write", "replace"])
def test_json_is_never_half_written(tmp_path, monkeypatch, broken):
    path = tmp_path / "r.json"
    results.save(path, {}, [record_of(ours=1)])
    before, write = path.read_text(), Path.write_text

    def fail(*args, **kwargs):
        if broken == "write":
            write(args[0], args[1][:10])
        raise OSError("disk full")

    monkeypatch.setattr(*((Path, "write_text") if broken == "write" else (os, "replace")), fail)
    with pytest.raises(OSError, match="disk full"):
        results.save(path, {}, [record_of(ours=2)])
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["r.json"], "and nothing is left behind"


def test_an_interrupted_run_keeps_what_it_measured(tmp_path, monkeypatch, capsys):
    path, measured = tmp_path / "r.json", []

    def interrupted(case, *args):
        if measured:  # a killed process could not save anything any more
            assert cases_in(path) == [*map(written, measured)]
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(case)
        return record_of(case, ours=1, eager=2)

    monkeypatch.setattr(bench, "measure_case", interrupted)
    assert main(["layer", "--quick", "--device", "cpu", "--json", str(path)]) == 130
    assert cases_in(path) == [*map(written, measured)]
    said = capsys.readouterr().out
    assert "after 3 of 36 cases" in said and "stopped by Ctrl-C" in said


def test_a_failure_of_the_reference_too_is_not_ours():
    for ours, reference in (("fused", "eager"), ("compile+pass", "compile")):
        record = Record(STEP, "us", failed={ours: "no"})
        assert record.failed_alone(ours) and not record.failed_alone("mlp")
        record.failed[reference] = "no"
        assert not record.failed_alone(ours)


def test_a_failure_of_ours_is_told(monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("out of order")

    monkeypatch.setitem(contenders.WORK["layers"].networks, "ours", broken)
    arguments = ["host", "--quick", "--device", "cpu", "--dtypes", "fp32", "--only", "relu forward"]
    assert main(arguments) == 1
    assert "ours failed: RuntimeError: out of order" in capsys.readouterr().out


# -------------------------------------------------------------------------------- command line


def test_a_quick_run_with_numbers(tmp_path):
    """As a user runs it."""
    options = ("--quick", "--device", "cpu", "--dtypes", "bf16", "fp32", "--out", tmp_path)
    options += ("--seconds-per-case", "0.001", "--threads", "2", "--cudnn-benchmark")
    said = python("-m", "benchmarks", "layer", "host", *options, OMP_NUM_THREADS="1").stdout
    content = json.loads((tmp_path / "bench.json").read_text())
    header = content["header"]
    assert header["device"] == "cpu" and header["torch"] == torch.__version__
    assert header["machine"].endswith(", 2 threads") and header["cudnn"]["benchmark"]
    asked_for = [c for s in ("layer", "host") for c in cases_of(s, CPU, True, ["bf16", "fp32"])]
    assert [result["case"] for result in content["results"]] == [*map(written, asked_for)]
    assert all(case.shape in said for case in asked_for)
    for result in content["results"]:
        assert "failed" not in result and {"ours", "eager"} <= set(result["numbers"])
        assert all(0 < n["q1"] <= n["median"] <= n["q3"] for n in result["numbers"].values())


# The compiler, of which the tests of models have a shorter look, takes most of the time.
@pytest.mark.parametrize(
    "without",
    [["--without", *contenders.COMPILED], pytest.param([], marks=pytest.mark.long)],
    ids=["eager", "all"],
)
def test_every_suite_runs_and_is_documented(without, capsys):
    arguments = ["--quick", "--device", "cpu", "--dtypes", "fp32", "--seconds-per-case", "0.001"]
    named = {" relu ": "fused::linear_relu", " silu ": "fused::gated_mlp", " grad": "x aten::add_"}
    for text, kernel in named.items():
        assert main([*arguments, *without, "--only", text, "--kernels"]) == 0
        output = capsys.readouterr().out
        for suite in SUITES:
            cases = cases_of(suite, CPU, quick=True)
            assert (f"\n{suite}: " in output) == any(text in str(case) for case in cases)
        assert kernel in output
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert [name for name in SUITES if f"`{name}`" not in page] == []


@pytest.mark.cuda
def test_a_graph_keeps_the_memory_that_it_reads():
    """The next capture gives cached memory back to the device."""
    hidden = torch.ones(1 << 20, device="cuda")
    output = torch.zeros_like(hidden)
    kept = weakref.ref(hidden)
    call = contenders.graph_of(lambda hidden=hidden: output.copy_(hidden))
    del hidden
    gc.collect()
    assert kept() is not None
    contenders.graph_of(lambda: output.add_(1))
    output.zero_()
    call()
    assert output.sum() == output.numel()


ON_GPUS = [suite for suite in SUITES if cases_of(suite, CUDA, quick=True)]


def test_all_suites_but_those_of_the_cpu_have_cases_on_a_gpu():
    assert set(SUITES) - set(ON_GPUS) == {"cpu"}
    modes = {case.mode for suite in ON_GPUS for case in cases_of(suite, CUDA, quick=True)}
    assert {"graph", "peak"} <= modes  # which are only there


@pytest.mark.cuda
@pytest.mark.parametrize("suite", ON_GPUS)
def test_every_suite_runs_on_a_gpu(suite, tmp_path):
    """Events, graphs, peak memory and kernels' names are only there."""
    arguments = [suite, "--quick", "--device", "cuda", "--seconds-per-case", "0.01", "--kernels"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "bench.json").read_text())
    assert content["header"]["devices"]
    cases = cases_of(suite, CUDA, quick=True)
    assert len(content["results"]) == len(cases)
    for result in content["results"]:
        if "model" in result["case"] and importlib.util.find_spec("transformers") is None:
            continue
        failed = result.get("failed", {})
        not_here = {n for n, why in failed.items() if "ModuleNotFoundError" in why}
        assert set(failed) <= not_here & {*rivals.BLOCKS, *gated.OTHERS}
        assert result["unit"] == "MiB" or all(result["kernels"].values())


def test_no_case_is_twice_in_the_grid_and_all_make_sense():
    on_cpu, grid = ({suite: cases_of(suite, d) for suite in SUITES} for d in (CPU, CUDA))
    for cases in (*on_cpu.values(), *grid.values()):
        assert len(cases) == len(set(map(str, cases)))
    assert on_cpu["cpu"] and not grid["cpu"], "it is about another device"
    assert not any(case.mode == "graph" for cases in on_cpu.values() for case in cases)
    few = [case for case in grid["conv"] if case.mode == "graph" or SUITES["conv"].compiles(case)]
    assert {(case.dtype, case.conv.last) for case in few} == {("bf16", True)}
    assert [c.out_size for c in CONVOLUTIONS] == [112, 56, 28, 14, 7, 28, 56, 56, 14, 7, 28]


# -------------------------------------------------------------------------------------- first calls


def test_problems_are_those_that_were_measured():
    measured = json.loads((ROOT / "benchmarks/results/h200_first_calls.json").read_text())
    cases = first_calls.problems(60)
    assert cases == [result["case"] for result in measured["results"]]
    assert len(set(map(str, cases))) == 60


@pytest.mark.parametrize("device", DEVICES)
def test_a_tiny_run_has_both_tables(device, tmp_path, monkeypatch):
    if device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of the processes it starts
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path, in_own_process = tmp_path / "first.json", first_calls.in_own_process
    assert len(in_own_process("training, fp32", "ours", tiny=True)) == 2
    monkeypatch.setattr(first_calls, "in_own_process", first_calls.run)
    first_calls.main(["--tiny", "--repeats", "1", "--json", str(path)])
    results = json.loads(path.read_text())["results"]
    singles = [r for r in results if r["case"]["suite"] == "first-calls"]
    assert len(singles) == 2 and len(results) == 2 + 3 * 2
    for result in singles:
        medians = {name: number["median"] for name, number in result["numbers"].items()}
        assert set(medians) == {"ours", "later", "each", "eager", "limit"}
        assert medians["each"] <= medians["ours"] and medians["limit"] == 50  # as the budget is 0
    assert len(tables.first_calls(results)) == 2 + 3 and len(tables.cold_start(results)) == 2 + 6


# ------------------------------------------------------------------------------------------- FP8


@pytest.mark.parametrize("device", DEVICES)
def test_a_tiny_run_of_fp8_steps(device, tmp_path, capsys):
    """The compiler takes minutes on a CPU, so its contenders run on a GPU alone."""
    path, out = tmp_path / "float8.json", ["compile", "torchao", "ours compiled"]
    without = [] if device == "cuda" else ["--without", *out]
    arguments = ["--tiny", "--device", device, "--seconds", "0.01", "--json", str(path)]
    found = float8.main([*arguments, *without])
    assert json.loads(path.read_text())["results"] == json.loads(json.dumps(found))
    modes = float8.MODES if device == "cuda" else ("step", "saved")
    blocks = [(case, mode) for case in float8.cases(tiny=True) for mode in modes]
    wanted = [{**case, "mode": mode} for case, mode in blocks if "layers" not in case]
    wanted += [{**case, "mode": "step"} for case in float8.cases(tiny=True) if "layers" in case]
    cases = [row["case"] for row in found]
    assert sorted(map(str, cases)) == sorted(map(str, wanted))
    for row in found:
        assert {"ours", "ours in bf16"} <= set(row["numbers"]) and "failed" not in row
        assert all(number["median"] > 0 for number in row["numbers"].values())
    assert len(capsys.readouterr().out.splitlines()) == len(found)


def test_no_row_of_fp8_steps_begins_after_the_limit():
    assert float8.main(["--tiny", "--device", "cpu", "--limit", "1e-9"]) == []


def test_in_fp8_a_block_keeps_less():
    """Counts a step's tensors with a hidden layer of four widths, without the weights' copies."""
    case = {"sizes": [64, 256, 64], "tokens": 2048, "activation": "gelu"}
    block = float8.Block(case, CPU)
    ours, bf16 = (block.saved(name).median * 2**20 for name in ("ours", "ours in bf16"))
    assert 0.5 * bf16 < ours - 2 * 64 * 256 < 0.8 * bf16


@pytest.mark.parametrize("device", DEVICES)
def test_a_tiny_training_in_fp8(device, tmp_path, capsys):
    files = {kind: tmp_path / f"training.{kind}" for kind in ("json", "svg")}
    to = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    arguments = ["--tiny", "--device", device, "--seeds", "2", "--steps", "8", *to]
    runs = float8_training.main(arguments)
    assert {"bf16", "ours"} <= set(runs)
    saved = json.loads(files["json"].read_text())["results"]
    assert [r["case"]["seed"] for r in saved] == [0, 1]
    for result in saved:
        assert {*result["numbers"]} == {*result["losses"]} == {*result["speed"]} == {*runs}
    for name, mine in runs.items():
        assert [len(r["losses"]) for r in mine] == [8, 8], name
        for seed, run in enumerate(mine):
            assert run["validation"] == pytest.approx(runs["bf16"][seed]["validation"], rel=0.02)
        assert name == "bf16" or mine[0]["losses"] != runs["bf16"][0]["losses"]
    assert files["svg"].read_text().count("<polyline") == 2 * len(runs)
    assert float8_training.picture(runs) == files["svg"].read_text()
    lines = float8_training.summary(runs)
    assert len(lines) == len(runs) and lines[0] in capsys.readouterr().out
    # It goes on where it was interrupted.
    again = float8_training.main([*arguments, "--seeds", "3"])
    before = {name: [run["losses"] for run in found] for name, found in runs.items()}
    assert {name: [run["losses"] for run in found[:2]] for name, found in again.items()} == before
    assert [len(found) for found in again.values()] == [3] * len(runs)


def test_no_seed_begins_after_the_limit(capsys):
    runs = float8_training.main(["--tiny", "--device", "cpu", "--limit", "0.001"])
    assert not any(runs.values())
    assert "stopped before seed 0" in capsys.readouterr().out


@pytest.mark.parametrize("device", DEVICES)
def test_a_tiny_run_of_casts_to_fp8(device, tmp_path, capsys):
    path = tmp_path / "casts.json"
    arguments = ["--tiny", "--device", device, "--seconds", "0.01", "--json", str(path)]
    found = float8_casts.main(arguments)
    assert json.loads(path.read_text())["results"] == json.loads(json.dumps(found))
    names = [*float8_casts.casts(torch.ones(()))]
    assert [row["case"]["cast"] for row in found] == names and len(names) == 7
    for row in found:
        kernels = {*float8_casts.KERNELS} if device == "cuda" else set()
        assert "failed" not in row and {*row["numbers"]} == {"call", "copy"} | kernels
        assert all(number["median"] > 0 for number in row["numbers"].values())
    assert len(capsys.readouterr().out.splitlines()) == len(found)


# ---------------------------------------------------------------------------- batch invariance


@pytest.mark.parametrize("device", DEVICES)
def test_a_tiny_run_of_batch_invariance(device, tmp_path, capsys):
    """A CPU has no batch-invariant products and no Triton: their rows say so."""
    path = tmp_path / "invariance.json"
    arguments = ["--tiny", "--device", device, "--seconds", "0.01", "--json", str(path)]
    found = invariance.main(arguments)
    assert json.loads(path.read_text())["results"] == json.loads(json.dumps(found))
    cases = [*invariance.cases(True, torch.device(device))]
    assert [row["case"] for row in found] == [{**c, "mode": m} for c, modes in cases for m in modes]
    is_hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    for row in found:
        is_product = row["case"]["activation"] == "none"
        names = {*invariance.POLICIES, *(invariance.TRITON if is_product else ())}
        assert {*row["numbers"], *row.get("failed", ())} == names and "auto" in row["numbers"]
        assert all(number["median"] > 0 for number in row["numbers"].values())
        if is_hopper:
            assert "failed" not in row
        elif device == "cpu":
            assert {*row["failed"]} == names - {"auto"}
            assert "NotImplementedError" in row["failed"]["batch_invariant"]
    assert len(capsys.readouterr().out.splitlines()) == len(found)


def test_no_row_of_batch_invariance_begins_after_the_limit():
    assert invariance.main(["--tiny", "--device", "cpu", "--limit", "1e-9"]) == []


@pytest.mark.parametrize("activation", ["none", "gelu", "silu"])
def test_blocks_of_batch_invariance_are_torchs(activation):
    sizes = [32, 64, 32] if activation != "none" else [32, 64]
    data = invariance.Data({"sizes": sizes, "tokens": 16, "activation": activation}, CPU)
    x, (first, *others), biases = data.x, data.weights, data.biases or [None, None]
    want = torch.nn.functional.linear(x, first, biases[0])
    if activation == "gelu":
        want = torch.nn.functional.gelu(want, approximate="tanh")
    elif activation == "silu":
        want = torch.nn.functional.silu(want) * torch.nn.functional.linear(x, others[0])
    if others:
        want = torch.nn.functional.linear(want, others[-1], biases[1])
    torch.testing.assert_close(data.forward(), want, rtol=2e-2, atol=2e-2)
    assert data.grad.shape == want.shape
    invariance.call_of("auto", "step", data)()
    assert all(leaf.grad is not None for leaf in data.leaves)


# Triton's interpreter has no bf16 in descriptors; an array of one element is no index in new NumPy.
INTERPRETED = """
import torch, triton.runtime.interpreter as interpreter
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):
    patch(tensor, scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())
interpreter._patch_lang_tensor = patched
from benchmarks.triton_product import TILES, product
torch.manual_seed(0)
for name in TILES:
    for rows, features, inner in ((300, 264, 72), (5, 8, 16)):
        x, w = torch.randn(rows, inner).half(), torch.randn(features, inner).half()
        y, want = product(x, w, name), x.float() @ w.float().t()
        torch.testing.assert_close(y.float(), want, rtol=2e-3, atol=2e-3)
        assert torch.equal(product(x[:3], w, name), y[:3])
print("equal")
"""


def test_tritons_product_is_torchs_and_batch_invariant():
    pytest.importorskip("triton")
    ended = python("-c", INTERPRETED, PYTHONPATH=str(ROOT), TRITON_INTERPRET="1")
    assert ended.stdout == "equal\n"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", invariance.TRITON)
def test_tritons_product_on_a_gpu(name):
    from benchmarks.triton_product import TILES, product

    assert tuple(TILES) == invariance.TRITON
    x, w = (torch.randn(n, 264, device="cuda", dtype=torch.bfloat16) / 16 for n in (1000, 520))
    y = product(x, w, name)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, w), rtol=2e-2, atol=2e-2)
    assert torch.equal(product(x[:7].contiguous(), w, name), y[:7])


# -------------------------------------------------------------------------------- the gate of speed


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
def test_verdict_of_the_gate(times, looks, below, worst):
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


# ---------------------------------------------------------------------------- the suite `models`

TINY = {case.model: case for case in cases_of("models", CPU, quick=True, dtypes=["fp32"])}
# how many blocks are fused
BLOCKS = {"ViT-tiny": 2, "BERT-tiny": 3, "GPT-2 tiny": 2, "OPT-tiny": 2, "LLaMA-tiny": 2}
BLOCKS |= {"DLRM tiny": 1, "TD3 tiny": 1, "VGG-tiny": 4, "ResNet-tiny, folded": 9}
LIBRARIES = {"ViT-tiny": "timm", "ResNet-tiny, folded": "torchvision"}
LIBRARIES |= dict.fromkeys(("DLRM tiny", "TD3 tiny", "VGG-tiny"), "torch")


def outcome_of_model(made: Models, name: str) -> list[torch.Tensor]:
    """The results of a call: the output, or all gradients."""
    contender = made.contender(name)
    with contender.conditions():
        if made.case.mode == "forward":
            return [contender.call()]
        contender.call()
        contender.call()  # gradients do not add up
    own, inputs = made.copies[name], made.original[1]
    leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    return [leaf.grad.clone() for leaf in (*leaves, *own.parameters()) if leaf.grad is not None]


@pytest.mark.parametrize("mode", ["forward", "step"])
@pytest.mark.parametrize("name", TINY)
def test_fused_does_the_work_of_eager(name, mode):
    pytest.importorskip(LIBRARIES.get(name, "transformers"))
    case = replace(TINY[name], mode=mode)
    if not makes_sense(case, CPU):
        pytest.skip("it is for inference only")
    made = Models(case, CPU)
    want = outcome_of_model(made, "eager")
    plain = copy.deepcopy(made.copies["eager"])
    got = outcome_of_model(made, "fused")
    assert made.replaced() == {"fused": BLOCKS[name]}
    assert made.copies["fused"] is not made.copies["eager"]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if mode == "step":  # of every parameter that the model uses, and of the loss as torch has it
        assert len(want) > len(list(plain.parameters())) - 3
        plain.zero_grad()
        plain(*made.original[1]).backward()
        grads = [p.grad for p in plain.parameters() if p.grad is not None]
        torch.testing.assert_close(grads, want[-len(grads) :], rtol=1e-4, atol=1e-5)


# In the folded network convolutions share one ReLU: the stem and two in each block.
@needs_compiler
@pytest.mark.parametrize(
    ("name", "mode", "ways", "count"),
    [
        ("DLRM tiny", "forward", ("compile", "compile+pass"), 1),
        ("DLRM tiny", "step", ("compile", "compile+pass"), 1),
        ("ResNet-tiny, folded", "forward", ("compile+pass",), 1 + 4 * 2),
    ],
)
def test_compiled_does_the_work_of_eager(name, mode, ways, count):
    pytest.importorskip(LIBRARIES[name])
    made = Models(replace(TINY[name], mode=mode), CPU)
    want = outcome_of_model(made, "eager")
    for way in ways:
        torch.testing.assert_close(outcome_of_model(made, way), want, rtol=1e-4, atol=1e-5)
    assert made.replaced() == {"compile+pass": count}


LLAMA = 16 * (4 * 2048**2 + 3 * 2048 * 5632) / 1e6 + 2 * 8192 * 2048 / 1e6
# millions of parameters, and how many blocks are fused
SIZES = {"ViT-B/16": (86.6, 12), "BERT-base": (109.5, 13), "GPT-2 small": (124.4, 12)}
SIZES |= {"OPT-125M": (125.2, 12), "LLaMA, 16 layers": (LLAMA, 16), "DLRM top MLP": (3.52, 1)}
SIZES |= {"TD3 critic": (0.0722, 1), "VGG-16": (138.36, 14), "ResNet-50, folded": (25.53, 33)}
OPERATORS = {"relu": "mlp (ReLU)", "gelu": "mlp (GELU (tanh))", "silu": "gated_mlp (SiLU)"}
OPERATORS["gelu-erf"] = "mlp (GELU (erf))"


@pytest.mark.parametrize(("name", "activation"), dict.fromkeys((n, a) for n, a, _ in MODELS))
def test_each_model_is_of_its_size_and_activation(name, activation):
    for library in ("timm", "transformers", "torchvision"):
        pytest.importorskip(library)
    (sizes,) = {size for n, _, size in MODELS if n == name}
    case = Case("models", sizes, 1, "bf16", activation, "forward", name)
    with torch.device("meta"):
        model = FAMILIES[name].make(case, FAMILIES[name].config)
    millions, blocks = SIZES[name]
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    report = tfl.fuse_(model)
    assert len(report.fused) == blocks and not report.skipped
    if name in ("VGG-16", "ResNet-50, folded"):
        assert report.fused[0].after == ("conv2d_relu",)
    else:
        # the two layers of BERT's block lie in two modules
        apart = {"gelu": "linear_gelu (tanh)", "gelu-erf": "linear_gelu (erf)"}
        expected = (apart if name == "BERT-base" else OPERATORS)[activation]
        assert {block.after[0].partition(" ×")[0] for block in report.fused} == {expected}


@pytest.mark.parametrize(("joules", "watts"), [(30, pytest.approx(300, rel=0.05)), (0, None)])
def test_power_is_taken_between_steps_of_the_counter(joules, watts, monkeypatch):
    """A counter of energy goes up every 100 ms, or is not there."""
    spent = Counter(s=0.03)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: spent["s"])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(machine, "sensors", lambda _: lambda: (0, spent["s"] // 0.1 * joules * 1e3))
    assert machine.power(CUDA, lambda: spent.update(s=0.007), seconds=1.0) == watts


def test_a_missing_package_is_told_in_words(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "timm", None)
    arguments = ["models", "--quick", "--device", "cpu", "--only", "ViT", "--only", "step"]
    assert main(arguments) == 0, "nothing of ours has failed"
    output = capsys.readouterr().out
    assert "eager failed: ModuleNotFoundError: " in output and "timm" in output


def test_memory_of_a_step():
    """Two blocks keep 64 hidden features for each of five tokens of two images."""
    pytest.importorskip("timm")
    case, _ = cases_of("memory-models", CPU, quick=True, dtypes=["fp32"])
    assert case.mode == "saved", "the peak can be told of a GPU only"
    record = measure_case(case, ["fused", "fused-low", "eager"], CPU, seconds=0)
    assert not record.failed and record.unit == "MiB"
    assert record.replaced == {"fused": 2, "fused-low": 2}
    kept = {name: number.median * 2**20 for name, number in record.numbers.items()}
    assert kept["fused"] <= kept["eager"]
    assert kept["fused"] - kept["fused-low"] == 2 * 2 * 5 * 64 * 4
