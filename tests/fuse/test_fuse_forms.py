"""The ways in which people write a layer and its activation, and what of it becomes one call."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from fused_models import results
from helpers import one_thread  # noqa: F401
from stacks import assert_same
from torch import nn

import torch_fused_linear as tfl


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.depth, self.skips = 3, (1,)


class Function(Base):
    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class Torch(Base):
    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


class Method(Base):
    def forward(self, x):
        return self.fc2(self.fc1(x).relu()).relu_()


class Keywords(Base):
    def forward(self, x):
        x = F.gelu(input=self.fc1(input=x), approximate="tanh")
        return F.relu(self.fc2(x), inplace=True)


class Named(Base):
    form = "tanh"

    def forward(self, x):
        return F.gelu(self.fc1(x), approximate=self.form)


class Positional(Base):
    def forward(self, x):
        return F.relu(self.fc1(x), True)


class Statements(Base):
    def forward(self, x):
        h = self.fc1(x)
        shape, scale = x.shape, 2
        h = F.relu(h)
        return self.fc2(h) * scale + shape[0]


class OtherNames(Base):
    def forward(self, x):
        h = self.fc1(x)
        y = self.act(h)
        h = self.fc2(y)
        return h + y


class Loop(Base):
    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.fc2(x)


class Conditional(Base):
    """As in DETR and segment-anything."""

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < self.depth - 1 else layer(x)
        return x


class Guarded(Base):
    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i != len(self.layers) - 1:
                x = F.relu(x)
        return x


class Nerf(Base):
    def forward(self, x):
        h = x
        for i, _ in enumerate(self.layers):
            h = self.layers[i](h)
            h = F.relu(h)
            if i in self.skips:
                h = torch.cat([x[:, :3], h[:, :3]], -1)
        return h


class Alias(Base):
    def forward(self, x):
        fc, act = self.fc1, self.act
        return getattr(self, "fc2")(act(fc(x)))  # noqa: B009


class GivenOn(Base):
    def forward(self, x):
        return self.run(self.fc1, self.run(self.fc2, x))

    def run(self, layer, x):
        return F.relu(layer(x))


class DropoutBetween(Base):
    def forward(self, x):
        return F.relu(self.drop(self.fc1(x)))


class DropoutFunctionBetween(Base):
    def forward(self, x):
        h = self.fc1(x)
        h = F.dropout(h, 0.5, self.training, True)
        return F.relu(h)


class Comprehension(Base):
    def forward(self, x):
        return sum(F.relu(layer(x)) for layer in self.layers)


class Parent(Base):
    def forward(self, x):
        return self.act(self.fc1(x))


class Super(Parent):
    def forward(self, x):
        return F.relu(self.fc2(super().forward(x)))


class Grandchild(Super):
    def forward(self, x):
        return super().forward(x) * 2


class SequentialAndMore(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

    def forward(self, input):
        return F.relu(self[2](super().forward(input)))


RELU, ERF, TANH, ALONE = "linear_relu", "linear_gelu", "linear_gelu", "linear"
FORMS = {
    Function: [RELU, ALONE],
    Torch: [RELU, ALONE],
    Method: [RELU, RELU],
    Keywords: [TANH, RELU],
    Named: [TANH],
    Positional: [RELU],
    Statements: [RELU, ALONE],
    OtherNames: [ERF, ALONE],
    Loop: [RELU] * 3 + [ALONE],
    Conditional: [RELU, RELU, ALONE],
    Guarded: [RELU, RELU, ALONE],
    Nerf: [RELU] * 3,
    Alias: [ERF, ALONE],
    GivenOn: [RELU, RELU],
    DropoutBetween: [RELU],
    DropoutFunctionBetween: [RELU],
    Comprehension: [RELU] * 3,
    Parent: [ERF],
    Super: [ERF, RELU],
    Grandchild: [ERF, RELU],
    SequentialAndMore: [RELU, ALONE, RELU],
}


def made(form):
    torch.manual_seed(0)
    model = form().double()
    plain = copy.deepcopy(model)
    report = tfl.fuse_(model)
    assert report.fused and not report.skipped, report
    return model, plain, torch.randn(4, 6, dtype=torch.float64)


def operators(model, x):
    with torch.no_grad(), tfl.explain() as calls:
        model(x)
    return [call.operator for call in calls.calls]


@pytest.mark.parametrize("form", FORMS)
def test_in_eager_mode(form):
    model, plain, x = made(form)
    for training in (True, False):
        want = results(plain.train(training), [x])
        assert_same(results(model.train(training), [x]), want)
    assert operators(model, x) == FORMS[form]
    again = copy.deepcopy(model)
    assert operators(again, x) == FORMS[form]
    tfl.unfuse_(again)
    assert operators(again, x) == [] and type(again) is form


@pytest.mark.parametrize("form", FORMS)
def test_compiled_and_exported(form):
    model, plain, x = made(form)
    model.eval(), plain.eval()
    found = []

    def count(graph, inputs):
        found.append([str(n.target) for n in graph.graph.nodes if "fused." in str(n.target)])
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), plain(x))
    assert found == [[f"fused.{name}" for name in FORMS[form]]], "compiled once"
    torch._dynamo.reset()
    exported = torch.export.export(model, (x,))
    assert [str(n.target) for n in exported.graph.nodes if "fused." in str(n.target)] == [
        f"fused.{name}.default" for name in FORMS[form]
    ]
    torch.testing.assert_close(exported.module()(x), plain(x))


SCRIPTED = [f for f in FORMS if f not in (Nerf, GivenOn, Comprehension, Super, Grandchild)]


@pytest.mark.parametrize("form", SCRIPTED)
def test_scripted(form):
    model, plain, x = made(form)
    model.eval(), plain.eval()
    try:
        torch.jit.script(plain)
    except RuntimeError:
        pytest.skip("TorchScript cannot compile the plain one either")
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), plain(x))
    assert "fused::" not in str(scripted.inlined_graph), "it compiles the user's text"
    report = tfl.fuse_script_(scripted)
    torch.testing.assert_close(scripted(x), plain(x))
    text = str(scripted.inlined_graph)
    # two branches for layer and activation; a dropout in place draws other numbers
    if form not in (Conditional, Guarded, DropoutFunctionBetween):
        assert report.fused
        for name in set(FORMS[form]):
            assert text.count(f"fused::{name}(") == FORMS[form].count(name), text
    assert operators(model, x) == FORMS[form], "Python goes on deciding"
    model.fc2 = nn.Tanh() if hasattr(model, "fc2") else None
    plain.fc2 = nn.Tanh() if hasattr(plain, "fc2") else None
    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(torch.jit.script(model)(x), plain(x))


# --- activations that are attributes --------------------------------------------------------------


def plain_function(x):
    """With a docstring."""
    return torch.nn.functional.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "lambda": (lambda x: F.relu(x), RELU),
    "function": (plain_function, TANH),
    "partial": (functools.partial(F.gelu, approximate="tanh"), TANH),
    "torch.relu": (torch.relu, RELU),
    "more": (lambda x: F.relu(x) * 2, None),
    "closure": ((lambda f: lambda x: f(x))(F.relu), None),
    "partial of silu": (functools.partial(F.silu), "linear_silu"),
    "partial of mish": (functools.partial(F.mish), None),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions(name):
    act, operator = ACTIVATIONS[name]
    model = Parent().double()
    vars(model)["act"] = model._modules.pop("act") and act
    plain, x = copy.deepcopy(model), torch.randn(3, 6, dtype=torch.float64)
    assert len(tfl.fuse_(model).fused) == (operator is not None)
    torch.testing.assert_close(model(x), plain(x))
    assert operators(model, x) == [operator] * (operator is not None)


def test_what_a_function_calls_is_looked_up_each_time(monkeypatch):
    model, x = Parent(), torch.randn(3, 6)
    vars(model)["act"] = model._modules.pop("act") and (lambda x: changing(x))
    assert tfl.fuse_(model).fused and operators(model, x) == [RELU]
    monkeypatch.setitem(globals(), "changing", torch.tanh)
    torch.testing.assert_close(model(x), torch.tanh(model.fc1(x)))


changing = F.relu
