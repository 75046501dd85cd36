"""Code that fuse_ leaves alone, byte for byte, and the reason that it gives."""

import copy
import functools
import re
import types

import pytest
import torch
from fused_models import Block, Gated, Snapshot, operators, results
from stacks import assert_same
from torch import nn
from torch.nn import functional as F
from tree_parts import LoudReLU

import torch_fused_linear as tfl


def pair(linear=None, *between, activation=None):
    return nn.Sequential(linear or nn.Linear(4, 4), *between, activation or nn.ReLU())


def images(conv=None, *between, activation=None):
    return nn.Sequential(conv or nn.Conv2d(1, 4, 3), *between, activation or nn.ReLU())


def changed(change, name="0", make=pair):
    def made():
        model = make()
        change(model.get_submodule(name))
        return model

    return made


class Branching(nn.Module):
    """Another module reads the activation's input as well."""

    def __init__(self, norm):
        super().__init__()
        self.conv, self.relu, self.norm = nn.Conv2d(1, 4, 3), nn.ReLU(), norm

    def forward(self, x):
        y = self.norm(self.conv(x))
        return y + self.relu(y)


def hooked(module):
    module.register_forward_hook(lambda *args: None)


def own_forward(block):
    block.forward = types.MethodType(Block.forward, block)


async def awaited(x):
    return F.relu(x)


def with_coroutine(block):
    del block.act
    block.act = awaited


ACTS, NORMALISED = "dropout that acts in training", "a normalisation stands between"
CASES = {
    "hook of the layer": (changed(hooked), "0: has forward hooks"),
    "hook of the activation": (changed(hooked, "1"), "the activation has forward hooks"),
    "hook between": (changed(hooked, "1", lambda: pair(None, nn.Dropout(0.0))), ""),
    "own forward": (changed(own_forward, "", Block), "fc1: .* forward of its own"),
    "coroutine": (changed(with_coroutine, "", Block), ""),
    "another activation": (lambda: pair(activation=nn.Tanh()), "Tanh: only ReLU, squared ReLU"),
    "complex": (lambda: pair(nn.Linear(4, 4, dtype=torch.complex64)), "torch.complex64"),
    "child of nn.ReLU": (lambda: pair(activation=LoudReLU()), "LoudReLU is a subclass"),
    "dropout before GELU": (lambda: pair(None, nn.Dropout(0.1), activation=nn.GELU()), ACTS),
    # eval() is no promise: train() may follow
    "in eval mode": (lambda: pair(None, nn.Dropout(0.1), activation=nn.GELU()).eval(), ACTS),
    "another container": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU()),
        "^0.0: its activation lies in another container",
    ),
    "batch norm": (lambda: pair(None, nn.BatchNorm1d(4)), f"{NORMALISED} .* fold it into"),
    "layer norm": (lambda: pair(None, nn.LayerNorm(4)), f"{NORMALISED} it and its activation$"),
    "images, batch norm": (lambda: images(None, nn.BatchNorm2d(4)), f"{NORMALISED} .* fold it"),
    "images, GELU": (lambda: images(activation=nn.GELU()), "GELU: a convolution can be"),
    "complex images": (lambda: images(nn.Conv2d(1, 4, 3, dtype=torch.cfloat)), "complex64"),
    "read by another": (
        lambda: nn.ModuleDict({"block": Branching(nn.Identity())}),
        "^block: .* straight to 'relu' and nowhere else",
    ),
    # a normalised convolution is seldom meant to
    "read by another, normalised": (lambda: Branching(nn.BatchNorm2d(4)), ""),
}


@pytest.mark.parametrize("case", CASES)
def test_left_alone_with_a_reason(case):
    make, reason = CASES[case]
    model = make()
    before = Snapshot.of(model)
    report = tfl.fuse_(model)
    said = [f"{s.path}: {s.reason}" for s in report.skipped]
    assert not report.fused and len(said) == bool(reason), report
    assert all(re.search(reason, text) for text in said), report
    before.assert_equals(Snapshot.of(model))


@pytest.mark.parametrize(
    "refused, found", [("up", "linear_relu"), ("fc2", "linear_glu (ReLU)"), ("fc1", "")]
)
def test_a_layer_of_a_gate_that_is_refused_leaves_the_rest(refused, found):
    model, x = Gated().double(), [torch.randn(3, 6).double()]
    plain = copy.deepcopy(model)
    report = tfl.fuse_(model, filter_fn=lambda name, layer: name != refused)
    assert [b.after for b in report.fused] == [(found,)] * bool(found)
    assert [(s.path, s.reason) for s in report.skipped] == [(refused, "filter_fn says no")]
    assert_same(results(model, x), results(plain, x))


def documented(x):
    """With a docstring."""
    return torch.nn.functional.gelu(x, approximate="tanh")


