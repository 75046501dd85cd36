"""gain: what is measured, that the model stays as it is, the verdict, and the command line."""

import json
import random

import pytest
import torch
from fused_models import Snapshot, unmark_all
from helpers import device_param, few_objects, one_thread  # noqa: F401
from processes import ROOT, python
from torch import nn

import torch_fused_linear as tfl
from torch_fused_linear.gain import Copies, Mode, __main__, distance, loss_of, share_of
from torch_fused_linear.gain.result import COMPILED, EAGER, FUSED, OURS
from torch_fused_linear.timing import Contender, Number


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


class Ends(nn.Module):
    """A block that can be fused, and what becomes of its output."""

    def __init__(self, end, width=8):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.end = end

    def forward(self, x):
        return self.end(self, self.block(x))


def copies_of(model, *inputs, step=False):
    return Copies(model, inputs, {}, loss_of, step)


def share(model, x, step):
    copies = copies_of(model, x, step=step)
    return share_of(copies.contender(FUSED), copies.device)


@pytest.mark.parametrize(("width", "others", "low", "high"), [(512, 8, 0.8, 1), (8, 512, 0, 0.2)])
@pytest.mark.parametrize("step", [False, True])
def test_the_share_is_that_of_the_block(width, others, low, high, step):
    """A step's backward counts, too; its products have names of torch's own."""
    model = Ends(lambda model, y: y.sum() + (model.others @ model.others).sum(), width)
    model.others = nn.Parameter(torch.randn(others, others))  # for products that cannot be fused
    part, most = share(model, torch.randn(256, width), step)
    assert low <= part <= high and 1 <= most <= 1 / (1 - part + 1e-9)


def test_products_are_what_is_left():
    """A block of few features spends nearly all of its time outside its products."""
    model = nn.Sequential(nn.Linear(2, 4096), nn.GELU(), nn.Linear(4096, 2))
    assert share(model, torch.randn(512, 2), step=False)[1] > 1.3


def test_without_a_fused_operator_there_is_no_share():
    called = Contender("nothing", lambda: torch.ones(8).sum())
    assert share_of(called, torch.device("cpu")) == (0, 1)


# --- nothing changes --------------------------------------------------------------------------


@device_param
@pytest.mark.parametrize("fused_before", [False, True])
def test_the_model_stays_as_it_is(device, fused_before, monkeypatch):
    model, x = Model().to(device), torch.randn(32, 16, device=device, requires_grad=True)
    unmark_all(monkeypatch)
    tfl.unfuse_(model)  # puts back what other tests rewrote
    model(x).sum().backward()
    if fused_before:
        tfl.fuse_(model)
    model.drop.eval()
    calls = []
    model.fc1.weight.register_hook(calls.append)
    grads = [p.grad.clone() for p in (*model.parameters(), x)]
    before = Snapshot.of(model)
    code, numbers, python = Model.forward.__code__, torch.get_rng_state(), random.getstate()
    found = quick(model, x, step=True)
    assert set(found.modes) == {"inference", "step"} and len(found.report.fused) == 1
    assert all(
        torch.equal(p.grad, grad) for p, grad in zip((*model.parameters(), x), grads, strict=True)
    )
    before.assert_equals(Snapshot.of(model))
    assert tfl.is_fused(model) == fused_before and Model.forward.__code__ is code
    assert torch.equal(torch.get_rng_state(), numbers) and random.getstate() == python
    assert not calls, "a hook of the user's was called"
    tfl.unfuse_(model)


def test_the_measured_copy_trains_as_the_model():
    """A frozen part of a model in training stays frozen, and inference is not training."""
    model = Model()
    model.drop.eval()
    for each in copies_of(model, torch.randn(4, 16), step=True).models.values():
        assert each.training and each.norm.training and not each.drop.training
    for each in copies_of(model, torch.randn(4, 16)).models.values():
        assert not any(module.training for module in each.modules())
    for each in copies_of(model.eval(), torch.randn(4, 16), step=True).models.values():
        assert each.training, "a step of a model that is in eval trains it"


