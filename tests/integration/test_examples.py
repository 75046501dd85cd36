"""The worked examples: run as their readers run them, their numbers held against independent ones.

The programs of examples/cpp have a file of their own, test_examples_cpp.py.
"""

import importlib.util
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import device_param, one_thread  # noqa: F401

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
script_param = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def load(name):
    """The example as a module; the compiler looks one up by its name."""
    name, path = f"example_{name}", EXAMPLES / f"{name}.py"
    if name not in sys.modules:
        if str(EXAMPLES) not in sys.path:  # as a script has it
            sys.path.append(str(EXAMPLES))
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def run(name, device, out, *arguments):
    """What `main` of the example returns."""
    return load(name).main(["--device", str(device), "--out", str(out), *map(str, arguments)])


def assert_pictures(folder, *names):
    """They are there, decode, and show more than a blank sheet; nothing else was left behind."""
    from matplotlib.image import imread

    assert {path.name for path in folder.iterdir() if path.suffix == ".png"} == set(names)
    for name in names:
        pixels = imread(folder / name)
        assert min(pixels.shape[:2]) > 200, name
        assert len(set(map(tuple, pixels.reshape(-1, pixels.shape[2])[::7].tolist()))) > 20, name


# --- all of them ------------------------------------------------------------------------------


def test_there_are_examples():
    """An empty list of parameters would pass."""
    names = {"mnist", "inference", "backward_by_hand", "gelu", "planning", "graph_pass"}
    assert names | {"llama", "demo", "accumulation", "ppo"} == {script.stem for script in SCRIPTS}


@script_param
def test_it_reads_as_a_tutorial(script):
    """Short enough for one sitting, explained at its head, with the command that runs it."""
    lines = script.read_text().splitlines()
    assert len(lines) < 200
    docstring = load(script.stem).__doc__
    assert docstring.count("\n") >= 15, "too short an explanation"
    assert f"    python examples/{script.name}" in docstring
    listed = re.findall(rf"^- \[{script.name}\]\({script.name}\): ", _readme(), re.MULTILINE)
    assert len(listed) == 1, "not in examples/README.md, once"


def _readme():
    return (EXAMPLES / "README.md").read_text()


def test_nothing_is_drawn_before_it_is_asked_for():
    """matplotlib takes a second to import, and whoever only reads the code need not have it."""
    program = (
        "import runpy, sys\n"
        "for path in sys.argv[1:]: runpy.run_path(path)\n"
        "sys.exit('matplotlib' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])}
    command = [sys.executable, "-c", program, *map(str, SCRIPTS)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr


def test_from_the_command_line(tmp_path):
    """In any folder; the pictures are then in one below it, and the output says where."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / "backward_by_hand.py"), "--device", "cpu"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.rstrip().endswith(str(Path("example_pictures", "backward_by_hand.png")))
    assert_pictures(tmp_path / "example_pictures", "backward_by_hand.png")


def test_help_names_defaults_and_ctrl_c_is_no_traceback(tmp_path):
    for script in SCRIPTS:
        with pytest.raises(SystemExit), redirect_stdout(io.StringIO()) as out:
            load(script.stem).main(["--help"])
        options = out.getvalue().partition("-h, --help")[2].split("\n  --")[1:]
        assert len(options) >= 2, script
        assert all("default: " in " ".join(option.split()) for option in options), script
    program = (
        "import os, runpy, signal, sys, torch\n"
        "torch.manual_seed = lambda seed: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['example', '--device', 'cpu']\n"
        "runpy.run_path(sys.orig_argv[-1], run_name='__main__')\n"
    )
    assert len({script.read_text().partition("if __name__")[2] for script in SCRIPTS}) == 1
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(SCRIPTS[0])]
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == -signal.SIGINT, process.stderr
    assert "Traceback" not in process.stderr


PALETTE = {"#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00"}  # Okabe and Ito's


@pytest.fixture
def drawn(monkeypatch):
    """The figures that an example saves."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path: figures.append(figure) or save(figure, path)
    )
    return figures


def assert_understood(figures):
    """Axes have names, bars begin at 0, there are at most four series in the palette's colours."""
    from matplotlib.colors import to_hex

    for axes in (axes for figure in figures for axes in figure.axes if axes.axison):
        assert axes.get_title()
        assert axes.get_ylabel() or axes.get_xlabel(), axes.get_title()
        assert len(axes.get_legend_handles_labels()[1]) <= 4, axes.get_title()
        bars = [bar for container in axes.containers for bar in container]
        assert all(0 in (bar.get_x(), bar.get_y()) for bar in bars), axes.get_title()
        colours = {to_hex(p.get_facecolor()) for p in bars} | {
            to_hex(line.get_color()) for line in axes.lines
        }
        assert colours <= PALETTE, axes.get_title()


# --- the demo ---------------------------------------------------------------------------------


@device_param
def test_demo(device, tmp_path, capsys):
    found = run("demo", device, tmp_path, "--depth", 1, "--seconds", 0.01)
    output = capsys.readouterr().out
    assert found["apart"] < (1e-5 if device == "cpu" else 1e-2)
    (block,) = found["gain"].report.fused
    assert block.layers == ("blocks.0.fc1", "blocks.0.fc2")
    assert set(found["gain"].modes) == {"inference", "step"}
    for mode in found["gain"].modes.values():
        least = 0.2 if device == "cpu" else 0  # there the CPU binds at a depth of 1
        assert least < mode.share < 0.9 and "its results" not in mode.verdict
        assert len(mode.times) == (4 if device == "cuda" else 2)
    assert ("NVIDIA H200" in output) == (device == "cpu") or device == "cuda"
    assert_pictures(tmp_path, "demo.png", "demo_graph.png")


def test_the_docs_have_the_demos_picture(tmp_path):
    """The words of it; how matplotlib draws them differs between versions."""
    from torch_fused_linear import fuse_

    with torch.device("meta"):
        report = fuse_(load("demo").VisionTransformer(), dry_run=True)
    report.save_picture(tmp_path / "fused.svg")

    def words(path):
        return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())

    drawn = words(tmp_path / "fused.svg")
    assert "linear_gelu (erf)" in drawn and words(ROOT / "docs" / "figures" / "fused.svg") == drawn


