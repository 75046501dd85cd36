"""The benchmark suite: fair timing, results that survive, a table that says what they say."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from bench_records import ROOT, STEP, record_of

from benchmarks import contenders, gated, operands, results, rivals, traffic
from benchmarks.__main__ import main, parse
from benchmarks.cases import SUITES, Case, cases_of
from benchmarks.results import Record
from benchmarks.run import entrants, measure_case
from benchmarks.table import Table
from torch_fused_linear import timing
from torch_fused_linear.timing import Contender, measure, wall_clock

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """Two would wait for each other at every layer wherever something else runs beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -------------------------------------------------------------------------------------- timing


def test_whoever_sleeps_longer_is_slower():
    sleepers = [Contender(f"{ms} ms", lambda ms=ms: time.sleep(ms / 1e3)) for ms in (4, 1, 2)]
    numbers, failed = measure(sleepers, wall_clock, seconds=0)
    assert not failed
    assert numbers["1 ms"].median < numbers["2 ms"].median < numbers["4 ms"].median
    # A sleep never ends early, and a busy machine may make it late.
    assert 4000 <= numbers["4 ms"].median < 40000
    for number in numbers.values():
        assert number.q1 <= number.median <= number.q3
        assert number.rounds == timing.MIN_ROUNDS


class FakeClock:
    """Whose calls take as long as they say, and who remembers the batches."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, int]] = []

    def __call__(self, call, times):
        name, seconds = call()
        self.batches.append((name, times))
        return seconds * times


def test_rounds_are_interleaved_and_shuffled():
    clock = FakeClock()
    names = ["a", "b", "c"]
    entering = [Contender(name, lambda name=name: (name, 1e-3)) for name in names]
    numbers, _ = measure(entering, clock, seconds=60)
    rounds = timing.MAX_ROUNDS
    assert [number.rounds for number in numbers.values()] == [rounds] * 3
    timed = [name for name, _ in clock.batches[-3 * rounds :]]
    orders = [tuple(timed[i : i + 3]) for i in range(0, len(timed), 3)]
    assert all(sorted(order) == names for order in orders), "once in every round"
    assert len(set(orders)) > 3, "in changing order"


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 3), (1e-3, 3), (1e-4, 30), (1e-9, 2000)])
def test_a_batch_is_long_enough_and_no_longer(seconds, calls):
    numbers, _ = measure([Contender("a", lambda: ("a", seconds))], FakeClock(), seconds=0)
    assert numbers["a"].calls == calls
    assert numbers["a"].median == pytest.approx(seconds * 1e6)


def test_one_that_fails_is_left_out_and_named():
    def broken():
        raise RuntimeError("does not\ncompile")

    entering = [Contender("broken", broken), Contender("fine", lambda: None)]
    numbers, failed = measure(entering, wall_clock, seconds=0)
    assert list(numbers) == ["fine"]
    assert failed == {"broken": "RuntimeError: does not compile"}


def test_conditions_hold_around_each_call_and_end():
    import torch_fused_linear as tfl

    case = Case("layer", (8, 16), 4, "fp32", "relu", "forward")
    data = operands.Operands.random(case, CPU)
    for name, policy in (("ours", "auto"), ("cublaslt", "cublaslt")):
        with contenders.contender(name, case, [data]).conditions():
            assert (tfl.get_policy(), torch.is_grad_enabled()) == (policy, False)
    assert tfl.get_policy() == "auto"
    assert torch.is_grad_enabled()


# ---------------------------------------------------------------------------------- contenders


@pytest.mark.parametrize("sizes", [(8, 16), (8, 32, 8)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu-erf"])
def test_all_that_claim_to_be_the_layer_agree(sizes, activation):
    """Output and all gradients; a baseline that computes less would win for nothing."""
    for mode in ("forward", "step"):
        case = Case("layer", sizes, 4, "fp32", activation, mode)
        data = operands.Operands.random(case, CPU)
        names = ["ours", "mlp", "cublaslt", "mlp-cublaslt", "eager", "addmm"]
        outcome = {}
        for name in entrants(case, names, CPU):
            with contenders.conditions_of(name, case):
                network = contenders.NETWORKS[name](case, data)
                if mode == "forward":
                    outcome[name] = [network(data.input)]
                else:
                    step = contenders.step_of(network, data)
                    step()
                    step()  # gradients do not add up
                    outcome[name] = [leaf.grad.clone() for leaf in data.leaves]
        assert {"ours", "cublaslt", "eager"} <= set(outcome)
        if mode == "step":
            output = contenders.eager(case, data)(data.input)
            outcome["plain"] = [*torch.autograd.grad(output, data.leaves, data.grad_output)]
        for values in outcome.values():
            torch.testing.assert_close(values, outcome["eager"], rtol=1e-4, atol=1e-5)


def test_the_bare_products_are_those_of_the_mode():
    counts = {}
    for mode in ("forward", "backward", "step"):
        case = Case("ffn", (8, 32, 8), 4, "fp32", "relu", mode)
        run = contenders.products(case, operands.Operands.random(case, CPU))
        with torch.profiler.profile(acc_events=True) as profile:
            run()
        counts[mode] = sum(event.name == "aten::mm" for event in profile.events())
    assert counts == {"forward": 2, "backward": 4, "step": 6}


def test_small_cases_do_not_stay_in_the_cache():
    small = Case("layer", (64, 64), 64, "bf16", "relu", "forward")
    sets = operands.random_sets(small, CPU)
    assert len(sets) == operands.MAX_SETS
    assert len({data.input.data_ptr() for data in sets}) == len(sets)
    used = []
    turn = contenders.in_turns([lambda i=i: used.append(i) for i in range(3)])
    for _ in range(6):
        turn()
    assert used == [0, 1, 2, 0, 1, 2]
    large = 2 * operands.CACHES_TO_FILL * operands.CPU_CACHE
    assert operands.sets_needed(large, CPU) == 1


def test_memory_of_a_relu_layer():
    """fp32: eager keeps input and output; the library's mask is a bit for each output."""
    case = Case("memory", (128, 256), 64, "fp32", "relu", "saved")
    record = measure_case(case, ["ours", "cublaslt", "eager"], CPU, seconds=0)
    kept = {name: number.median * 2**20 for name, number in record.numbers.items()}
    assert kept["ours"] == kept["eager"] == 4 * 64 * (128 + 256)
    assert kept["cublaslt"] == 4 * 64 * 128 + 64 * 256 // 8


