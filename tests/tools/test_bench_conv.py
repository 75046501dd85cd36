"""The benchmark suite `conv`: the same work by all contenders, in the formats that are promised."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import one_thread  # noqa: F401

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from bench_records import record_of

from benchmarks import contenders, operands, pictures, results
from benchmarks.__main__ import main, parse
from benchmarks.cases import SUITES, Case, cases_of, worth_compiling
from benchmarks.convolutions import CONVOLUTIONS, TINY_CONVOLUTIONS, Convolution
from benchmarks.run import entrants, measure_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FORMATS = {True: torch.channels_last, False: torch.contiguous_format}
TINY = [replace(conv, last=last) for conv in TINY_CONVOLUTIONS for last in FORMATS]


def case_of(conv: Convolution, mode: str, suite: str = "conv") -> Case:
    sizes = (conv.channels, conv.out)
    return Case(suite, sizes, 2, "fp32", "relu", mode, conv=conv)


@pytest.mark.parametrize("conv", TINY, ids=str)
def test_ours_does_the_work_of_eager(conv):
    """Output and all gradients, on tensors of the format; the images need no gradient."""
    for mode in ("forward", "step"):
        case = case_of(conv, mode)
        data = operands.Operands.random(case, CPU)
        side = (conv.size + 2 * conv.padding - conv.kernel) // conv.stride + 1
        assert data.grad_output.shape == (2, conv.out, side, side)
        for tensor in (data.input, data.layers[0].weight, data.grad_output):
            assert tensor.is_contiguous(memory_format=FORMATS[conv.last])
        outcome = {}
        for name in entrants(case, ["ours", "eager"], CPU):
            call = contenders.contender(name, case, [data]).call
            if mode == "forward":
                outcome[name] = [call()]
            else:
                call()
                call()  # gradients do not add up
                outcome[name] = [leaf.grad for leaf in data.leaves]
        if mode == "step":
            leaves = [leaf for leaf in data.leaves if leaf.requires_grad]
            output = torch.relu(data.layers[0](data.input))
            outcome["plain"] = [*torch.autograd.grad(output, leaves, data.grad_output)]
            assert (outcome["ours"][0] is None) == (conv.channels == 3)
            outcome["plain"] = [None] * (len(leaves) == 2) + outcome["plain"]
        assert {"ours", "eager"} <= set(outcome)
        for values in outcome.values():
            torch.testing.assert_close(values, outcome["eager"], rtol=1e-4, atol=1e-5)


def test_the_bare_convolution_is_that_of_the_mode():
    for conv in TINY:
        for mode in ("forward", "step"):
            case = case_of(conv, mode)
            data = operands.Operands.random(case, CPU)
            call = contenders.contender("conv", case, [data]).call
            with torch.profiler.profile(acc_events=True) as profile:
                call()
            names = [event.name for event in profile.events()]
            assert names.count("aten::conv2d") == 1
            assert names.count("aten::convolution_backward") == (mode == "step")
            assert not any("relu" in name or "add" in name for name in names)


def test_who_is_asked():
    names = [*SUITES["conv"].ours, *contenders.BASELINES]
    case = case_of(TINY[0], "step")
    linear = Case("layer", (8, 16), 4, "fp32", "relu", "step")
    assert set(entrants(case, names, CPU)) == {"ours", "eager", "conv", *contenders.COMPILED}
    assert "conv" not in entrants(linear, names, CPU)
    saved = case_of(TINY[0], "saved", "memory")
    assert entrants(saved, ["ours", "mlp", "cublaslt", "eager"], CPU) == ["ours", "eager"]


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="needs a C++ compiler")
def test_the_pass_puts_ours_in():
    case = case_of(TINY_CONVOLUTIONS[2], "forward")
    data = operands.Operands.random(case, CPU)
    ran, values = {}, {}
    for name in ("compile+pass", "compile", "eager"):
        made = contenders.contender(name, case, [data])
        with made.conditions():
            made.call()
            with torch.profiler.profile(acc_events=True) as profile:
                values[name] = made.call()
        ran[name] = any(event.name == "fused::conv2d_relu" for event in profile.events())
        torch._dynamo.reset()
    assert ran == {"compile+pass": True, "compile": False, "eager": False}
    for value in values.values():
        torch.testing.assert_close(value, values["eager"], rtol=1e-4, atol=1e-5)


def test_the_grid_is_the_one_promised():
    grid = cases_of("conv", CUDA)
    assert len(grid) == len(set(map(str, grid))) == len(CONVOLUTIONS) * (2 * 3 * 2 + 1)
    graphs = [case for case in grid if case.mode == "graph"]
    assert {(case.dtype, case.conv.last) for case in graphs} == {("bf16", True)}
    assert {case.mode for case in cases_of("conv", CPU)} == {"forward", "step"}
    assert {case.tokens for case in grid} == {32}
    assert {case.tokens for case in cases_of("conv", CPU)} == {4}
    compiled = [case for case in grid if worth_compiling(case) and case.mode != "graph"]
    assert {(c.dtype, c.conv.last) for c in compiled} == {("bf16", True)} and len(compiled) == 8
    label = str(case_of(replace(CONVOLUTIONS[0], last=False), "step"))
    assert label == "conv 3→64 7x7 stride 2 @224 NCHW N=2 fp32 relu step"
    assert [c.out_size for c in CONVOLUTIONS] == [112, 56, 28, 14, 7, 28, 56, 56, 14, 7, 28]


def test_a_step_keeps_no_more_than_eagers():
    """Image and result; ReLU's own result is the convolution's, in place."""
    conv = Convolution(4, 8, 3, 10)
    record = measure_case(case_of(conv, "saved", "memory"), ["ours", "eager"], CPU, seconds=0)
    kept = {name: number.median * 2**20 for name, number in record.numbers.items()}
    assert kept == dict.fromkeys(("ours", "eager"), 4 * 2 * (4 + 8) * 100)


def test_a_quick_run_with_numbers_and_picture(tmp_path, capsys):
    arguments = ["conv", "--quick", "--device", "cpu", "--dtypes", "bf16", "fp32"]
    assert main([*arguments, "--seconds-per-case", "0.001", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    header, records = results.load(tmp_path / "bench.json")
    assert set(header["cudnn"]) == {"allow_tf32", "benchmark"}
    assert [record.case for record in records] == cases_of("conv", CPU, True, ["bf16", "fp32"])
    for record in records:
        assert set(record.numbers) == {"ours", "eager", "conv"} and not record.failed
        assert record.case.shape in output and record.fraction("ours") > 0
    assert "of conv" in output and "of GEMM" not in output
    assert (tmp_path / "conv.png").read_bytes().startswith(b"\x89PNG")
    assert pictures.place(records[0]).endswith("@16 NHWC   N=2")


def test_cudnn_benchmark_is_asked_for():
    given = [parse(["conv", "--device", "cpu", *more]) for more in ([], ["--cudnn-benchmark"])]
    assert [settings.cudnn_benchmark for settings in given] == [False, True]
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = False
        arguments = ["conv", "--quick", "--device", "cpu", "--cudnn-benchmark", "--dtypes", "fp32"]
        assert main([*arguments, "--only", "1x1", "--only", "NHWC", "--only", "forward"]) == 0
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before


def test_files_from_before_there_were_any_are_read(tmp_path):
    record = record_of(Case("layer", (8, 16), 4, "fp32", "relu", "step"), ours=1)
    results.save(tmp_path / "r.json", {}, [record])
    (value,) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert not {"conv", "model"} & set(value["case"])
    assert results.load(tmp_path / "r.json")[1] == [record]
