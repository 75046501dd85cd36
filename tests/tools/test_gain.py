"""gain: what is measured, that the model stays as it is, the verdict, and the command line."""

import copy
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import device_param, one_thread  # noqa: F401
from torch import nn
from torch_fused_linear.gain.named import model_and_inputs
from torch_fused_linear.gain.share import Share, share_of
from torch_fused_linear.gain.ways import COMPILED, EAGER, FUSED, OURS, Ways, distance, loss_of

import torch_fused_linear as tfl
from torch_fused_linear.gain import Mode, __main__
from torch_fused_linear.timing import Contender, Number

ROOT = Path(__file__).resolve().parents[2]


class Model(nn.Module):
    """Something of all that a call might change."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.5)

    def forward(self, x):
        return self.norm(self.fc2(self.drop(self.fc1(x).relu())))


def quick(model, *inputs, **options):
    return tfl.gain(model, *inputs, seconds=1e-3, progress=False, **options)


# --- the share --------------------------------------------------------------------------------


class Beside(nn.Module):
    """A block that can be fused, and products that cannot."""

    def __init__(self, width, others):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.others = nn.Parameter(torch.randn(others, others))

    def forward(self, x):
        return self.block(x).sum() + (self.others @ self.others).sum()


@pytest.mark.parametrize(("width", "others", "low", "high"), [(512, 8, 0.8, 1), (8, 512, 0, 0.2)])
@pytest.mark.parametrize("step", [False, True])
def test_the_share_is_that_of_the_block(width, others, low, high, step):
    ways = Ways(Beside(width, others), [torch.randn(256, width)], {}, loss_of)
    share = share_of(ways.contender(FUSED, step), ways.device)
    assert low <= share.part <= high
    assert 0 < share.products < share.fusable <= share.total


def test_backwards_are_in_the_share():
    """Of a step, about twice the forward's products more: they have names of torch's own."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    ways = Ways(model, [torch.randn(256, 512)], {}, loss_of)
    forward, step = (share_of(ways.contender(FUSED, s), ways.device) for s in (False, True))
    assert 1.8 < step.products / forward.products < 4.5


def test_the_most_is_what_products_leave():
    assert Share(total=10, fusable=6, products=4).part == 0.6
    assert Share(total=10, fusable=6, products=4).most == pytest.approx(10 / 8)
    assert Share(total=10, fusable=0, products=0).most == 1


# --- nothing changes --------------------------------------------------------------------------


@device_param
@pytest.mark.parametrize("fused_before", [False, True])
def test_the_model_stays_as_it_is(device, fused_before):
    model, x = Model().to(device), torch.randn(32, 16, device=device, requires_grad=True)
    model(x).sum().backward()
    if fused_before:
        tfl.fuse_(model)
    model.drop.eval()
    calls = []
    model.fc1.weight.register_hook(calls.append)
    grads = [p.grad.clone() for p in (*model.parameters(), x)]
    state = copy.deepcopy(model.state_dict())
    code, numbers, python = Model.forward.__code__, torch.get_rng_state(), random.getstate()
    found = quick(model, x, step=True)
    assert set(found.modes) == {"inference", "step"} and len(found.report.fused) == 1
    assert all(
        torch.equal(p.grad, grad) for p, grad in zip((*model.parameters(), x), grads, strict=True)
    )
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training and model.fc1.training and not model.drop.training
    assert tfl.is_fused(model) == fused_before and Model.forward.__code__ is code
    assert torch.equal(torch.get_rng_state(), numbers) and random.getstate() == python
    assert not calls, "a hook of the user's was called"
    tfl.unfuse_(model)


def test_what_is_measured_trains_as_the_model_does():
    """A frozen part of a model in training stays frozen, and inference is not training."""
    model = Model()
    model.drop.eval()
    ways = Ways(model, [torch.randn(4, 16)], {}, loss_of)
    ways.set_mode(step=True)
    assert ways.fused.training and ways.fused.norm.training and not ways.fused.drop.training
    ways.set_mode(step=False)
    assert not any(m.training for each in (ways.plain, ways.fused) for m in each.modules())


def test_the_copies_share_their_parameters():
    ways = Ways(Model(), [torch.randn(4, 16)], {}, loss_of)
    pairs = list(zip(ways.plain.parameters(), ways.fused.parameters(), strict=True))
    assert pairs and all(one is other for one, other in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nudged_weights_come_back(dtype):
    model = Model().to(dtype)
    ways = Ways(model, [torch.randn(4, 16, dtype=dtype)], {}, loss_of)
    before = [p.clone() for p in ways.plain.parameters()]
    with ways.nudged():
        for now, was in zip(ways.plain.parameters(), before, strict=True):
            change = ((now - was) / was)[was != 0].abs()
            assert (change > 0).all() and change.max() <= torch.finfo(dtype).eps
    assert all(torch.equal(p, was) for p, was in zip(ways.plain.parameters(), before, strict=True))


def test_under_autocast_the_digits_are_those_of_its_dtype():
    ways = Ways(Model(), [torch.randn(4, 16)], {}, loss_of)
    weight = ways.plain.fc1.weight
    before = weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16), ways.nudged():
        assert ((weight - before) / before).abs().min() > 2**-9
    assert torch.equal(weight, before)


