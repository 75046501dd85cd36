"""What fuse_ leaves alone, byte for byte, and the reason that it gives."""

import copy
import functools
import types

import pytest
import torch
from fused_models import Snapshot
from helpers import one_thread  # noqa: F401
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import torch_fused_linear as tfl


def pair(linear=None, *between, activation=None):
    return nn.Sequential(linear or nn.Linear(4, 4), *between, activation or nn.ReLU())


def changed(change, index=0):
    def make():
        model = pair()
        change(model[index])
        return model

    return make


class Lora(nn.Linear):
    pass


class LoraLinear(nn.Module):
    """A wrapper that is no nn.Linear at all."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4)

    def forward(self, x):
        return self.base(x)


class MyReLU(nn.ReLU):
    pass


def nothing(*args):
    return None


HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)
CASES = {
    **{
        f"{name} of {('the layer', 'the activation')[index]}": (
            changed(lambda m, name=name: getattr(m, name)(nothing), index),
            "hooks",
        )
        for name in HOOKS
        for index in (0, 1)
    },
    "forward replaced": (
        changed(lambda m: setattr(m, "forward", types.MethodType(nn.Linear.forward, m))),
        "forward of its own",
    ),
    "compiled layer": (changed(lambda m: m.compile(backend="eager")), "was compiled"),
    "weight_norm": (changed(parametrizations.weight_norm), "parametrisation"),
    "pruned": (changed(lambda m: prune.l1_unstructured(m, "weight", 0.5)), "forward pre hooks"),
    "child of nn.Linear": (lambda: pair(Lora(4, 4)), "Lora is not exactly nn.Linear"),
    "wrapper": (lambda: pair(LoraLinear()), "LoraLinear is not exactly nn.Linear"),
    "lazy": (lambda: pair(nn.LazyLinear(4)), "LazyLinear is not exactly nn.Linear"),
    "our own layer": (lambda: pair(tfl.FusedLinear(4, 4)), "FusedLinear is not exactly"),
    "complex": (lambda: pair(nn.Linear(4, 4, dtype=torch.complex64)), "torch.complex64"),
    "float8": (lambda: pair(nn.Linear(4, 4).to(torch.float8_e4m3fn)), "torch.float8_e4m3fn"),
    "Mish": (lambda: pair(activation=nn.Mish()), "Mish: only ReLU, GELU"),
    "child of nn.ReLU": (lambda: pair(activation=MyReLU()), "MyReLU is a subclass"),
    "dropout before GELU": (
        lambda: pair(None, nn.Dropout(0.1), activation=nn.GELU()),
        "dropout that acts in training",
    ),
    # eval() is no promise: train() may follow
    "the same in eval mode": (
        lambda: pair(None, nn.Dropout(0.1), activation=nn.GELU()).eval(),
        "dropout that acts in training",
    ),
    "another container": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU()),
        "lies in another container",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_left_alone_with_a_reason(case):
    make, reason = CASES[case]
    model = make()
    before = snapshot(model)
    report = tfl.fuse_(model)
    assert not report.fused, report
    assert len(report.skipped) == 1 and reason in report.skipped[0].reason, report
    before.assert_equals(snapshot(model))


def snapshot(model):
    """Without the state of what has none yet, or none that can be compared."""
    if any(p.dtype == torch.float8_e4m3fn for p in model.parameters()):
        model.state_dict = dict
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        model.state_dict = dict
    return Snapshot.of(model)


def test_a_quantised_layer_is_left_alone():
    why = "torch's own quantisation is to be removed"
    quantization = pytest.importorskip("torch.ao.quantization", reason=why)
    with pytest.warns(DeprecationWarning):
        model = quantization.quantize_dynamic(pair(), {nn.Linear})
    assert "is not exactly nn.Linear" in tfl.fuse_(model).skipped[0].reason


def test_a_weight_of_another_tensor_class_is_left_alone():
    class Sharded(torch.Tensor):
        pass

    model = pair()
    model[0].weight = nn.Parameter(torch.randn(4, 4).as_subclass(Sharded))
    assert "Sharded, not a plain nn.Parameter" in tfl.fuse_(model).skipped[0].reason


def test_a_watched_next_layer_stays_and_the_layer_before_is_fused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].register_forward_hook(nothing)
    report = tfl.fuse_(model)
    assert [b.layers for b in report.fused] == [("0",)]
    assert [(s.path, s.reason) for s in report.skipped] == [("2", "has forward hooks")]


def test_a_watched_dropout_between_is_shown_what_it_always_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.ReLU())
    model[1].register_forward_hook(nothing)
    assert not tfl.fuse_(model).fused


def test_a_state_dict_hook_on_a_layer_goes_on_working():
    model, seen = pair(), []
    model[0].register_state_dict_post_hook(lambda *args: seen.append(args))
    assert tfl.fuse_(model).fused
    model.state_dict()
    assert len(seen) == 1


def test_fused_mlp_is_left_alone():
    model = nn.Sequential(tfl.FusedMLP(4, 5, 6))
    before = Snapshot.of(model)
    report = tfl.fuse_(model)
    assert not report.fused and not report.skipped
    before.assert_equals(Snapshot.of(model))


@pytest.mark.parametrize(
    "activation, kind",
    [
        (F.relu, "linear_relu"),
        (torch.relu, "linear_relu"),
        (F.gelu, "linear_gelu"),
        (functools.partial(F.gelu, approximate="tanh"), "linear_gelu"),
        (functools.partial(F.relu, inplace=True), "linear_relu"),
        (lambda x: F.gelu(x, approximate="tanh"), "linear_gelu"),
        (F.silu, "linear_silu"),
        (functools.partial(F.silu, inplace=True), "linear_silu"),
        (F.mish, None),
        (torch.tanh, None),
        (lambda x: F.relu(x) + 1, None),
        (lambda x, y=0: F.relu(x), None),
    ],
)
def test_activations_that_are_functions(activation, kind):
    layer = nn.TransformerEncoderLayer(4, 2, 8, activation=activation, dropout=0.0)
    x = torch.randn(3, 2, 4)
    want = layer(x)
    report = tfl.fuse_(layer)
    with tfl.explain() as calls:
        torch.testing.assert_close(layer(x), want)
    if kind is None:
        assert not report.fused and not calls.calls
        return
    assert kind in calls.calls[0].operator
    tfl.unfuse_(layer)
    assert layer.activation is activation and "activation" not in layer._modules


# --- a forward and its class ---------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 5)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.fc1(x))


def with_sum(self, x):
    h = self.fc1(x)
    return self.act(h) + h.sum()


def test_a_forward_replaced_on_the_object_is_not_what_is_read():
    model = Block()
    model.forward = types.MethodType(with_sum, model)
    report = tfl.fuse_(model)
    assert not report.fused and "forward of its own" in report.skipped[0].reason


def test_a_forward_replaced_on_the_class_is_what_is_read(monkeypatch):
    monkeypatch.setattr(Block, "forward", with_sum)
    assert not tfl.fuse_(Block()).fused
    monkeypatch.undo()
    assert tfl.fuse_(Block()).fused


# --- an nn.Sequential and its owner -------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))


class Whole(Chain):
    def forward(self, x):
        nn.init.zeros_(self.net[-1].bias)
        assert all(p.requires_grad for p in self.net.parameters())
        return self.net(x)


class Parts(Chain):
    def forward(self, x):
        return self.net[2](self.net[0](x))


class Layers(Chain):
    def forward(self, x):
        seen = []
        for layer in self.net:
            x = layer(x)
            seen.append(x)
        return sum(s.sum() for s in seen)


def test_a_sequential_that_its_owner_takes_apart():
    for cls in (Whole, Parts, Layers):
        model = cls()
        plain, x = copy.deepcopy(model), torch.randn(3, 4)
        assert len(tfl.fuse_(model).fused) == 1
        torch.testing.assert_close(model(x), plain(x))
