"""fuse_ reads code: what shows that only the activation sees what a layer returns."""

import functools

import pytest
import torch
from fused_models import assert_fuses
from helpers import one_thread  # noqa: F401
from torch import nn
from torch.nn import functional as F

import torch_fused_linear as tfl

X = [torch.randn(4, 6)]


class Base(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.fc1 = nn.Linear(6, 7)
        self.act = nn.GELU()
        self.drop = nn.Dropout(p)
        self.fc2 = nn.Linear(7, 6)
        self.p = p
        nn.init.xavier_uniform_(self.fc1.weight)


class Nested(Base):
    def forward(self, x):
        return x + self.fc2(self.drop(self.act(self.fc1(x))))


class Statements(Base):
    def forward(self, x: torch.Tensor, unused=None) -> torch.Tensor:
        """With a docstring."""
        residual = x
        h: torch.Tensor = self.fc1(x)
        h = self.act(h)
        h = nn.functional.dropout(h, p=self.p, training=self.training)
        h = self.fc2(h)
        return h + residual


class Branches(Base):
    def forward(self, x):
        for _ in range(2):
            if x.dim() == 2:
                with torch.autograd.profiler.record_function("block"):
                    y = self.fc2(self.act(self.fc1(x)))
                try:
                    x = x + y
                except TypeError:
                    raise
            else:
                return x
        return x


class Handler(Base):
    def forward(self, x):
        try:
            raise TypeError
        except TypeError:
            return self.fc2(self.act(self.fc1(x)))


class Match(Base):
    def forward(self, x):
        match x.dim():
            case 2:
                return self.fc2(self.act(self.fc1(x)))


class NextLayerUnderAnotherName(Base):
    def forward(self, x):
        h = self.act(self.fc1(x))
        y = self.fc2(h)
        return y


class Helper(Base):
    def forward(self, x):
        return self.feed(x)

    def feed(self, x):
        x = self.fc1(x)
        x = self.act(x)
        return self.fc2(x)


class Child(Nested):
    """Inherits the forward that is read."""


class Extended(Nested):
    def forward(self, x):
        return super().forward(x) * 2


def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


class Decorated(Base):
    @logged
    def forward(self, x):
        x = self.fc1(x)
        return self.fc2(self.act(x))


READABLE = [
    Nested,
    Statements,
    NextLayerUnderAnotherName,
    Branches,
    Handler,
    Match,
    Helper,
    Child,
    Extended,
    Decorated,
]


@pytest.mark.parametrize("cls", READABLE)
def test_read(cls):
    assert_fuses(cls, X, 1, 2 if cls is Branches else 1)


def test_a_dropout_function_is_seen():
    (block,) = tfl.fuse_(Statements(0.5)).fused
    assert block.after == ("linear_gelu (erf)", "Dropout", "linear")
    assert_fuses(lambda: Statements(0.5), X, 1, 1)


# --- what proves nothing ------------------------------------------------------------------------


class OutputIsUsed(Base):
    def forward(self, x):
        h = self.fc1(x)
        return self.fc2(self.act(h)) + h.sum()


class OutputIsReturned(Base):
    def forward(self, x):
        h = self.fc1(x)
        y = self.act(h)
        return self.fc2(y), h


class AnotherValue(Base):
    def forward(self, x):
        y = x[:, :1] * torch.ones(7)
        h = self.fc1(x)
        h = self.act(y)
        return self.fc2(h)


class SomethingBetween(Base):
    def forward(self, x):
        h = self.fc1(x)
        h = h * 2
        h = self.act(h)
        return self.fc2(h)


class BranchBetween(Base):
    def forward(self, x):
        h = self.fc1(x)
        if x.sum() > 0:
            h = self.act(h)
        return self.fc2(h)


class Twice(Base):
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)) + self.fc1(x))


class InAnotherMethod(Nested):
    def features(self, x):
        return self.fc1(x)


class HandedOn(Nested):
    def features(self, x):
        return torch.utils.checkpoint.checkpoint(self.fc1, x, use_reentrant=False)


class CalledByForward(Nested):
    def features(self, x):
        return self.fc1.forward(x)


class ActivationElsewhere(Base):
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x))) + self.act(x)


class MoreArguments(Base):
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x, **{})))


class HiddenByADecorator(Base):
    def hide(function):
        def hidden(*args):
            return function(*args)

        return hidden

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))

    @hide
    def features(self, x):
        return self.fc1(x)


class Overridden(Nested):
    """The parent's forward would do, but it does not run."""

    def forward(self, x):
        return self.fc2(self.fc1(x))


class PartlyUnreadable(Nested):
    exec("def features(self, x): return self.fc1(x)")


exec("class Unreadable(Base):\n    def forward(self, x): return self.fc2(self.act(self.fc1(x)))")

ANYWHERE = [
    Twice,
    InAnotherMethod,
    HandedOn,
    CalledByForward,
    ActivationElsewhere,
    HiddenByADecorator,
    PartlyUnreadable,
]


@pytest.mark.parametrize("cls", ANYWHERE)
def test_what_else_is_done_with_the_layers_is_no_matter(cls):
    model = assert_fuses(cls, X, 1, 0 if cls is Twice else 1)
    if hasattr(model, "features"):
        x = torch.randn(3, 6, dtype=torch.float64)
        torch.testing.assert_close(model.features(x), F.linear(x, model.fc1.weight, model.fc1.bias))


SEEN = "what it returns is read elsewhere too"
UNPROVED = {
    OutputIsUsed: "does not show",
    OutputIsReturned: SEEN,
    AnotherValue: "does not show",
    SomethingBetween: "does not show",
    BranchBetween: "does not show",
    MoreArguments: "does not show",
    Overridden: "does not show",
    Unreadable: "there is no source of Unreadable.forward",  # noqa: F821
}


@pytest.mark.parametrize("cls", UNPROVED)
def test_left_alone(cls):
    model = cls()
    text = repr(model)
    report = tfl.fuse_(model)
    assert not report.fused and repr(model) == text
    assert len(report.skipped) == 1 and UNPROVED[cls] in report.skipped[0].reason, report


def test_a_layer_that_another_module_calls():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Nested()

        def forward(self, x):
            return self.block(x) + self.block.fc1(x).sum()

    assert_fuses(Outer, X, 1, 1)
