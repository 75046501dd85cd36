"""Programs in which fuse_ has to keep what plain torch does: each is run beside an unfused copy."""

import copy
import dataclasses
import functools

import pytest
import torch
from fused_models import results
from helpers import one_thread  # noqa: F401
from stacks import assert_same
from torch import nn

import torch_fused_linear as tfl

X = [torch.randn(4, 6, dtype=torch.float64)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)
        self.asked = 0

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class ConditionOfWhatTheArgumentTakes(Block):
    def forward(self, x):
        xs, out = [x, x + 1], []
        while xs:
            h = self.fc1(xs.pop())
            if xs:
                h = self.act(h)
            out.append(h)
        return out[0] - out[1]


class ConditionThatTheArgumentChanges(Block):
    def change(self, x):
        self.asked = 1
        return x * 2

    def forward(self, x):
        self.asked = 0
        h = self.fc1(self.change(x))
        if self.asked:
            h = self.act(h)
        return h


class Stateful:
    def __init__(self):
        self.times = 0

    def __bool__(self):
        self.times += 1
        return self.times % 2 == 1


class ConditionThatCounts(Block):
    def __init__(self):
        super().__init__()
        self.flag = Stateful()

    def forward(self, x):
        for _ in range(3):
            h = self.fc1(x)
            if self.flag:
                h = self.act(h)
            x = h + 1
        return x


class ConditionWithElse(Block):
    def forward(self, x):
        for i in range(3):
            h = self.fc1(x)
            n = i % 2
            if n == 0:
                h = self.act(h)
            else:
                h = h - 3
                x = x + 1
            x = h + x
        return x


class InString(Block):
    def forward(self, x):
        shape = f"{tuple(self.act(self.fc1(x)).shape)!r:>{len('12345')}}"
        return self.act(self.fc1(x)) * len(shape)


class Table(Block, dict):
    __hash__ = object.__hash__


def counted(function):
    @functools.wraps(function)
    def wrapper(*args):
        wrapper.calls += 1
        return function(*args)

    wrapper.calls = 0
    return wrapper


class Counted(Block):
    forward = counted(Block.forward)


class Reversed(nn.Sequential):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class ReversedByForward(Reversed):
    def forward(self, x):
        return super().forward(x)


def layers():
    return nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)


PROGRAMS = {  # how many blocks are fused
    ConditionOfWhatTheArgumentTakes: 1,
    ConditionThatTheArgumentChanges: 1,
    ConditionThatCounts: 1,
    ConditionWithElse: 1,
    InString: 2,
    Table: 1,
    Counted: 1,
    lambda: Reversed(*layers()): 0,
    lambda: ReversedByForward(*layers()): 0,
}


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_a_program_gives_what_it_gave(make):
    model = make().double()
    plain = copy.deepcopy(model)
    assert len(tfl.fuse_(model).fused) == PROGRAMS[make]
    for _ in range(2):
        assert_same(results(model, X), results(plain, X))
    for flag in (vars(m)["flag"] for m in (model, plain) if "flag" in vars(m)):
        assert flag.times % 3 == 0  # asked once each time


def test_a_condition_that_raises_is_seen_as_it_was():
    model = ConditionThatCounts().double()
    tfl.fuse_(model)
    model.flag = torch.ones(2)
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value"):
        model(*X)


def test_attributes_of_a_decorated_method_count():
    model = Counted().double()
    tfl.fuse_(model)
    before = Counted.forward.calls
    model(*X)
    assert type(model).forward.calls == Counted.forward.calls == before + 1


def test_modules_that_cannot_be_hashed_are_left_alone():
    @dataclasses.dataclass
    class Unhashable(nn.Module):
        size: int

        def __post_init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(6, 6), nn.ReLU()

        def forward(self, x):
            return self.act(self.fc(x))

    holder = nn.Sequential(Unhashable(6), *layers())  # in which torch's own double() raises
    report = tfl.fuse_(holder)
    assert ("0", "Unhashable cannot be hashed") in [(s.path, s.reason) for s in report.skipped]
    assert len(report.fused) == 1
    assert tfl.is_fused(holder) and not tfl.is_fused(holder[0])
    tfl.unfuse_(holder)
    assert not tfl.is_fused(holder)


@pytest.mark.parametrize("cls", [nn.Dropout, nn.Identity])
def test_a_dropout_that_is_exchanged_for_all_is_seen(cls, monkeypatch):
    model = nn.Sequential(nn.Linear(6, 6), cls(), nn.ReLU(), nn.Linear(6, 6)).double()
    plain = copy.deepcopy(model)
    tfl.fuse_(model)
    monkeypatch.setattr(cls, "forward", lambda self, x: x - 0.25)
    assert_same(results(model, X), results(plain, X))


def test_eager_quantisation_of_fused_pairs():
    from torch.ao import quantization

    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.quant, self.fc, self.act = quantization.QuantStub(), nn.Linear(6, 6), nn.ReLU()
            self.dequant = quantization.DeQuantStub()

        def forward(self, x):
            return self.dequant(self.act(self.fc(self.quant(x))))

    model = Quantised().eval()
    model = quantization.fuse_modules(model, [["fc", "act"]])
    model.qconfig = quantization.get_default_qconfig("qnnpack")
    plain, x = copy.deepcopy(model), torch.randn(4, 6)
    tfl.fuse_(model)
    for net in (model, plain):
        quantization.prepare(net, inplace=True)
        net(x)
        quantization.convert(net, inplace=True)
    assert type(model.fc) is type(plain.fc)


def test_autocast_blocks_hold_in_torchscript():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(6, 6), nn.ReLU()

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.act(self.fc(x))
            return h

    model = Cast()
    tfl.fuse_(model)
    assert torch.jit.script(model)(torch.randn(4, 6)).dtype == torch.bfloat16


def test_what_is_fused_is_said():
    model = nn.Sequential(Block(), nn.Linear(6, 6))
    assert not tfl.is_fused(model)
    tfl.fuse_(model)
    assert tfl.is_fused(model) and tfl.is_fused(model[0]) and not tfl.is_fused(model[1])
    assert tfl.is_fused(copy.deepcopy(model))
    with pytest.raises(TypeError, match=r"is_fused: expected an nn\.Module, got int"):
        tfl.is_fused(3)
