"""FusedGatedMLP: the block, its state_dict, and when its children run one by one."""

import copy
import pickle

import pytest
import torch
from gated import ACTS, activation_param
from helpers import device_param, one_thread  # noqa: F401
from torch import nn
from torch.nn.utils import parametrizations

import torch_fused_linear as tfl
from torch_fused_linear import FusedGatedMLP

NAMES = ("gate_proj", "up_proj", "down_proj")


def plain(block, x):
    hidden = ACTS[block.activation](block.gate_proj(x)) * block.up_proj(x)
    return block.down_proj(hidden)


def operators(block, x):
    with torch.no_grad(), tfl.explain() as report:
        block(x)
    return [call.operator for call in report.calls]


FUSED, APART = ["linear", "linear", "_glu", "linear"], []


@device_param
@activation_param
@pytest.mark.parametrize("bias", [False, True])
def test_what_it_computes(bias, activation, device):
    options = {"device": device, "dtype": torch.float64}
    for out in (None, 5):
        block = FusedGatedMLP(4, 6, out, bias, activation, **options)
        assert [type(m) for m in block.children()] == [nn.Linear] * 3
        suffixes = ["weight", "bias"] if bias else ["weight"]
        assert list(block.state_dict()) == [f"{n}.{s}" for n in NAMES for s in suffixes]
        x = torch.randn(2, 3, 4, **options, requires_grad=True)
        y, want = block(x), plain(block, x)
        assert y.grad_fn.name().startswith("FusedGatedMlp") and y.shape == (2, 3, out or 4)
        leaves = [x, *block.parameters()]
        for a, b in zip(*(torch.autograd.grad(t.sin().sum(), leaves) for t in (y, want))):
            torch.testing.assert_close(a, b)


def test_initialisation_is_that_of_linear():
    torch.manual_seed(5)
    block = FusedGatedMLP(4, 6, bias=True)
    torch.manual_seed(5)
    layers = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
    for p, q in zip(block.parameters(), nn.ModuleList(layers).parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("bias", [False, True])
def test_both_weights_in_one_load(bias):
    block, given = FusedGatedMLP(4, 6, bias=bias), FusedGatedMLP(4, 6, bias=bias)
    model, state = nn.Sequential(block), {}
    for suffix in ["weight", "bias"] if bias else ["weight"]:
        halves = [getattr(getattr(given, name), suffix) for name in NAMES]
        state[f"0.gate_up_proj.{suffix}"] = torch.cat(halves[:2])
        state[f"0.down_proj.{suffix}"] = halves[2]
    before = dict(state)
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert state.keys() == before.keys(), "what was given stays as it is"
    for p, q in zip(block.parameters(), given.parameters(), strict=True):
        assert torch.equal(p, q)


def test_from_modules_shares_the_objects():
    layers = nn.Linear(4, 6, bias=False), nn.Linear(4, 6), nn.Linear(6, 3)
    block = FusedGatedMLP.from_modules(*[layer.eval() for layer in layers], activation="relu")
    assert tuple(block.children()) == layers and not block.training
    x = torch.randn(5, 4)
    torch.testing.assert_close(block(x), plain(block, x))


def test_what_from_modules_refuses():
    gate, up, down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
    with pytest.raises(ValueError, match=r"from_modules.*got \[6, 4\], \[5, 4\], \[3, 6\]"):
        FusedGatedMLP.from_modules(gate, nn.Linear(4, 5), down)
    with pytest.raises(ValueError, match="activation must be"):
        FusedGatedMLP.from_modules(gate, up, down, activation="tanh")
    up.register_forward_hook(lambda *a: None)
    with pytest.raises(TypeError, match=r"from_modules.*forward hooks"):
        FusedGatedMLP.from_modules(gate, up, down)
    with pytest.raises(TypeError, match=r"from_modules.*Conv1d"):
        FusedGatedMLP.from_modules(gate, nn.Conv1d(4, 6, 1), down)
    with pytest.raises(ValueError, match="FusedGatedMLP: activation must be 'relu'"):
        FusedGatedMLP(4, 6, activation="swish")


def hooked(block):
    block.up_proj.register_forward_hook(lambda module, args, y: y * 2)


def exchanged(block):
    block.gate_proj = nn.Sequential(block.gate_proj, nn.Tanh())


def parametrised(block):
    parametrizations.weight_norm(block.down_proj)


@pytest.mark.parametrize("change", [hooked, exchanged, parametrised])
def test_changed_children_run_one_by_one(change):
    block, x = FusedGatedMLP(4, 6), torch.randn(5, 4)
    assert operators(block, x) == FUSED
    change(block)
    assert operators(block, x) == APART
    torch.testing.assert_close(block(x), plain(block, x))


def test_copies_and_pickles():
    block, x = FusedGatedMLP(4, 6, activation="gelu_erf"), torch.randn(5, 4)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(other(x), block(x)) and "activation='gelu_erf'" in repr(other)


@pytest.mark.parametrize("how", ["script", "compile"])
def test_scripted_and_compiled(how):
    block, x = FusedGatedMLP(4, 6).double(), torch.randn(5, 4, dtype=torch.float64)
    if how == "script":
        other = torch.jit.script(block)
        assert "fused::gated_mlp" in str(other.inlined_graph)
    else:
        torch._dynamo.reset()
        other = torch.compile(block, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        leaves = list(block.parameters())
        for a, b in zip(*(torch.autograd.grad(m(x).sin().sum(), leaves) for m in (other, block))):
            torch.testing.assert_close(a, b)
