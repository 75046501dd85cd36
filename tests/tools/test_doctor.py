"""The doctor: says what is there, runs without a library, and its exit code can be believed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_fused_linear import doctor

ROOT = Path(__file__).resolve().parents[2]


def run_doctor(folder):
    return subprocess.run(
        [sys.executable, "-m", "torch_fused_linear.doctor"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


def test_names_what_is_there_and_finds_it_working():
    result = run_doctor(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAILED" not in result.stdout
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["torch"] == torch.__version__
    assert lines["library"].startswith(("CUDA", "CPU only"))
    assert lines["cpu"].endswith("OK")
    assert lines["calls"].startswith(("direct", "through torch.ops"))
    assert {"python", "driver", "cublaslt", "device", "oneDNN", "cuBLASLt"} <= set(lines)


def test_runs_without_a_library_and_says_so(tmp_path):
    shutil.copytree(
        ROOT / "torch_fused_linear",
        tmp_path / "torch_fused_linear",
        ignore=shutil.ignore_patterns("lib", "__pycache__"),
    )
    result = run_doctor(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "library    BROKEN" in result.stdout
    assert "has not been built" in result.stdout
    assert torch.__version__ in result.stdout


def test_its_check_is_exact(device):
    assert doctor.largest_error(str(device)) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda x, w, b: torch.nn.functional.linear(x, w, b), id="no activation"),
        pytest.param(
            lambda x, w, b: torch.relu(torch.nn.functional.linear(x, w)) + 0 * b.sum(), id="no bias"
        ),
        # relu's value, with a gradient of 1 instead of 0 at exactly 0
        pytest.param(
            lambda x, w, b: (z := torch.nn.functional.linear(x, w, b)) * (z >= 0),
            id="gradient at 0",
        ),
    ],
)
def test_a_wrong_operator_is_noticed(monkeypatch, capsys, wrong):
    class Fused:
        linear_relu = staticmethod(wrong)

    monkeypatch.setattr(torch.ops, "fused", Fused)
    assert doctor.main([]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_an_operator_that_raises_is_reported(monkeypatch, capsys):
    class Fused:
        @staticmethod
        def linear_relu(x, w, b):
            raise RuntimeError("out of order")

    monkeypatch.setattr(torch.ops, "fused", Fused)
    assert doctor.main([]) == 1
    assert "RuntimeError: out of order: FAILED" in capsys.readouterr().out


def test_a_gpu_that_the_build_does_not_use_is_a_failure(monkeypatch, capsys):
    built = {**doctor._library.build_info(), "cuda": None}
    monkeypatch.setattr(doctor._library, "build_info", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert doctor.main([]) == 1
    output = capsys.readouterr().out
    assert "a GPU is here that this build does not use" in output and "to build   " in output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main([]) == 0


def test_help_names_the_exit_status(capsys):
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["--help"])
    assert stopped.value.code == 0
    assert "Exit status: 0, everything works; 1," in " ".join(capsys.readouterr().out.split())