# --- results ----------------------------------------------------------------------------------


def test_results_are_compared_with_the_same_random_numbers():
    found = quick(Model(), torch.randn(32, 16), step=True)
    for mode in found.modes.values():
        assert mode.apart[FUSED] < 1e-5 and mode.rounding > 0 and not mode.wrong


class Grows(nn.Module):
    """Each copy computes something else: stands for a fault of ours."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.age = 1.0

    def forward(self, x):
        return self.block(x) * self.age

    def __deepcopy__(self, memo):
        other = Grows()
        other.block, other.age = copy.deepcopy(self.block, memo), self.age + 1e-3
        return other


def test_a_wrong_result_is_told():
    found = quick(Grows(), torch.randn(4, 8))
    assert found.modes["inference"].wrong == [FUSED]
    assert "do not use fuse_(model): its results are not eager's" in found.verdict


def test_distance():
    one = [torch.tensor([3.0, 4.0]), torch.tensor(0.0)]
    assert distance([t.clone() for t in one], one) == 0
    assert distance([one[0], torch.tensor(1.0)], one) == pytest.approx(0.2)
    nan = [torch.tensor([float("nan"), 4.0]), one[1]]
    assert not distance(nan, one) <= 1e9, "NaN is no small difference"


def test_the_loss_is_the_outputs_own_or_a_mean():
    x = torch.tensor([1.0, 3.0])
    assert loss_of({"logits": x, "loss": torch.tensor(7.0)}) == 7
    assert loss_of((x, [x + 2], torch.tensor([5]))) == 2 + 4
    given = []
    quick(Model(), torch.randn(4, 16), step=True, loss=lambda y: given.append(y) or y.sum())
    assert given and given[0].shape == (4, 16)


# --- the verdict ------------------------------------------------------------------------------


def timed(**medians):
    names = {"eager": EAGER, "fuse": FUSED, "compile": COMPILED, "ours": OURS}
    return {names[key]: Number(t, 0.99 * t, 1.01 * t, 9) for key, t in medians.items()}


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ({"eager": 110, "fuse": 100}, "use fuse_(model): 1.10 times eager"),
        ({"eager": 101, "fuse": 100}, "leave it: the gain is within noise"),
        ({"eager": 100, "fuse": 110}, "leave it: the model as it is is faster, 1.10 times"),
        (
            {"eager": 200, "fuse": 180, "compile": 105, "ours": 100},
            "use torch.compile(model, options=compile_options()): 1.05 times torch.compile, "
            "2.00 times eager",
        ),
        (
            {"eager": 110, "fuse": 100, "compile": 150, "ours": 140},
            "use fuse_(model): 1.10 times eager",
        ),
        (
            {"eager": 200, "fuse": 150, "compile": 100, "ours": 104},
            "leave it: torch.compile(model) is faster, 1.04 times",
        ),
    ],
)
def test_verdicts(times, verdict):
    assert Mode(Share(1, 1, 1), 1e-7, times=timed(**times)).verdict == verdict


def test_a_verdict_names_memory_and_failures():
    times = timed(eager=110, fuse=100)
    mode = Mode(Share(1, 1, 1), 1e-7, times=times, memory={EAGER: 200, FUSED: 150})
    assert mode.verdict == "use fuse_(model): 1.10 times eager, with 0.75 of its memory"
    mode = Mode(Share(1, 1, 1), 1e-7, times=times, failed={OURS: "no"})
    assert mode.verdict.startswith("do not use torch.compile(model, options=compile_options())")
    no_compiler = Mode(Share(1, 1, 1), 1e-7, times=times, failed={OURS: "no", COMPILED: "no"})
    assert no_compiler.verdict == "use fuse_(model): 1.10 times eager"


def test_what_is_within_noise_has_no_number():
    mode = Mode(Share(2, 1, 0.5), 1e-7, times=timed(eager=101, fuse=100), apart={FUSED: 2e-8})
    (row,) = (line for line in mode.lines() if line.strip().startswith("fuse_ "))
    assert row.endswith("within noise") and "times" not in row


def test_nothing_to_fuse():
    found = quick(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))
    assert found.modes == {} and found.verdict == "leave it: nothing in it can be fused"
    assert found.verdict in str(found)


def test_a_fast_path_of_torch_is_told():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    found = quick(layer, torch.randn(2, 4, 16))
    assert "nothing that can be fused runs" in str(found)


def test_with_the_compiler(tmp_path):
    import inductor

    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    with inductor.quick_to_compile():
        found = quick(model, torch.randn(8, 16), compile=True)
    mode = found.modes["inference"]
    assert mode.failed == {} and list(mode.times) == [EAGER, FUSED, COMPILED, OURS]
    assert mode.replaced == {"mlp": 1} and max(mode.apart.values()) < 1e-5
    found.save_picture(tmp_path / "bars.svg")
    text = (tmp_path / "bars.svg").read_text()
    assert text.startswith("<?xml") and len(text) > 5000


# --- errors -----------------------------------------------------------------------------------


def test_errors():
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got int"):
        quick(3)
    with pytest.raises(ValueError, match="expected an output with a floating-point tensor"):
        quick(Argmax(), torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        quick(Model(), torch.randn(4, 8))
    model = Model()
    model.state = torch.randn(3, requires_grad=True) * 2  # no leaf: torch cannot copy it
    with pytest.raises(TypeError, match="expected a model that can be copied"):
        quick(model, torch.randn(4, 16))


class Argmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x):
        return self.block(x).argmax(-1)


# --- the command ------------------------------------------------------------------------------

BUILD = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

def with_inputs():
    return build(), torch.randn(4, 8)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine_gain.py").write_text(BUILD)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("mine_gain", None)
    sys.path[:] = [folder for folder in sys.path if folder != str(tmp_path)]


def test_the_command(mine):
    command = [sys.executable, "-m", "torch_fused_linear.gain", "mine_gain.py:build"]
    command += ["--input", "4x8", "--step", "--seconds", "0.001", "--device", "cpu", "--why"]
    command += ["--json", "out.json", "--picture", "out.png"]
    result = subprocess.run(
        command, env={"PYTHONPATH": f"{ROOT}:{mine}"}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "first layer" in result.stdout and "1 block fused" in result.stdout
    assert "Warning" not in result.stderr and "ERROR" not in result.stderr
    assert "gain: step: timing eager, fuse_" in result.stderr, "it says what it is doing"
    found = json.loads((mine / "out.json").read_text())
    assert set(found["modes"]) == {"inference", "step"}
    assert all(mode["verdict"] in result.stdout for mode in found["modes"].values())
    assert found["modes"]["step"]["times"]["fuse_"]["median"] > 0
    assert 0 < found["modes"]["step"]["share"]["part"] <= 1
    assert (mine / "out.png").stat().st_size > 1000


def test_dtypes_and_autocast(mine, capsys):
    arguments = ["mine_gain.py:with_inputs", "--device", "cpu", "--seconds", "0.001"]
    assert __main__.main([*arguments, "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out.startswith("CPU, bfloat16\n")
    assert __main__.main([*arguments, "--dtype", "bf16", "--autocast"]) == 0
    assert capsys.readouterr().out.startswith("CPU, float32, autocast bfloat16\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["mine_gain"], "expected package.module:function, timm:NAME or hf:TYPE"),
        (["mine_gain.py:build"], "expected --input SHAPE"),
        (["mine_gain.py:nothing", "--input", "4x8"], "has no attribute 'nothing'"),
        (["mine_gain.py:build", "--input", "4,8"], "--input 4,8: expected a shape"),
        (["no_such_module:build", "--input", "4x8"], "No module named 'no_such_module'"),
        (["hf:no_such_type"], "no_such_type"),
        (["timm:no_such_model"], "Unknown model (no_such_model)"),
        (["timm:vit_tiny_patch16_224,depth"], "expected key=value"),
    ],
)
def test_bad_arguments_give_one_line(mine, capsys, arguments, says):
    library = {"hf": "transformers", "timm": "timm"}.get(arguments[0].partition(":")[0])
    if library:
        pytest.importorskip(library)
    assert __main__.main([*arguments, "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1 and len(message) < 400


def test_models_by_name():
    pytest.importorskip("timm")
    model, args, kwargs = model_and_inputs("timm:vit_tiny_patch16_224,depth=1", [], 2)
    assert len(model.blocks) == 1 and args[0].shape == (2, 3, 224, 224) and not kwargs
    pytest.importorskip("transformers")
    small = "n_layer=1,n_embd=16,n_head=2"
    model, args, kwargs = model_and_inputs(f"hf:gpt2,{small}", ["2x9"], 1)
    assert not args and kwargs["input_ids"].shape == (2, 9)
    assert kwargs["input_ids"].max() < model.config.vocab_size
    assert model(**kwargs).logits.shape == (2, 9, model.config.vocab_size)
    model, args, kwargs = model_and_inputs("hf:vit,num_hidden_layers=1,hidden_size=48", [], 2)
    assert kwargs["pixel_values"].shape == (2, 3, 224, 224)


def test_whole_numbers_as_input(mine):
    _, (ids,), _ = model_and_inputs("mine_gain.py:build", ["3x5:7"], 1)
    assert ids.shape == (3, 5) and ids.dtype == torch.int64 and 0 <= ids.min() <= ids.max() < 7


def test_a_contender_is_called_under_its_conditions():
    ways = Ways(Model(), [torch.randn(4, 16)], {}, loss_of)
    contender = ways.contender(EAGER, step=False)
    assert isinstance(contender, Contender) and not ways.result(contender, False)[0].requires_grad
