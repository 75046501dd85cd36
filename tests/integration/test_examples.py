"""The worked examples: run as their readers run them, their numbers held against independent ones.

The programs of examples/cpp have a file of their own, test_examples_cpp.py.
"""

import json
import math
import re
import signal
import struct
import sys
from pathlib import Path

import pytest
import torch
from helpers import device_param, one_thread  # noqa: F401
from processes import ROOT, module_at, python

from examples.digits.data import load_mnist
from examples.digits.networks import PUBLISHED, sigmoid_loss
from torch_fused_linear import plans

pytest.importorskip("matplotlib")

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def load(name):
    """The example as a module; the compiler looks one up by its name."""
    name, path = f"example_{name}", EXAMPLES / f"{name}.py"
    if name not in sys.modules:
        if str(EXAMPLES) not in sys.path:  # as a script has it
            sys.path.append(str(EXAMPLES))
        module_at(path, name)
    return sys.modules[name]


def assert_pictures(folder, *names):
    """They are there, decode, and show more than a blank sheet; nothing else was left behind."""
    from matplotlib.image import imread

    assert {path.name for path in folder.glob("*.png")} == set(names)
    for name in names:
        pixels = imread(folder / name)
        assert min(pixels.shape[:2]) > 200, name
        assert len(set(map(tuple, pixels.reshape(-1, pixels.shape[2])[::7].tolist()))) > 20, name


@pytest.fixture
def run(tmp_path):
    """Gives what `main` of an example returns, whose pictures have been looked at."""

    def run(name, device, *arguments, pictures=()):
        arguments = ["--device", device, "--out", tmp_path, *arguments]
        found = load(name).main([*map(str, arguments)])
        assert_pictures(tmp_path, *pictures)
        return found

    return run


# --- all of them ------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_is_listed_with_the_command_that_runs_it(script):
    """Its head has the command that runs it; help and the list of examples know it."""
    assert f"    python examples/{script.name}" in load(script.stem).__doc__
    listed = (EXAMPLES / "README.md").read_text().count(f"\n- [{script.name}]({script.name}): ")
    assert listed == 1, "not in examples/README.md, once"
    with pytest.raises(SystemExit) as stopped:
        load(script.stem).main(["--help"])
    assert stopped.value.code == 0


def test_from_the_command_line(tmp_path):
    """In any folder; the pictures are then in one below it, and the output says where."""
    script = EXAMPLES / "backward_by_hand.py"
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = python(script, "--device", "cpu", cwd=tmp_path, **variables).stdout
    assert said.rstrip().endswith(str(Path("example_pictures", "backward_by_hand.png")))
    assert_pictures(tmp_path / "example_pictures", "backward_by_hand.png")


def test_ctrl_c_is_no_traceback(tmp_path):
    program = (
        "import os, runpy, signal, sys, torch\n"
        "torch.manual_seed = lambda seed: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['example', '--device', 'cpu']\n"
        "runpy.run_path(sys.orig_argv[-1], run_name='__main__')\n"
    )
    assert len({script.read_text().partition("if __name__")[2] for script in SCRIPTS}) == 1
    how = {"cwd": tmp_path, "code": -signal.SIGINT, "PYTHONPATH": str(ROOT)}
    assert "Traceback" not in python("-c", program, SCRIPTS[0], **how).stderr


# --- the demo ---------------------------------------------------------------------------------


@device_param
def test_demo(device, run, capsys):
    pictures = ["demo.png", "demo_graph.png"]
    found = run("demo", device, "--depth", 1, "--seconds", 0.01, pictures=pictures)
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


def test_the_demo_shows_the_results_as_they_are():
    """Without a GPU it shows the GPU results of the files, with the GPU's name."""
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

MNIST = {"pictures": ["mnist_loss.png", "mnist_predictions.png"]}
STEP = ["linear_relu", "linear", "_linear_backward_across", "_linear_backward"]


@device_param
def test_mnist_on_digits(device, run, capsys):
    pytest.importorskip("sklearn")
    found = run("mnist", device, **MNIST)
    losses = found["losses"]["fused"]
    assert len(losses) == 60000 // 256
    assert losses[-1] < 0.06 < 0.3 < losses[0]
    assert 0.93 < found["accuracy"] < 1
    for name, accuracies in found["accuracies"].items():
        assert accuracies[-1] == pytest.approx(found["accuracy"], abs=0.006), name
        assert accuracies[0] < accuracies[-1], name
    assert found["apart"] < 1e-4, "the unfused code learns something else"
    steps = slice(None) if device == "cpu" else slice(-2, None)  # a GPU may run the forward in one
    assert found["operators"][steps] == STEP[steps], "the joint backward is the point of it"
    assert "published" not in capsys.readouterr().out, "those numbers are MNIST's"


