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

from mnist_files import write_idx, write_mnist

from torch_fused_linear.demo import data as demo_data
from torch_fused_linear.demo import pictures as demo_pictures
from torch_fused_linear.demo.__main__ import main, parse
from torch_fused_linear.demo.training import RECIPES, build_learners, sigmoid_loss

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "torch_fused_linear.demo"]
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
    assert missing.startswith("not      speed") and "bench layer" in speed


def test_help_names_every_default_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    options, _, examples = text.partition("examples:")
    assert examples.count("python -m torch_fused_linear.demo") == 3
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


# --------------------------------------------------------------------------------------- MNIST


@pytest.mark.parametrize("suffixes", [("", ".gz"), (".gz", "")])
@pytest.mark.parametrize("folder", ["MNIST/raw", "."])
def test_reads_idx_files(tmp_path: Path, folder: str, suffixes: tuple[str, str]) -> None:
    written = write_mnist(tmp_path / folder, suffixes)
    data = demo_data.load_mnist(tmp_path)
    mean, deviation = demo_data.MNIST_STATISTICS
    for split in ("train", "test"):
        images = getattr(data, f"{split}_images").double() * deviation + mean
        expected = written[f"{split}_images"].reshape(-1, 784) / 255
        np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)
        labels = getattr(data, f"{split}_labels")
        assert labels.dtype is torch.int64
        np.testing.assert_array_equal(labels.numpy(), written[f"{split}_labels"])
    assert data.image_shape == (28, 28)


def test_tutorial_learns_mnist_files(tmp_path: Path) -> None:
    write_mnist(tmp_path / "data" / "MNIST" / "raw")
    process = run_demo("--recipe", "tutorial", "--data", tmp_path / "data", "--out", tmp_path)
    assert process.returncode == 0, process.stderr
    output = process.stdout
    assert "784-30-10 with ReLU" in output
    assert "SGD lr 0.1 momentum 0, batch 256" in output
    first = re.search(r"^loss at batch 0 +([\d.]+) +([\d.]+) +0.6833$", output, re.MULTILINE)
    last = re.search(r"^loss at batch 9 +([\d.]+) +([\d.]+) +0.0566$", output, re.MULTILINE)
    accuracy = re.search(r"^test accuracy +([\d.]+) +([\d.]+) +0.9146$", output, re.MULTILINE)
    # 2700 images make ten whole batches of 256, and the rest is dropped as the tutorial does.
    assert float(first.group(1)) == pytest.approx(0.693, abs=0.1)  # ten coins are ten ln 2 / 10
    assert float(last.group(1)) < 0.75 * float(first.group(1))
    assert float(accuracy.group(1)) > 0.5
    for found in (first, last, accuracy):
        assert float(found.group(1)) == pytest.approx(float(found.group(2)), abs=2e-3)
    assert_real_pictures(tmp_path)


def test_tutorial_runs_on_fashion_mnist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own folder and mean, the names of clothes, and nothing that was published for MNIST."""
    written = write_mnist(tmp_path / "FashionMNIST" / "raw")
    data = demo_data.load("fashion-mnist", tmp_path)
    mean, deviation = demo_data.FASHION_STATISTICS
    images = data.train_images.double() * deviation + mean
    expected = written["train_images"].reshape(-1, 784) / 255
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)
    assert data.classes[9] == "boot" and len(data.classes) == 10
    arguments = ["--recipe", "tutorial", "--dataset", "fashion-mnist", "--data", str(tmp_path)]
    assert main(["--device", "cpu", *arguments, "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "Fashion-MNIST: 2700 training and 200 test images of 28x28" in output
    assert "784-30-10 with ReLU" in output and "on other images" in output
    assert "published" not in output
    assert_real_pictures(tmp_path)


@pytest.mark.skipif(not demo_data.DEBIAN.exists(), reason="needs Debian's dataset-fashion-mnist")
def test_reads_the_true_fashion_mnist() -> None:
    data = demo_data.load("fashion-mnist", Path("data"))
    assert data.train_images.shape == (60000, 784) and data.test_images.shape == (10000, 784)
    assert data.train_labels.bincount().tolist() == [6000] * 10
    assert abs(data.train_images.mean()) < 1e-3 and abs(data.train_images.std() - 1) < 1e-3


def test_missing_fashion_mnist_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(demo_data.DataError, match=r"FashionMNIST\(.*download=True") as raised:
        demo_data.load_mnist(tmp_path, "fashion-mnist")
    assert "apt install dataset-fashion-mnist" in str(raised.value)


def test_tutorial_on_the_digits_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--recipe", "tutorial", "--dataset", "digits", "--out", str(tmp_path)]
    assert main(["--device", "cpu", *arguments]) == 0
    output = capsys.readouterr().out
    assert "64-30-10 with ReLU" in output
    assert "the tutorial's network is 784-30-10 on MNIST" in output
    assert "published" not in output


def test_tutorial_loss_has_the_tutorials_gradient() -> None:
    logits = torch.randn(7, 10, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(7)
    loss = sigmoid_loss(logits, labels)
    output, target = torch.sigmoid(logits), torch.eye(10, dtype=torch.float64)[labels]
    shown = -(target * output.log() + (1 - target) * (1 - output).log()).mean()
    torch.testing.assert_close(loss / RECIPES["tutorial"].loss_divisor, shown)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, (output - target) / 7)


def test_missing_mnist_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    arguments = ["--dataset", "mnist", "--data", str(tmp_path), "--out", str(tmp_path)]
    assert main(["--device", "cpu", *arguments]) == 2
    message = capsys.readouterr().err
    assert "t10k-labels-idx1-ubyte" in message and "train-images" not in message
    assert "download=True" in message and str(tmp_path) in message
    assert not any((tmp_path / name).exists() for name in PICTURES)


def cut(raw: bytes) -> bytes:
    return raw[:-100]


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("train-images-idx3-ubyte", cut, r"promises 2116800 values .* holds 2116700"),
        ("train-images-idx3-ubyte", lambda raw: raw[:9], "does not start as an idx file"),
        ("train-images-idx3-ubyte", lambda raw: b"", "does not start as an idx file"),
        ("train-images-idx3-ubyte", lambda raw: b"<!DOCTYPE html>", "does not start as an idx"),
        ("train-labels-idx1-ubyte", lambda raw: raw[:-1] + b"\x0a", "label 10 is none of ten"),
        ("t10k-images-idx3-ubyte.gz", cut, "cannot be read"),
        ("t10k-images-idx3-ubyte.gz", lambda raw: b"not gzip", "cannot be read"),
    ],
)  # fmt: skip
def test_damaged_mnist_names_the_file(tmp_path: Path, file: str, damage, says: str) -> None:
    write_mnist(tmp_path)
    path = tmp_path / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(demo_data.DataError, match=says) as raised:
        demo_data.load_mnist(tmp_path)
    assert str(path) in str(raised.value)


def test_mnist_files_that_do_not_fit_together(tmp_path: Path) -> None:
    parts = write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", parts["train_labels"][:-1])
    with pytest.raises(demo_data.DataError, match="do not fit together"):
        demo_data.load_mnist(tmp_path)


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

    monkeypatch.setattr("torch_fused_linear.demo.__main__.warm_up", interrupted)
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
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
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
