"""fuse_script_: the operators in scripted and traced modules, and what is left alone there."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from fused_models import results
from torch import nn
from tree_parts import tanh_gelu

import torch_fused_linear as tfl

X = torch.randn(5, 6)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (nn.Linear(6, 6) for _ in "abc")
        self.act, self.drop = nn.GELU("tanh"), nn.Dropout(0.3)


class Plain(Part):
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Cast(Part):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.relu(self.fc1(x))
        return h


def operators(scripted):
    return re.findall(r"fused::(\w+)\(", str(scripted.inlined_graph))


class InputWritten(Part):
    def forward(self, x):
        h = F.silu(self.fc1(x)) * self.fc2(x)
        x.mul_(2)
        return self.fc3(h)


class WeightWritten(Part):
    def forward(self, x):
        h = F.silu(self.fc1(x)) * self.fc2(x)
        self.fc2.weight.mul_(2)
        return self.fc3(h)


@torch.no_grad()
@pytest.mark.parametrize("form", [InputWritten, WeightWritten], ids=lambda form: form.__name__)
def test_a_write_behind_a_product_stays_behind_it(form):
    plain = form()
    scripted = torch.jit.script(copy.deepcopy(plain))
    assert tfl.fuse_script_(scripted).fused
    torch.testing.assert_close(scripted(X.clone()), plain(X.clone()))


def test_calls_in_a_block_of_autocast_are_left_alone():
    plain = Cast()
    scripted = torch.jit.script(plain)
    (skipped,) = tfl.fuse_script_(scripted).skipped
    assert not operators(scripted) and skipped.path == "fc1" and skipped.place
    for _ in range(3):
        torch.testing.assert_close(results(scripted, [X]), results(plain, [X]))


class Exchanged(Part):
    def forward(self, x):
        self.fc1, self.fc2 = self.fc2, self.fc1
        y = self.fc3(self.act(self.fc1(x)))
        self.fc3 = self.fc2
        return y


@pytest.mark.parametrize("memory", ["default", "low"])
@pytest.mark.parametrize("number", [1, 3])
def test_layers_that_are_exchanged_in_a_fused_model(number, memory):
    """A script gives each attribute one type: a marked layer has that of an unmarked one."""
    plain = Exchanged()
    model = copy.deepcopy(plain)
    tfl.fuse_(model, lambda name, layer: name in ("fc1", "fc2", "fc3")[:number], memory=memory)
    for each in (model, plain):
        each.fc1, each.fc3 = each.fc3, each.fc1
    scripted, wanted = torch.jit.script(model), torch.jit.script(plain)
    for _ in range(3):
        torch.testing.assert_close(results(scripted, [X]), results(wanted, [X]))
    assert tfl.fuse_script_(scripted).fused
    for _ in range(3):
        torch.testing.assert_close(scripted(X), wanted(X))


def test_tied_parameters_stay_tied():
    plain = Plain()
    plain.fc2 = plain.fc1
    scripted = torch.jit.script(plain)
    tfl.fuse_script_(scripted)
    assert scripted.fc1.weight is scripted.fc2.weight is plain.fc1.weight


def test_traced_frozen_and_loaded_modules():
    plain = Plain().eval()
    for module in (torch.jit.trace(plain, X), torch.jit.freeze(torch.jit.script(plain))):
        assert len(tfl.fuse_script_(module).fused) == 1
        torch.testing.assert_close(module(X), plain(X))


def test_every_method_is_fused():
    class Two(Part):
        def forward(self, x):
            return self.act(self.fc1(x))

        @torch.jit.export
        def encode(self, x):
            return F.relu(self.fc2(x))

    plain = Two()
    scripted = torch.jit.script(plain)
    assert len(tfl.fuse_script_(scripted).fused) == 2
    torch.testing.assert_close(scripted.encode(X), plain.encode(X))


def test_autocast_around_the_call():
    """One of two modules of a class changes, and the other stays as it is."""
    scripted, plain = torch.jit.script(Plain()), torch.jit.script(Plain())
    scripted.load_state_dict(plain.state_dict())
    tfl.fuse_script_(scripted)
    assert operators(scripted) and not operators(plain)
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, theirs = scripted(X), plain(X)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_anything_else_is_refused():
    words = "fuse_script_: expected a scripted or traced module, got"
    for other in (nn.Linear(2, 2), 3, torch.jit.script(tanh_gelu)):
        with pytest.raises(TypeError, match=words):
            tfl.fuse_script_(other)