def test_bytes_for_each_element_of_a_hidden_activation():
    names = ["ours", "mlp", "low", "mlp-low", "eager"]
    expected = {
        ((128, 256, 128), "gelu"): [4, 4, 2, 2, 4],
        ((128, 256, 128), "gelu-erf"): [4, 4, 2, 2, 4],
        ((128, 256, 128), "relu"): [2, 2, 2.125, 2, 2],  # the next layer keeps the output
    }
    for (sizes, activation), want in expected.items():
        case = Case("memory", sizes, 64, "bf16", activation, "B/element")
        record = measure_case(case, names, CPU, seconds=0)
        assert record.unit == "B"
        assert [record.numbers[name].median for name in names] == want
    case = Case("memory", (128, 256), 64, "bf16", "relu", "B/element")
    record = measure_case(case, ["ours", "low", "eager"], CPU, seconds=0)
    assert [number.median for number in record.numbers.values()] == [2, 0.125, 2]


def test_bytes_of_an_activation_gradient():
    elements = 16 * 200
    for mode, saved in (("from output", 2 * elements), ("from mask", 16 * 256 // 8)):
        case = Case("activation", (200,), 16, "bf16", "relu", mode)
        call, moved = traffic.activation_calls("ours", case, CPU)
        assert moved == 2 * 2 * elements + saved + 2 * 200
        dz, grad_bias = call()
        assert (dz.shape, grad_bias.shape) == ((16, 200), (200,))


# ------------------------------------------------------------------------------------- results


def test_speedup_fraction_and_losses():
    record = record_of(ours=100, eager=90, mm=50, linear=80)
    assert record.speedup("ours") == 0.9
    assert record.fraction("ours") == 0.5
    assert record.lost()
    assert not record_of(ours=100, eager=98.5).lost()
    assert record_of(ours=100).speedup("ours") is None
    copied = record_of(ours=100, copy=80)
    copied.bytes_moved = {"ours": 300_000, "copy": 200_000}
    assert copied.bandwidth("ours") == 3.0
    assert copied.fraction("ours") == pytest.approx(3.0 / 2.5)


def test_json_holds_everything(tmp_path):
    first = record_of(ours=1.5, eager=2.5)
    second = Record(cases_of("ffn", CPU)[0], "us", failed={"ours": "no"}, kernels={"mm": ["k"]})
    results.save(tmp_path / "r.json", {"machine": "m"}, [first, second])
    header, records = results.load(tmp_path / "r.json")
    assert header == {"machine": "m"}
    assert records == [first, second]


@pytest.mark.parametrize("broken", ["write", "replace"])
def test_json_is_never_half_written(tmp_path, monkeypatch, broken):
    path = tmp_path / "r.json"
    results.save(path, {}, [record_of(ours=1)])
    before = path.read_text()

    def fail(*args, **kwargs):
        if broken == "write":
            real_write(args[0], args[1][:10])
        raise OSError("disk full")

    real_write = Path.write_text
    if broken == "write":
        monkeypatch.setattr(Path, "write_text", fail)
    else:
        monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        results.save(path, {}, [record_of(ours=2)])
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["r.json"], "and nothing is left behind"


def test_an_interrupted_run_keeps_what_it_measured(tmp_path, monkeypatch, capsys):
    import benchmarks.__main__ as bench

    path, measured = tmp_path / "r.json", []

    def interrupted(case, *args):
        if measured:  # a killed process could not save anything any more
            assert [record.case for record in results.load(path)[1]] == measured
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(case)
        return record_of(case, ours=1, eager=2)

    monkeypatch.setattr(bench, "measure_case", interrupted)
    assert main(["layer", "--quick", "--device", "cpu", "--json", str(path)]) == 130
    assert [record.case for record in results.load(path)[1]] == measured
    assert "after 3 of 36 cases" in capsys.readouterr().out


def test_what_our_reference_fails_at_too_is_no_failure_of_ours():
    record = Record(STEP, "us", failed={"fused": "no timm", "eager": "no timm", "ours": "no"})
    assert not record.failed_alone("fused")
    del record.failed["eager"]
    assert record.failed_alone("fused") and not record.failed_alone("mlp")
    record.failed = {"compile+pass": "no compiler"}
    assert record.failed_alone("compile+pass")
    record.failed["compile"] = "no compiler"
    assert not record.failed_alone("compile+pass")


def test_a_failure_of_ours_is_told(monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("out of order")

    monkeypatch.setitem(contenders.NETWORKS, "ours", broken)
    arguments = ["host", "--quick", "--device", "cpu", "--dtypes", "fp32", "--only", "relu forward"]
    assert main(arguments) == 1
    output = capsys.readouterr().out
    assert "ours failed: RuntimeError: out of order" in output


def test_lines_of_the_table_are_aligned_and_losses_marked():
    cases = cases_of("layer", CPU)[:2]
    table = Table(cases, ["ours", "eager", "mm", "reduce-overhead"])
    good = table.line(record_of(cases[0], ours=50, eager=60, mm=40, reduce_overhead=1234567))
    bad = table.line(record_of(cases[1], ours=50.0, eager=40, mm=25))
    assert len(table.head()) == len(good) == len(bad)
    assert "1.20 " in good and "<" not in good and " 1234567 " in good
    assert "0.80<" in bad and "0.50 " in bad
    foot = table.foot([record_of(ours=50, eager=60), record_of(ours=50, eager=40)])
    assert "1 of 2 below 0.98" in foot


# -------------------------------------------------------------------------------- command line


def test_a_quick_run_of_layer_and_host(tmp_path):
    """As a user runs it: table, numbers and pictures."""
    command = [sys.executable, "-m", "benchmarks", "layer", "host", "--quick"]
    command += ["--device", "cpu", "--dtypes", "bf16", "fp32", "--out", str(tmp_path)]
    begin = time.monotonic()
    process = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert time.monotonic() - begin < 90
    header, records = results.load(tmp_path / "bench.json")
    assert header["device"] == "cpu"
    assert header["torch"] == torch.__version__
    asked_for = cases_of("layer", CPU, True, ["bf16", "fp32"])
    asked_for += cases_of("host", CPU, True, ["bf16", "fp32"])
    assert [record.case for record in records] == asked_for
    for record in records:
        assert not record.failed
        assert {"ours", "eager"} <= set(record.numbers)
        assert all(0 < n.q1 <= n.median <= n.q3 for n in record.numbers.values())
        assert record.case.shape in process.stdout
    for name in ("layer.png", "host.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert str(tmp_path / name) in process.stdout


def test_threads_are_those_asked_for(tmp_path):
    path = tmp_path / "r.json"
    arguments = ["cpu", "--quick", "--device", "cpu", "--dtypes", "fp32", "--only", "relu forward"]
    assert main([*arguments, "--threads", "2", "--json", str(path)]) == 0
    assert torch.get_num_threads() == 2
    assert results.load(path)[0]["machine"].endswith(", 2 threads")


def test_every_suite_runs(capsys):
    arguments = ["--quick", "--device", "cpu", "--dtypes", "fp32", "--only", "relu"]
    assert main([*arguments, "--seconds-per-case", "0.001", "--kernels"]) == 0
    output = capsys.readouterr().out
    for suite in SUITES:
        some = any(case.activation == "relu" for case in cases_of(suite, CPU, quick=True))
        assert (f"\n{suite}: " in output) == some
    assert "fused::linear_relu" in output, "kernels are named"


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


@pytest.mark.cuda
def test_every_suite_runs_on_a_gpu(tmp_path):
    """Events, graphs, peak memory and kernels' names are only there."""
    arguments = ["--quick", "--device", "cuda", "--seconds-per-case", "0.01", "--kernels"]
    assert main([*arguments, "--only", "relu", "--out", str(tmp_path)]) == 0
    header, records = results.load(tmp_path / "bench.json")
    assert header["devices"]
    assert {"graph", "peak"} <= {record.case.mode for record in records}
    for record in records:
        if record.case.model and importlib.util.find_spec("transformers") is None:
            continue
        not_here = {n for n, why in record.failed.items() if "ModuleNotFoundError" in why}
        assert set(record.failed) <= not_here & {*rivals.BLOCKS, *gated.OTHERS}
        assert record.unit in ("MiB", "B") or all(record.kernels.values())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["layers"], "unknown suite 'layers'; there are layer, ffn, "),
        (["layer", "--dtypes", "fp8"], "--dtypes: invalid choice: 'fp8'"),
        (["layer", "--baselines", "jax"], "--baselines: invalid choice: 'jax'"),
        (["layer", "--device", "tpu"], "'tpu'"),
        (["layer", "--seconds-per-case", "0"], "--seconds-per-case: must be above zero"),
        (["cpu", "--threads", "0"], "--threads: must be above zero"),
        (["layer", "--only", "T=7"], "no case is left to measure"),
        (["layer", "--json", "no/such/place.json"], "--json no/such/place.json: no such directory"),
    ],
)
def test_bad_arguments_give_one_line(arguments, says, capsys):
    with pytest.raises(SystemExit) as raised:
        parse([*arguments, "--device", "cpu"] if "--device" not in arguments else arguments)
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert says in message
    assert message.count("\n") == 1


def test_the_grid_is_the_one_promised():
    cuda = torch.device("cuda")
    layer = cases_of("layer", cuda)
    assert len(layer) == len(set(layer)) == 5 * 3 * 2 * 3 * 2 + 2 * 3 * 1 * 3 * 2
    assert len(cases_of("ffn", cuda)) == 3 * 3 * 2 * 3
    assert {case.mode for case in cases_of("mlp-small", cuda)} == {"step", "graph"}
    assert {case.mode for case in cases_of("mlp-small", CPU)} == {"step"}
    shapes = {(case.tokens, case.sizes[0]) for case in cases_of("activation", cuda)}
    assert shapes == {(8192, 3072), (8192, 4096), (65536, 4096), (8192, 16384)}
    assert len(cases_of("models", cuda)) == 10 * 2 + 1  # a folded network is not trained
    assert len(cases_of("cpu", CPU)) == 3 * 4 * 2 * 3 * 2 and not cases_of("cpu", cuda)
