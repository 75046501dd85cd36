"""The same calls written with more brackets and commas, and names that the helpers have too."""
# ruff: noqa: UP034

import copy

import pytest
import torch
import torch.nn.functional as F
from fused_models import results
from helpers import one_thread  # noqa: F401
from stacks import assert_same
from torch import nn

import torch_fused_linear as tfl


def fused_linear(x, weight, bias):
    return F.linear(x, weight, bias) + 100


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))


class Global(Base):
    def forward(self, x):
        return fused_linear(F.relu(self.fc1(x)), self.fc2.weight, self.fc2.bias)


class Local(Base):
    def forward(self, x):
        fused_call = self.fc2(x)
        return F.relu(self.fc1(x)) + fused_call


class Inner(Base):
    def forward(self, x):
        def fused_act(add, y):
            return y + add

        h = self.fc1(x)
        h = F.relu(h)
        return fused_act(1, h)


def closure():
    fused_begin = 2.0

    class Closure(Base):
        def forward(self, x):
            h = self.fc1(x)
            h = F.relu(h)
            return h * fused_begin

    return Closure


# fmt: off
class Brackets(Base):
    def forward(self, x):
        h = F.relu((self.fc1(x)))
        return (F.relu((
            self.fc2((h))  # of the second )
        )) + F.relu(((self.fc1(x)  # )
        ))))


class Commas(Base):
    def forward(self, x):
        h = F.relu(self.fc1(x,),)
        return F.relu(self.fc2(h), )


class Method(Base):
    def forward(self, x):
        return (self.fc1(x).relu)() + self.fc2(x).relu( )


class Gate(Base):
    def forward(self, x):
        return (F.silu((self.fc1(x,)),)) * ((self.fc2((x),)))
# fmt: on


class Owner(Base):
    def forward(this, x):
        for layer in this.layers:
            x = F.relu(layer(x))
        return x


class AllLocals(Base):
    def forward(self, x):
        h = F.relu(self.fc1(x))
        return h * len(locals())


class NoLocals(Base):
    def forward(self, x):
        h = F.relu(self.fc1(x))
        return h * len(vars(self)["_modules"])


class Asked(Base):
    """A condition that answers otherwise each time, and is asked once."""

    count = 0

    @property
    def is_on(self):
        self.count += 1
        return self.count % 2 == 1

    def forward(self, x):
        h = self.fc1(x)
        if self.is_on:
            h = F.relu(h)
        return self.fc2(h)


class Counted(Base):
    """A condition that what the layer is given changes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        h = self.fc1(self.norm(x))
        if self.norm.num_batches_tracked < 2:
            h = F.relu(h)
        return self.fc2(h)


LEFT_ALONE = (AllLocals,)
WRITTEN = [Asked, Global, Local, Inner, closure(), Brackets, Commas, Method, Gate, Owner, NoLocals]


def compared(form, **options):
    torch.manual_seed(0)
    plain = form().double()
    model, x = copy.deepcopy(plain), torch.randn(4, 6, dtype=torch.float64)
    report = tfl.fuse_(model, **options)
    for _ in range(2):
        assert_same(results(model, [x]), results(plain, [x]))
    return report, model, plain, x


@pytest.mark.parametrize("form", [*WRITTEN, *LEFT_ALONE], ids=lambda form: form.__name__)
def test_however_it_is_written(form):
    report, *_ = compared(form)
    assert bool(report.fused) == (form not in LEFT_ALONE), report


@pytest.mark.parametrize(
    "form", [Global, Brackets, Commas, Method, Gate], ids=lambda form: form.__name__
)
def test_scripted(form):
    _, model, plain, x = compared(form)
    torch.testing.assert_close(torch.jit.script(model)(x), plain(x))


def test_a_layer_that_is_left_out_in_a_method_without_self():
    report, model, *_ = compared(Owner, filter_fn=lambda name, layer: name != "layers.1")
    assert len(report.fused) == 1
    with tfl.explain() as calls:
        model(torch.randn(4, 6, dtype=torch.float64))
    assert [call.operator for call in calls.calls].count("linear_relu") == 2


def test_whoever_takes_all_local_names_is_told():
    (skipped,) = compared(AllLocals)[0].skipped
    assert "AllLocals.forward takes all its local names together" in skipped.reason