def write_mnist(folder):
    """A tiny MNIST that a network can learn: digit d is a bright bar in rows 2d and 2d + 1."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(0)
    for split, count in (("train", 2700), ("t10k", 200)):
        labels = torch.randint(10, (count,), generator=random)
        images = torch.randint(60, (count, 28, 28), generator=random)
        images += 190 * (torch.arange(28) // 2 == labels[:, None])[:, :, None]
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            (folder / f"{split}-{name}-ubyte").write_bytes(header + bytes(values.byte().numpy()))
    return images, labels


def test_mnist_reads_the_true_files(tmp_path, run, capsys):
    pytest.importorskip("torchvision")
    images, labels = write_mnist(tmp_path / "files" / "MNIST" / "raw")
    data = load_mnist(tmp_path / "files")
    assert torch.equal(data.test_labels, labels)
    torch.testing.assert_close(data.test_images * 0.3081 + 0.1307, images.flatten(1) / 255)
    found = run("mnist", "cpu", "--data", tmp_path / "files", **MNIST)
    output = capsys.readouterr().out
    assert "784-30-10" in output
    published = re.search(r"^ *published +0.6833 +0.0566 +0.9146$", output, re.MULTILINE)
    assert published, "they stand beside ours"
    assert found["apart"] < 1e-4
    assert found["losses"]["fused"][-1] < 0.1 and found["accuracy"] > 0.9


def test_the_tutorials_loss_has_the_tutorials_gradient():
    logits, labels = torch.randn(7, 10, dtype=torch.float64, requires_grad=True), torch.arange(7)
    loss, output, target = sigmoid_loss(logits, labels), logits.sigmoid(), torch.eye(7, 10).double()
    shown = -(target * output.log() + (1 - target) * (1 - output).log()).mean()
    torch.testing.assert_close(loss / 10, shown)
    torch.testing.assert_close(*torch.autograd.grad(loss, logits), (output - target) / 7)


def test_mnist_says_what_the_tutorial_published():
    text = " ".join(load("mnist").__doc__.split())
    first, last, accuracy = PUBLISHED
    assert f"a loss of {first} at the first batch and {last} at batch 220" in text
    assert f"an accuracy of {accuracy} after one epoch" in text


# --- inference --------------------------------------------------------------------------------


@device_param
def test_inference(device, run):
    sizes = ["--tokens", 512, "--seconds", 0.02]
    found = run("inference", device, *sizes, pictures=["inference.png"])
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


# --- backward by hand -------------------------------------------------------------------------


@device_param
def test_backward_by_hand(device, run, capsys):
    found = run("backward_by_hand", device, pictures=["backward_by_hand.png"])
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


# --- gelu -------------------------------------------------------------------------------------


def gelu(z, kind):
    if kind == "erf":
        return z * (1 + math.erf(z / math.sqrt(2))) / 2
    return z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2


@device_param
def test_gelu(device, run):
    found = run("gelu", device, "--seconds", 0.02, pictures=["gelu.png"])
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
    # Both kinds in three dtypes, each with and without gradients.
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


# --- planning ---------------------------------------------------------------------------------


def test_planning_on_a_cpu(run):
    before = plans.get_budget()
    found = run("planning", "cpu")  # without a picture, which would be one of noise
    assert found["budgets"] == {"before": before, "inside": 50, "after": before}
    assert plans.get_budget() == before
    if not torch.cuda.is_available():
        assert found["shown"] == ""
        assert "plans are of a GPU" in found["refusal"]


@pytest.mark.cuda
def test_planning_on_a_gpu(tmp_path, run):
    try:
        found = run("planning", "cuda", pictures=["planning.png"])
    finally:
        plans.clear()  # the other tests go by rule
    assert "768" in found["shown"] and found["loaded"] > 0
    assert (tmp_path / "plans.txt").stat().st_size > 100
    courses = found["courses"]
    assert courses["measured"][0] > 3 * sorted(courses["measured"])[15], "nothing was measured"
    assert courses["from a file"][0] < courses["measured"][0], "measured although it was loaded"


# --- the graph pass ---------------------------------------------------------------------------


@device_param
def test_graph_pass(device, run):
    found = run("graph_pass", device, pictures=["graph_pass_fuse.png", "graph_pass_graph.png"])
    # Three blocks of 4 linear layers, and 2 in the head; chains of two become one operator each.
    before, after = found["before"], found["after"]
    assert (before["linear"], before["gelu"], before["relu"]) == (14, 3, 1)
    assert (after["linear"], after["gelu"], after["relu"]) == (14 - 2 * 4, 0, 0)
    assert found["replaced"] == {"mlp": 4}
    assert found["fused"] == {
        **{(f"{k}.fc1", f"{k}.fc2"): ("mlp (GELU (erf))",) for k in range(3)},
        ("3.hidden", "3.out"): ("mlp (ReLU)",),
    }
    assert not found["skipped"]
    assert found["apart"] < 1e-4
    assert found["fused calls"] == {"fuse_": 8, "unfuse_": 0}
    assert found["apart after unfuse_"] < 1e-5


# --- a gated model ----------------------------------------------------------------------------


@device_param
def test_llama(device, run):
    sizes = ["--width", 16, "--hidden", 40, "--context", 16, "--batch", 4]
    pictures = ["llama.png", "llama_blocks.png"]
    found = run("llama", device, *sizes, "--steps", 20, "--seconds", 0.02, pictures=pictures)
    assert [block.after for block in found["report"].fused] == [("gated_mlp (SiLU)",)] * 2
    assert found["calls"].count("_glu_backward") == 2
    plain, fused = found["losses"]["plain"], found["losses"]["fused"]
    assert plain[0] == pytest.approx(math.log(256), abs=0.6) and plain[-1] < plain[0] - 0.3
    assert found["apart"] == max(abs(a - b) for a, b in zip(plain, fused, strict=True)) < 1e-3
    # In both layers, two of four tensors [batch, context, hidden] in fp32 are not kept.
    spared = 2 * 2 * 4 * 16 * 40 * 4
    memory = found["memory"]
    assert (memory["plain"] - memory["fused"]) * 2**20 == spared
    assert len(found["speeds"]) == (2 if device == "cuda" else 0)
    assert all(speed > 0 for speed in found["speeds"].values())


def test_float8_training(device, run):
    sizes = ["--width", 32, "--layers", 1, "--context", 16, "--batch", 4, "--steps", 12]
    runs = run("float8_training", device, *sizes, pictures=["float8_training.png"])
    assert {"bf16", "ours"} <= set(runs)
    losses = {arm: results[0]["losses"] for arm, results in runs.items()}
    for arm, values in losses.items():
        assert values[0] == pytest.approx(math.log(256), abs=0.05), arm
        assert values[-1] < values[0] - 0.3 and len(values) == 12
        assert runs[arm][0]["speed"] > 0
        # FP8 is another rounding of the same run, no other run.
        for got, want in zip(values, losses["bf16"], strict=True):
            assert got == pytest.approx(want, rel=0.02)
        assert arm == "bf16" or values != losses["bf16"]


def test_accumulation(device):
    found = load("accumulation").main(["--device", str(device), "--steps", "9"])
    assert found["added"] == [9 * 4 * 6]
    assert found["products"] == pytest.approx(found["torch"], rel=0.02)
    assert found["products"][-1] < 0.9 * found["products"][0]


# --- reinforcement learning -------------------------------------------------------------------


@device_param
def test_ppo(device, run):
    found = run("ppo", device, "--iterations", 3, "--envs", 32, pictures=["ppo.png"])
    for returns in found["returns"].values():
        assert len(returns) == 3 and returns[-1] > returns[0], "it learns"
    plain, fused = found["returns"]["plain"], found["returns"]["fused"]
    assert fused[0] == pytest.approx(plain[0], rel=0.05), "both play the same game"
    assert all(time > 0 for time in found["times"].values())
    assert len(found["paths"]) > 0


@device_param
def test_on_policy(device, run):
    found = run("on_policy", device)
    assert found["auto"].keys() == {1, 7, 24}
    holds = device != "cpu" and torch.cuda.get_device_capability() == (9, 0)
    assert ("batch_invariant" in found) or not holds
    assert not any(found.get("batch_invariant", {}).values())


def test_each_example_is_run_on_both_machines():
    """By tests whose device is a parameter, or by one for each."""
    text = Path(__file__).read_text()
    for script in SCRIPTS:
        is_run = rf'(run|load)\("{script.stem}"(, |\)\.main)'
        tests = [part for part in text.split("\n\n\n") if re.search(is_run, part)]
        on_both = any(re.search(r"^def test_\w+\((.*, )?device\b", part, re.M) for part in tests)
        by_name = all(any(f'"{kind}"' in part for part in tests) for kind in ("cpu", "cuda"))
        assert on_both or by_name, script.stem