def test_the_demo_shows_the_results_as_they_are():
    """What it says of a GPU on a machine without one is what the files have, under its name."""
    where, panels = load("demo").shipped()
    assert where.startswith("NVIDIA H200, torch 2.11")
    text = json.loads((ROOT / "benchmarks" / "results" / "h200_models.json").read_text())
    numbers = {
        result["case"]["mode"]: result["numbers"]
        for result in text["results"]
        if (result["case"]["model"], result["case"]["activation"]) == ("ViT-B/16", "gelu-erf")
    }
    inference, scale = panels["ViT-B/16, 128 images, inference, ms"]
    assert list(inference) == ["eager", "torch.compile", "fuse_", "compile_options()"]
    assert scale == 1e-3
    assert inference["torch.compile"][0] == numbers["forward"]["compile"]["median"]
    step, _ = panels["ViT-B/16, 128 images, training step, ms"]
    fused = numbers["step"]["fused"]
    assert step["fuse_"] == (fused["median"], fused["q1"], fused["q3"])
    memory, scale = panels["ViT-B/16, 32 images, training step, MiB at most"]
    assert scale == 1
    assert list(memory) == ["eager", "fuse_", 'fuse_(memory="low")']


# --- mnist ------------------------------------------------------------------------------------

STEP = ["linear_relu", "linear", "_linear_backward_across", "_linear_backward"]


@device_param
def test_mnist_on_digits(device, tmp_path, capsys):
    pytest.importorskip("sklearn")
    from examples.digits.data import load_digits
    from examples.digits.networks import build_networks

    found = run("mnist", device, tmp_path)
    losses = found["losses"]["fused"]
    assert len(losses) == 60000 // 256
    # The first loss, as the formula for binary cross-entropy has it, in fp64.
    data = load_digits()
    network = build_networks([64, 30, 10], 1234)[1].double()
    output = network(data.train_images[:256].double()).sigmoid()
    target = F.one_hot(data.train_labels[:256], 10)
    likelihood = target * output.log() + (1 - target) * (1 - output).log()
    assert losses[0] == pytest.approx(-likelihood.mean().item(), rel=1e-5)
    assert losses[-1] < 0.06 < 0.3 < losses[0]
    assert 0.93 < found["accuracy"] < 1
    for name, accuracies in found["accuracies"].items():
        assert accuracies[-1] == pytest.approx(found["accuracy"], abs=0.006), name
        assert accuracies[0] < accuracies[-1], name
    assert found["apart"] < 1e-4, "the unfused code learns something else"
    assert found["operators"] == STEP, "the hand-over is the point of it"
    assert "published" not in capsys.readouterr().out, "those numbers are MNIST's"
    assert_pictures(tmp_path, "mnist_loss.png", "mnist_predictions.png")


