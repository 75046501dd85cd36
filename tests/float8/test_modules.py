"""FusedMLP and FusedGatedMLP with precision='float8'."""

import copy
import io
import pickle

import pytest
import torch
from recipe import HIDDEN
from torch import nn

import torch_fused_linear as tfl


def models(**options):
    mlp = tfl.FusedMLP(32, 48, 16, activation="gelu_tanh", precision="float8", **options)
    gated = tfl.FusedGatedMLP(32, 48, 16, activation="silu", precision="float8", **options)
    return [mlp, gated]


def call_of(model, x):
    if isinstance(model, tfl.FusedMLP):
        layers = model[0], model[2]
        return tfl.float8_mlp(
            x, [m.weight for m in layers], [m.bias for m in layers], model.activation
        )
    layers = model.gate_proj, model.up_proj, model.down_proj
    weights, biases = [m.weight for m in layers], [m.bias for m in layers]
    return tfl.float8_gated_mlp(x, *weights, *biases, activation=model.activation)


@pytest.mark.parametrize("bias", [False, True])
def test_runs_as_the_function(bias):
    x = torch.randn(32, 32)
    for model in models(bias=bias):
        y = model(x)
        assert torch.equal(y, call_of(model, x))
        assert y.grad_fn.name().startswith("Fused_float8_")
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(again(x), y)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(x), y)


@pytest.mark.parametrize("activation", HIDDEN)
def test_activations(activation):
    x = torch.randn(32, 32)
    mlp = tfl.FusedMLP(32, 48, 16, activation=activation, precision="float8")
    gated = tfl.FusedGatedMLP(32, 48, activation=activation, precision="float8")
    for model in (mlp, gated):
        assert torch.equal(model(x), call_of(model, x))


def test_repr():
    mlp, gated = models()
    assert "precision='float8'" in repr(mlp) and "precision='float8'" in repr(gated)
    assert "precision" not in repr(tfl.FusedMLP(4, 4, 4)) + repr(tfl.FusedGatedMLP(4, 4))


def test_modules_that_exist():
    sequential = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    x = torch.randn(16, 32)
    mlp = tfl.FusedMLP.from_sequential(sequential, precision="float8")
    assert torch.equal(mlp(x), call_of(mlp, x)) and not torch.equal(mlp(x), sequential(x))
    gate, up, down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
    gated = tfl.FusedGatedMLP.from_modules(gate, up, down, precision="float8")
    assert torch.equal(gated(x), call_of(gated, x))


@pytest.mark.parametrize("make", [tfl.FusedMLP, tfl.FusedGatedMLP])
def test_refused(make):
    with pytest.raises(ValueError, match=f"{make.__name__}: precision must be 'default' or"):
        make(32, 48, precision="float16")
    with pytest.raises(ValueError, match=f"{make.__name__}: memory must be 'default' with"):
        make(32, 48, precision="float8", memory="low")


def test_children_with_hooks_run_one_by_one():
    x = torch.randn(32, 32)
    for model in models():
        child = model[0] if isinstance(model, tfl.FusedMLP) else model.up_proj
        seen = []
        handle = child.register_forward_hook(lambda *args, seen=seen: seen.append(1))
        model(x)
        handle.remove()
        assert seen == [1] and torch.equal(model(x), call_of(model, x))


def test_saved_before_there_was_a_precision():
    mlp = tfl.FusedMLP(32, 48, 16)
    state = dict(mlp.__dict__)
    del state["precision"]
    old = tfl.FusedMLP.__new__(tfl.FusedMLP)
    old.__setstate__(state)
    x = torch.randn(8, 32)
    assert torch.equal(old(x), mlp(x))


def test_scripted_and_compiled(fresh_compiler):
    x = torch.randn(32, 32)
    for model in models():
        y = model(x)
        assert torch.equal(torch.jit.script(model)(x), y)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), y)


def test_training_reaches_fp32():
    """A regression that is learnt: the loss falls as far as without FP8, in as many steps."""
    losses = {}
    for precision in ("default", "float8"):
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))
        model = tfl.FusedMLP(32, 128, 16, activation="gelu_tanh", precision=precision)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(300):
            x = torch.randn(64, 32)
            loss = (model(x) - teacher(x).detach()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[precision] = loss.item()
    assert losses["default"] < 0.03
    assert losses["float8"] < 1.25 * losses["default"]
