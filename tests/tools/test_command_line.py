"""The commands: what lists them, --help, errors in one line, Ctrl-C; what the doctor finds."""

import re
import signal
from types import SimpleNamespace

import pytest
import torch
from processes import ROOT, python
from torch.nn.functional import linear

from benchmarks import __main__ as bench
from torch_fused_linear import doctor
from torch_fused_linear.gain import __main__ as gain


def test_the_package_lists_its_commands():
    said = python("-m", "torch_fused_linear").stdout
    listed = re.findall(r"^  python -m torch_fused_linear\.(\w+) +\w", said, re.MULTILINE)
    package = ROOT / "torch_fused_linear"
    files = [*package.glob("*.py"), *package.glob("*/__main__.py")]
    found = [path for path in files if "sys.exit(main())" in path.read_text()]
    runnable = {path.parent.name if path.stem == "__main__" else path.stem for path in found}
    assert set(listed) == runnable
    assert python("-m", "torch_fused_linear", "docter", code=2).stdout == said


@pytest.mark.parametrize("command", [doctor.main, bench.parse, gain.main])
def test_there_is_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        command(["--help"])
    assert stopped.value.code == 0 and "usage: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        (bench, "layers", "unknown suite 'layers'; there are layer, ffn, "),
        (bench, "layer --dtypes fp8", "--dtypes: invalid choice: 'fp8'"),
        (bench, "layer --baselines jax", "--baselines: invalid choice: 'jax'"),
        (bench, "layer --device tpu", "'tpu'"),
        (bench, "layer --seconds-per-case 0", "--seconds-per-case: must be above zero"),
        (bench, "cpu --threads 0", "--threads: must be above zero"),
        (bench, "layer --only T=7", "no case is left to measure"),
        (bench, "layer --json no/such/place.json", "--json no/such/place.json: no such directory"),
        (gain, "torch.nn --input 4x8", "expected package.module:function, timm:NAME or hf:TYPE"),
        (gain, "torch.nn:ReLU", "the following arguments are required: --input"),
        (gain, "torch.nn:nothing --input 4x8", "has no attribute 'nothing'"),
        (gain, "torch.nn:ReLU --input 4,8", "expected sizes, as 32x197x768 or 8x1024:50257, got 4"),
        (gain, "torch.nn:ReLU --input 4x0", "got 4x0"),
        (gain, "torch.nn:ReLU --input 4x8:", "got 4x8:"),
        (gain, "torch.nn:ReLU --input 8 --seconds nan", "gain: seconds must be above zero, got na"),
        (gain, "torch.nn:ReLU --input 8 --json no/such.json", "expected a file in a folder that"),
        (gain, "torch.nn:ReLU --input 8 --picture .", "expected a file in a folder that exists"),
        (gain, "torch.nn:Linear --input 4x8", "TypeError: Linear.__init__() missing 2 required"),
        (gain, "torch:Size --input 4x8", "torch:Size: expected an nn.Module, got Size"),
        (gain, ":ReLU --input 4x8", "expected package.module:function, timm:NAME or hf:TYPE"),
        (gain, "no_such_module:build --input 4x8", "No module named 'no_such_module'"),
        (gain, "hf:no_such_type --input 4x8", "no_such_type"),
        (gain, "timm:no_such_model --input 4x8", "Unknown model (no_such_model)"),
        (gain, "torch.nn:ReLU --input 4x8 --device abacus", "abacus"),
    ],
)
def test_bad_arguments_give_one_line(command, arguments, says, capsys):
    library = {"hf": "transformers", "timm": "timm"}.get(arguments.partition(":")[0])
    if library:
        pytest.importorskip(library)
    with pytest.raises(SystemExit) as stopped:
        command.main(["--device", "cpu", *arguments.split()])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1 and len(message) < 400


def test_ctrl_c_ends_the_doctor_without_a_traceback():
    program = (
        "import os, runpy, signal, sys, torch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "torch.cuda.device_count = lambda: os.kill(os.getpid(), signal.SIGINT) or 0\n"
        "sys.argv = ['doctor']\n"
        "runpy.run_module('torch_fused_linear.doctor', run_name='__main__')\n"
    )
    ended = python("-c", program, code=128 + signal.SIGINT, PYTHONPATH=str(ROOT))
    assert "Traceback" not in ended.stderr


def test_the_doctor_names_what_is_there_and_finds_it_working():
    said = python("-m", "torch_fused_linear.doctor").stdout
    assert "FAILED" not in said
    lines = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert lines["torch"] == torch.__version__
    assert lines["library"].startswith(("CUDA", "CPU only"))
    assert lines["cpu"].endswith("OK")
    assert lines["calls"].startswith(("direct", "through torch.ops"))
    assert {"python", "driver", "cublaslt", "device", "oneDNN", "cuBLASLt"} <= set(lines)


def test_its_check_is_exact(device):
    assert doctor.largest_error(str(device)) == 0


def broken(x, w, b):
    raise RuntimeError("out of order")


@pytest.mark.parametrize(
    ("operator", "says"),
    [
        (linear, "FAILED"),
        (lambda x, w, b: torch.relu(linear(x, w)) + 0 * b.sum(), "FAILED"),
        # relu's value, with a gradient of 1 instead of 0 at exactly 0
        (lambda x, w, b: (z := linear(x, w, b)) * (z >= 0), "FAILED"),
        (broken, "RuntimeError: out of order: FAILED"),
    ],
    ids=["no activation", "no bias", "gradient at 0", "raises"],
)
def test_a_wrong_operator_is_noticed(monkeypatch, capsys, operator, says):
    monkeypatch.setattr(torch.ops, "fused", SimpleNamespace(linear_relu=operator))
    assert doctor.main([]) == 1
    assert says in capsys.readouterr().out


def test_a_gpu_that_the_build_does_not_use_is_a_failure(monkeypatch, capsys):
    built = {**doctor.library.build_info(), "cuda": None}
    monkeypatch.setattr(doctor.library, "build_info", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert doctor.main([]) == 1
    output = capsys.readouterr().out
    assert "a GPU is here that this build does not use" in output and "to build   " in output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main([]) == 0