def test_mnist_reads_the_true_files(tmp_path, capsys):
    pytest.importorskip("sklearn")
    from mnist_files import write_mnist

    write_mnist(tmp_path / "files")
    found = run("mnist", "cpu", tmp_path / "out", "--data", tmp_path / "files")
    output = capsys.readouterr().out
    assert "784-30-10" in output
    published = re.search(r"^ *published +0.6833 +0.0566 +0.9146$", output, re.MULTILINE)
    assert published, "they stand beside ours"
    assert found["apart"] < 1e-4
    assert found["losses"]["fused"][-1] < 0.1 and found["accuracy"] > 0.9


def test_mnist_says_what_the_tutorial_published():
    from examples.digits.networks import PUBLISHED

    text = " ".join(load("mnist").__doc__.split())
    first, last, accuracy = PUBLISHED
    assert f"a loss of {first} at the first batch and {last} at batch 220" in text
    assert f"an accuracy of {accuracy} after one epoch" in text


# --- inference --------------------------------------------------------------------------------


@device_param
def test_inference(device, tmp_path, drawn):
    found = run("inference", device, tmp_path, "--tokens", 512, "--seconds", 0.02)
    assert found["apart"] < 1e-5
    assert found["operators"] == {
        "unfused": ["aten::addmm", "aten::relu"],
        "fused": ["fused::linear_relu"],
    }
    one = 512 * 256 * 4  # an output in fp32
    assert found["bytes"] == {"unfused": 2 * one, "fused": one}
    assert found["kept"]["inference"] == {"unfused": 0, "fused": 0}
    assert found["kept"]["training"] == {"unfused": one, "fused": one}
    assert len(found["times"]) == (4 if device == "cuda" else 0)
    assert all(time > 0 for times in found["times"].values() for time in times.values())
    assert_pictures(tmp_path, "inference.png")
    assert_understood(drawn)


# --- backward by hand -------------------------------------------------------------------------