changing = F.relu
FUNCTIONS = [
    (documented, "linear_gelu"),
    (lambda x: F.relu(x), "linear_relu"),
    (lambda x: changing(x), "linear_relu"),
    (lambda x: x.relu(), None),
    (lambda x: F.relu(x) + 1, None),
    (lambda x, y=0: F.relu(x), None),
    (lambda x: F.relu(torch.tanh(x)), None),
    ((lambda f: lambda x: f(x))(F.relu), None),
    (F.relu, "linear_relu"),
    (functools.partial(F.silu, inplace=True), "linear_silu"),
    (functools.partial(F.mish), None),
]


@pytest.mark.parametrize("activation, operator", FUNCTIONS)
def test_activations_that_are_functions(activation, operator, monkeypatch):
    layer = nn.TransformerEncoderLayer(4, 2, 8, activation=activation, dropout=0.0)
    x = torch.randn(3, 2, 4)
    want = layer(x)
    assert len(tfl.fuse_(layer).fused) == (operator is not None)
    torch.testing.assert_close(layer(x), want)
    is_fused = operator is not None
    assert operators(layer, x) == ["mlp"] * is_fused
    with torch.no_grad(), tfl.explain() as calls:
        layer.linear2.register_forward_hook(lambda *args: None)  # so that there is no block
        layer(x)
    assert [call.operator for call in calls.calls][:1] == [operator] * is_fused
    layer.linear2._forward_hooks.clear()
    monkeypatch.setitem(globals(), "changing", torch.tanh)  # what a function calls at the time
    plain = copy.deepcopy(layer)
    tfl.unfuse_(plain)
    torch.testing.assert_close(layer(x), plain(x))
    tfl.unfuse_(layer)
    assert layer.activation is activation and "activation" not in layer._modules


class Digits(nn.Module):
    """Convolutions as people write them: a forward that is read, and one activation for all."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, stride=2, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4 * 3 * 3, 5)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        return self.fc(torch.flatten(x, 1))


@pytest.mark.parametrize(
    "make, count", [(images, 1), (lambda: images(None, nn.Dropout(0.0)), 1), (Digits, 2)]
)
def test_convolutions(make, count, tmp_path):
    model = make()
    plain, x = copy.deepcopy(model), [torch.randn(2, 1, 8, 8)]
    report = tfl.fuse_(model)
    assert len(report.fused) == count and not report.skipped, report
    assert report.fused[0].before[:2] == ("Conv2d", "BiasAdd")
    assert report.fused[0].after[0] == "conv2d_relu"
    report.save_picture(tmp_path / "blocks.svg")
    assert operators(model, *x).count("conv2d_relu") == count
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_same(results(model, x), results(plain, x))
    scripted = torch.jit.script(model)
    assert len(tfl.fuse_script_(scripted).fused) == count
    torch.testing.assert_close(scripted(*x), plain(*x))
    assert str(scripted.inlined_graph).count("fused::conv2d_relu") == count
    assert tfl.fuse_(model).skipped[0].reason == "already fused"
    tfl.unfuse_(model)
    assert repr(model) == repr(plain)
    assert_same(results(model, x), results(plain, x))


# --- layers that are linear by name ---------------------------------------------------------------


class ClippedLinear(nn.Module):
    """A layer around another one, as Gemma has it."""

    def __init__(self, features_in, features_out):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)

    def forward(self, x):
        return self.linear(x).clamp(-1, 1)


class PackedLinear(ClippedLinear):
    """Its weight is a method, as of quantised layers."""

    def weight(self):
        return self.linear.weight

    def bias(self):
        raise NotImplementedError


class SilentLinear(ClippedLinear):
    """Its weight cannot be asked for."""

    @property
    def weight(self):
        raise RuntimeError("the weight is on another machine")


def lazy_linear(features_in, features_out):
    return nn.LazyLinear(features_out)


def parametrised_linear(features_in, features_out):
    return nn.utils.parametrizations.weight_norm(nn.Linear(features_in, features_out))


BY_NAME = (ClippedLinear, PackedLinear, SilentLinear, lazy_linear, parametrised_linear)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("make", BY_NAME)
@pytest.mark.parametrize("cls, names", [(Block, ["fc1", "fc2"]), (Gated, ["fc1", "up", "fc2"])])
def test_layers_that_are_linear_by_name(cls, names, make, linear):
    """Each of a block's layers, and all of them: fuse_ does not raise, and the results stay."""
    x = torch.randn(3, 6, dtype=torch.float64)
    for changed_ones in [*([name] for name in names), names]:
        torch.manual_seed(0)
        model = cls()
        for name in changed_ones:
            setattr(model, name, make(6, 6))
        model = model.double()
        fused = copy.deepcopy(model)
        tfl.fuse_(fused, linear=linear)
        outputs = []
        for one in (model, fused):
            torch.manual_seed(1)  # the first call initialises lazy layers
            outputs.append(one(x))
        assert torch.equal(*outputs)