def test_the_copies_share_their_parameters_alone():
    model = Model()
    first, *others = copies_of(model, torch.randn(4, 16)).models.values()
    for other in others:
        assert all(a is b for a, b in zip(first.parameters(), other.parameters(), strict=True))
        assert other.norm.running_mean is not first.norm.running_mean
    assert not {id(p) for p in first.parameters()} & {id(p) for p in model.parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rounding_is_that_of_the_dtype(dtype):
    found = quick(Model().to(dtype), torch.randn(32, 16, dtype=dtype))
    eps = torch.finfo(dtype).eps
    assert 0.05 * eps < found.modes["inference"].rounding < 5 * eps


def test_under_autocast_the_digits_are_those_of_its_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        found = quick(Model(), torch.randn(32, 16))
    assert found.where == "CPU, bfloat16"
    assert found.modes["inference"].rounding > 2**-12


# --- results ----------------------------------------------------------------------------------


def test_results_are_compared_with_the_same_random_numbers():
    for mode in quick(Model(), torch.randn(32, 16), step=True).modes.values():
        assert mode.apart[FUSED] < 1e-5 and "do not use" not in mode.verdict


def test_a_wrong_result_is_told():
    model = Ends(lambda model, y: y * (1 + 1e-3 * tfl.is_fused(model)))  # for a fault of ours
    found = quick(model, torch.randn(4, 8))
    assert "do not use fuse_: its results are not eager's" in found.verdict


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


FASTER, AS_FAST = timed(eager=110, fuse=100), timed(eager=101, fuse=100)
LESS = {EAGER: 200, FUSED: 150}
VERDICTS = [
    (Mode(times=FASTER), "use fuse_: 1.10 times eager"),
    (Mode(times=AS_FAST), "leave it: the gain is within noise"),
    # the spread is as wide
    (Mode(times=timed(eager=103, fuse=100)), "leave it: the gain is within noise"),
    (Mode(times=timed(eager=100, fuse=110)), "leave it: eager is faster, 1.10 times"),
    (
        Mode(times=timed(eager=200, fuse=180, compile=105, ours=100)),
        "use compile_options(): 1.05 times torch.compile, 2.00 times eager",
    ),
    (Mode(times=timed(eager=110, fuse=100, compile=150, ours=140)), "use fuse_: 1.10 times eager"),
    (
        Mode(times=timed(eager=200, fuse=150, compile=100, ours=105)),
        "leave it: torch.compile is faster, 1.05 times",
    ),
    (Mode(times=FASTER, memory=LESS), "use fuse_: 1.10 times eager, 0.75 of the memory of eager"),
    (Mode(times=AS_FAST, memory=LESS), "use fuse_: 0.75 of the memory of eager"),
    (
        Mode(times=FASTER, failed={OURS: "no"}),
        "do not use compile_options(): it failed; please report it",
    ),
    (Mode(times=FASTER, failed={OURS: "no", COMPILED: "no"}), "use fuse_: 1.10 times eager"),
    (Mode(failed={EAGER: "no", FUSED: "no"}), "leave it: nothing was measured"),
    (
        Mode(times=FASTER, rounding=1e-7, apart={FUSED: float("nan")}),
        "do not use fuse_: its results are not eager's; please report it",
    ),
]


@pytest.mark.parametrize(("mode", "verdict"), VERDICTS)
def test_verdicts(mode, verdict):
    assert mode.verdict == verdict


def test_nothing_to_fuse():
    found = quick(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))
    assert found.modes == {} and found.verdict == "leave it: nothing in it can be fused"
    assert found.verdict in str(found)


def test_a_fast_path_of_torch_is_told():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    assert "nothing that can be fused runs" in str(quick(layer, torch.randn(2, 4, 16)))


def test_with_the_compiler():
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    mode = quick(model, torch.randn(8, 16), compile=True).modes["inference"]
    assert mode.failed == {} and list(mode.times) == [EAGER, FUSED, COMPILED, OURS]
    assert set(mode.apart) == {FUSED, COMPILED, OURS} and max(mode.apart.values()) < 1e-5


# --- errors -----------------------------------------------------------------------------------


def test_errors():
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got int"):
        quick(3)
    with pytest.raises(ValueError, match="expected an output with a floating-point tensor"):
        quick(Ends(lambda model, y: y.argmax(-1)), torch.randn(2, 8))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        quick(Model(), torch.randn(4, 8))
    model = Model()
    model.state = torch.randn(3, requires_grad=True) * 2  # no leaf: torch cannot copy it
    with pytest.raises(TypeError, match="expected what can be copied"):
        quick(model, torch.randn(4, 16))


# --- the command ------------------------------------------------------------------------------

BUILD = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
"""


def test_the_command(tmp_path):
    (tmp_path / "mine.py").write_text(BUILD)
    command = "-m torch_fused_linear.gain mine:build --input 4x8 --step --seconds 0.001"
    command += " --device cpu --dtype bf16 --why --json out.json --picture out.png"
    result = python(*command.split(), cwd=tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert "first layer" in result.stdout and "1 block fused" in result.stdout
    assert "\n\nCPU, bfloat16\n" in result.stdout
    assert "Warning" not in result.stderr and "ERROR" not in result.stderr
    assert "gain: step: eager, fuse_" in result.stderr, "it says what it is doing"
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found["modes"]) == {"inference", "step"} and found["verdict"]
    assert found["modes"]["step"]["times"]["fuse_"]["median"] > 0
    assert 0 < found["modes"]["step"]["share"] <= 1
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_models_by_name():
    pytest.importorskip("timm")
    model = __main__.model_named("timm:vit_tiny_patch16_224")
    assert len(model.blocks) == 12
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = __main__.model_named("hf:gpt2")
    assert type(model).__name__ == "GPT2LMHeadModel" and not model.config.use_cache
    ids = __main__.input_of([2, 9], 0, model)
    assert ids.shape == (2, 9) and ids.max() < model.config.vocab_size and ids.dtype == torch.int64


def test_inputs():
    whole = __main__.input_of(*__main__.shape("300x5:7"), nn.ReLU())
    assert whole.shape == (300, 5) and whole.min() == 0 and whole.max() == 6
    real = __main__.input_of(*__main__.shape("3x5x2"), nn.ReLU())
    assert real.shape == (3, 5, 2) and real.dtype == torch.float32