@device_param
def test_backward_by_hand(device, tmp_path, capsys, drawn):
    found = run("backward_by_hand", device, tmp_path)
    for way, errors in found["errors"].items():
        assert set(errors) == {"w1", "b1", "w2", "b2"}
        assert all(error < 1e-5 for error in errors.values()), (way, errors)
        assert any(error > 0 for error in errors.values()), "compared with itself"
    assert len(found["errors"]) == 2
    assert found["mask_is_right"]
    # 200 features are 2 x 128 bits; an fp32 output is 32 bits for each of them.
    assert found["bytes"] == {"mask": 512 * 2 * 128 // 8, "output": 512 * 200 * 4}
    assert found["at_zero"] == {"output": [0, 0, 1], "mask": [0, 1, 1]}
    output = capsys.readouterr().out
    if device == "cuda":
        assert "RELU_AUX_BIAS" in output and "DRELU_BGRAD" in output
    assert_pictures(tmp_path, "backward_by_hand.png")
    assert_understood(drawn)


# --- gelu -------------------------------------------------------------------------------------


def gelu(z, kind):
    if kind == "erf":
        return z * (1 + math.erf(z / math.sqrt(2))) / 2
    return z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2


@device_param
def test_gelu(device, tmp_path, drawn):
    found = run("gelu", device, tmp_path, "--seconds", 0.02)
    grid = [k / 1000 for k in range(-6000, 6001)]
    apart = {abs(z): abs(gelu(z, "tanh") - gelu(z, "erf")) for z in grid}
    most = max(apart, key=apart.get)
    differences = found["differences"]
    assert differences["value"] == pytest.approx((apart[most], most), rel=1e-9)
    text = load("gelu").__doc__
    assert f"up to {apart[most]:.1e} apart".replace("e-04", "e-4") in " ".join(text.split())
    assert f"GELU(-2.7) = {gelu(-2.7, 'erf'):.4f}" in text
    assert abs(apart[2.7] / gelu(-2.7, "erf")) == pytest.approx(1 / 20, rel=0.05)  # "a twentieth"
    # Between 2^1 and 2^2, and between 2^-7 and 2^-6, a unit in the last place of fp16 is:
    ulps = {z: differences[f"ulps at {z}"]["float16"] for z in (2.7, -2.7)}
    assert ulps[2.7] == pytest.approx(apart[most] / 2**-9, rel=1e-6)
    assert ulps[-2.7] == pytest.approx(apart[most] / 2**-17, rel=1e-6)
    # Of both kinds in three dtypes, each with and without gradients.
    assert len(found["paths"]) == 12 and all(found["paths"].values())
    if device == "cuda":
        for kind, mode, library in (
            ("tanh bfloat16", "inference", "GELU_BIAS"),
            ("tanh bfloat16", "training", "GELU_AUX_BIAS"),
            ("tanh float32", "inference", "own activation kernel"),
            ("erf float32", "inference", "own activation kernel"),
            ("erf bfloat16", "inference", "own activation kernel"),
        ):
            path = found["paths"][kind, mode]
            own = "bfloat16" in kind and "own Hopper kernel" in path
            assert library in path or own, f"{kind} {mode}: {path}"
    contenders = {f"{kind} {way}" for kind in ("tanh", "erf") for way in ("plain", "fused")}
    assert all(set(times) == contenders for times in found["times"].values())
    assert set(found["times"]) == ({"float32", "bfloat16"} if device == "cuda" else set())
    assert_pictures(tmp_path, "gelu.png")
    assert_understood(drawn)


# --- planning ---------------------------------------------------------------------------------


def test_planning_on_a_cpu(tmp_path, capsys, drawn):
    from torch_fused_linear import plans

    before = plans.get_budget()
    found = run("planning", "cpu", tmp_path)
    assert found["budgets"] == {"before": before, "inside": 50, "after": before}
    assert plans.get_budget() == before
    if not torch.cuda.is_available():
        assert found["shown"] == ""
        assert "plans are of a GPU" in found["refusal"]
    assert not drawn, "a picture of noise"


@pytest.mark.cuda
def test_planning_on_a_gpu(tmp_path):
    from torch_fused_linear import plans

    try:
        found = run("planning", "cuda", tmp_path)
    finally:
        plans.clear()  # the other tests go by rule
    assert "768" in found["shown"] and found["loaded"] > 0
    assert (tmp_path / "plans.txt").stat().st_size > 100
    courses = found["courses"]
    assert courses["measured"][0] > 3 * sorted(courses["measured"])[15], "nothing was measured"
    assert courses["from a file"][0] < courses["measured"][0], "measured although it was loaded"
    assert_pictures(tmp_path, "planning.png")


# --- the graph pass ---------------------------------------------------------------------------


@device_param
def test_graph_pass(device, tmp_path, drawn):
    found = run("graph_pass", device, tmp_path)
    # Three blocks of 4 linear layers, and 2 in the head; chains of two become one operator each.
    before, after = found["before"], found["after"]
    assert (before["linear"], before["gelu"], before["relu"]) == (14, 3, 1)
    assert (after["linear"], after["gelu"], after["relu"]) == (14 - 2 * 4, 0, 0)
    assert found["replaced"] == {"mlp": 4}
    assert found["fused"] == {
        **{(f"{k}.fc1", f"{k}.fc2"): ("linear_gelu (erf)", "linear") for k in range(3)},
        ("3.hidden", "3.out"): ("linear_relu", "linear"),
    }
    assert not found["skipped"]
    assert found["apart"] < 1e-4
    assert found["fused calls"] == {"fuse_": 8, "unfuse_": 0}
    assert found["apart after unfuse_"] < 1e-5
    assert_pictures(tmp_path, "graph_pass_fuse.png", "graph_pass_graph.png")
    assert_understood(drawn)


# --- a gated model ----------------------------------------------------------------------------


@device_param
def test_llama(device, tmp_path, drawn):
    sizes = ["--width", 16, "--hidden", 40, "--context", 16, "--batch", 4]
    found = run("llama", device, tmp_path, *sizes, "--steps", 20, "--seconds", 0.02)
    assert [block.after for block in found["report"].fused] == [("gated_mlp (SiLU)",)] * 2
    assert found["calls"].count("_glu_backward") == 2
    plain, fused = found["losses"]["plain"], found["losses"]["fused"]
    assert plain[0] == pytest.approx(math.log(256), abs=0.6) and plain[-1] < plain[0] - 0.3
    assert found["apart"] == max(abs(a - b) for a, b in zip(plain, fused, strict=True)) < 1e-3
    # Of four tensors [batch, context, hidden] in fp32 two are not kept, in both layers.
    spared = 2 * 2 * 4 * 16 * 40 * 4
    memory = found["memory"]
    assert (memory["plain"] - memory["fused"]) * 2**20 == spared
    assert len(found["speeds"]) == (2 if device == "cuda" else 0)
    assert all(speed > 0 for speed in found["speeds"].values())
    assert_pictures(tmp_path, "llama.png", "llama_blocks.png")
    assert_understood(drawn)


def test_accumulation(device):
    found = load("accumulation").main(["--device", str(device), "--steps", "9"])
    assert found["added"] == [9 * 4 * 3]
    assert found["products"] == pytest.approx(found["torch"], rel=0.02)
    assert found["products"][-1] < 0.9 * found["products"][0]
