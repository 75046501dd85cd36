"""The demo as a user runs it: a process of its own, its words, its pictures, its exit status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from examples.demo import data as demo_data
from examples.demo import pictures as demo_pictures
from examples.demo.__main__ import main, parse
from examples.demo.training import build_learners

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "examples.demo"]
PICTURES = ("demo_loss.png", "demo_predictions.png")
ROW = re.compile(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) % +([\d.]+) %", re.MULTILINE)


# One thread: two would wait for each other at every layer wherever something else runs beside.
# An unbuffered Python would hide that rows are not flushed into a pipe.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
ENVIRONMENT["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The demo on the CPU, as `make demo` starts it."""
    command = [*COMMAND, "--device", "cpu", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )


def rows(output: str) -> list[tuple[float, ...]]:
    """Epoch, both losses and both accuracies of every row of the table."""
    return [tuple(map(float, row)) for row in ROW.findall(output)]


def assert_real_pictures(directory: Path) -> None:
    """Both pictures are there, decode, and show more than a blank sheet."""
    from matplotlib.image import imread

    for name in PICTURES:
        pixels = imread(directory / name)
        assert min(pixels.shape[:2]) > 300, name
        assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50, name


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the default demo printed in eight epochs, and where its pictures are."""
    out = tmp_path_factory.mktemp("demo")
    process = run_demo("--epochs", 8, "--out", out)
    assert process.returncode == 0, process.stderr
    assert "batch/s" not in process.stderr, "a progress bar is for terminals only"
    return process.stdout, out


# ---------------------------------------------------------------------------- the default demo


def test_learns_the_digits(digits_run: tuple[str, Path]) -> None:
    table = rows(digits_run[0])
    assert [row[0] for row in table] == list(range(1, 9))
    _, fused_loss, plain_loss, fused_accuracy, plain_accuracy = table[-1]
    assert fused_accuracy > 95 and plain_accuracy > 95
    assert fused_loss < 0.1 and plain_loss < 0.1
    assert fused_loss < table[0][1] / 5, "it started at this loss: nothing was learned"


def test_both_networks_learn_alike(digits_run: tuple[str, Path]) -> None:
    for _, fused_loss, plain_loss, fused_accuracy, plain_accuracy in rows(digits_run[0]):
        assert fused_loss == pytest.approx(plain_loss, rel=0.02, abs=2e-4)
        assert abs(fused_accuracy - plain_accuracy) < 1.0
    apart = float(re.search(r"never more than (\S+) apart", digits_run[0]).group(1))
    assert apart < 0.02


def test_names_device_precision_times_and_pictures(digits_run: tuple[str, Path]) -> None:
    output, out = digits_run
    assert re.search(r"device +CPU, \d+ threads?; float32", output)
    assert re.search(r"time +[\d.]+ s fused, [\d.]+ s nn.Linear", output)
    assert all(str(out / name) in output for name in PICTURES)
    assert_real_pictures(out)


def test_the_last_lines_say_what_was_shown(digits_run: tuple[str, Path]) -> None:
    shown, missing, speed = digits_run[0].splitlines()[-3:]
    assert shown.startswith("shown    fused layers learn what nn.Linear")
    assert missing.startswith("not      speed") and "benchmarks layer" in speed


def test_help_names_every_default_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    options, _, examples = text.partition("examples:")
    assert examples.count("python -m examples.demo") == 3
    for option in re.split(r"\n  (?=--)", options)[1:]:
        assert "default" in option, option


def test_same_seed_same_numbers(
    digits_run: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--epochs", "1", "--out", str(tmp_path)]
    assert main(arguments) == 0
    first = rows(capsys.readouterr().out)[0]
    assert first == pytest.approx(rows(digits_run[0])[0], rel=1e-3)
    assert main([*arguments, "--seed", "5"]) == 0
    assert rows(capsys.readouterr().out)[0] != pytest.approx(first, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--activation", "gelu"], r"with GELU \(tanh\)"),
        (["--dtype", "bfloat16"], r"bfloat16 by torch.autocast, parameters float32"),
        (["--dtype", "float16"], r"float16 by torch.autocast with GradScaler, parameters float32"),
        (["--dtype", "float64"], r"thread; float64"),
    ],
)
def test_activation_and_precision(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few_steps = ["--epochs", "2", "--batch-size", "128", "--lr", "0.1"]
    assert main(["--device", "cpu", *few_steps, "--out", str(tmp_path), *arguments]) == 0
    output = capsys.readouterr().out
    assert re.search(says, output)
    _, fused_loss, plain_loss, fused_accuracy, plain_accuracy = rows(output)[-1]
    assert fused_accuracy > 88 and plain_accuracy > 88
    assert fused_loss == pytest.approx(plain_loss, rel=0.02)


def test_networks_start_equal_and_are_separate() -> None:
    settings = parse(["--device", "cpu"])
    digits = demo_data.load_digits()
    fused, plain = build_learners(settings, digits)
    ours, theirs = list(fused.network.parameters()), list(plain.network.parameters())
    assert [p.shape for p in ours] == [p.shape for p in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other) and mine.data_ptr() != other.data_ptr()
    fused.learn([(digits.train_images[:32], digits.train_labels[:32])])
    assert not torch.equal(ours[0], theirs[0])


# -------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_leaves_the_pictures(tmp_path: Path) -> None:
    command = [*COMMAND, "--device", "cpu", "--epochs", "100000", "--out", str(tmp_path)]
    # A child would inherit an ignored Ctrl-C (a job in the background has it), never a handled one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=ENVIRONMENT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    watchdog = threading.Timer(50, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            if ROW.match(line):
                break
        process.send_signal(signal.SIGINT)
        stopped = None
        for line in process.stdout:
            if stopped := re.match(r"stopped by Ctrl-C after (\d+) batches", line):
                break
        process.send_signal(signal.SIGINT)  # an impatient second one must not cost the pictures
        output, errors = process.communicate()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert stopped is not None
    assert "Traceback" not in errors
    assert int(stopped.group(1)) < 4000, "the rows came late: the output was not flushed"
    assert all(str(tmp_path / name) in output for name in PICTURES)
    assert_real_pictures(tmp_path)


def test_ctrl_c_before_anything_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("examples.demo.__main__.warm_up", interrupted)
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == 130
    assert "before anything was learned" in capsys.readouterr().err
    assert not any((tmp_path / name).exists() for name in PICTURES)


# --------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "nonsense"], "unknown device 'nonsense'"),
        (["--device", "meta"], "device 'meta' is not supported"),
        (["--device", "cuda:99"], "device 'cuda:99'"),
        (["--epochs", "0"], "--epochs: must be above zero, got 0"),
        (["--epochs", "many"], "--epochs: invalid int value: 'many'"),
        (["--lr", "nan"], "--lr: must be above zero, got nan"),
        (["--batch-size", "-3"], "--batch-size: must be above zero"),
        (["--seed", "-1"], "--seed: must be between 0"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--out", os.devnull], "not a directory"),
    ],
)
def test_bad_arguments_give_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(arguments)
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert says in message
    assert message.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_no_gpu_is_said_in_one_line() -> None:
    command = [*COMMAND, "--device", "cuda"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert process.returncode == 2
    assert "PyTorch finds no CUDA GPU here" in process.stderr
    assert process.stderr.count("\n") == 1


def test_batch_larger_than_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--recipe", "tutorial", "--dataset", "digits", "--batch-size", "5000"]
    assert main(["--device", "cpu", "--out", str(tmp_path), *arguments]) == 2
    assert "smaller --batch-size" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- pictures


def test_misread_images_come_first_and_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    titles: list[tuple[str, str]] = []
    original = Axes.set_title

    def spy(self: Axes, label: str, *args: object, **options: object) -> object:
        titles.append((label, str(options.get("color"))))
        return original(self, label, *args, **options)

    monkeypatch.setattr(Axes, "set_title", spy)
    true = np.arange(60) % 10
    predicted = true.copy()
    predicted[[7, 50]] = 1
    images = np.random.default_rng(0).random((60, 8, 8))
    demo_pictures.draw_predictions(tmp_path / "grid.png", "title", images, predicted, true)
    assert len(titles) == 40
    assert [label for label, _ in titles[:3]] == ["read 1, is 7", "read 1, is 0", "read 0, is 0"]
    assert [color == demo_pictures.WRONG for _, color in titles[:3]] == [True, True, False]


def test_pictures_of_very_little_and_of_nonsense(tmp_path: Path) -> None:
    one = demo_pictures.Curve("one", [0.1], [float("nan")], [], [])
    demo_pictures.draw_learning(tmp_path / "loss.png", "title", "loss", [one, one])
    few, labels = np.zeros((3, 8, 8)), np.array([1, 2, 3])
    demo_pictures.draw_predictions(tmp_path / "few.png", "title", few, labels + 1, labels)
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("loss.png", "few.png"))
