"""The commands: what lists them, what --help says, and Ctrl-C before the work has begun."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as bench

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_the_package_lists_its_commands():
    result = run("torch_fused_linear")
    assert result.returncode == 0, result.stderr
    listed = re.findall(r"^  python -m torch_fused_linear\.(\w+) +\w", result.stdout, re.MULTILINE)
    package = ROOT / "torch_fused_linear"
    files = [*package.glob("*.py"), *package.glob("*/__main__.py")]
    found = [path for path in files if "sys.exit(main())" in path.read_text()]
    runnable = {path.parent.name if path.stem == "__main__" else path.stem for path in found}
    assert set(listed) == runnable


def test_help_of_the_bench_names_defaults_units_and_examples(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.parse(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    options, _, examples = text.partition("examples:")
    assert "in microseconds" in " ".join(options.split())
    assert examples.count("python -m benchmarks") == 3
    valued = [o for o in re.split(r"\n  (?=--)", options)[1:] if re.match(r"--[\w-]+ +[A-Z{]", o)]
    assert len(valued) >= 6
    for option in valued:
        assert "default" in option, option


def test_ctrl_c_ends_the_bench_without_a_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.machine, "warm_up", interrupted)
    assert bench.main(["layer", "--quick", "--device", "cpu"]) == 130
    assert "stopped by Ctrl-C" in capsys.readouterr().out


def test_ctrl_c_ends_the_doctor_without_a_traceback():
    program = (
        "import os, runpy, signal, sys, torch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "torch.cuda.device_count = lambda: os.kill(os.getpid(), signal.SIGINT) or 0\n"
        "sys.argv = ['doctor']\n"
        "runpy.run_module('torch_fused_linear.doctor', run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 128 + signal.SIGINT, result.stderr
    assert "Traceback" not in result.stderr
