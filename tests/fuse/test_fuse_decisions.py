"""The decisions of a fused call: one table for the code in C and that in Python."""

import functools
import operator
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from fused_models import decides  # noqa: F401
from helpers import setting
from subclasses import Plain
from torch import nn
from torch.nn.utils import parametrizations
from tree_parts import LoudReLU

import torch_fused_linear as tfl
from torch_fused_linear.activations import SquaredReLU
from torch_fused_linear.fuse import in_code, plain, run

pytestmark = pytest.mark.usefixtures("decides")
X = torch.randn(3, 4)
EMPTY = X[:0]


class Conv1D(nn.Module):
    """As transformers has it, with the weight the other way round."""

    __module__, __qualname__ = "transformers.pytorch_utils", "Conv1D"

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x @ self.weight + self.bias


# Made in its module, as far as anybody can tell.
Conv1D.forward = FunctionType(Conv1D.forward.__code__, {"__name__": Conv1D.__module__})


def layer(change=None, *, mark="default", make=lambda: nn.Linear(4, 4)):
    found = make()
    plain.learn(found)
    if mark is not None:
        setattr(found, plain.MARK, {**plain.MARKS[mark]})
    if change is not None:
        change(found)
    return found


def of(cls, *args, **options):
    return layer(make=lambda: cls(*args, **options))


def buffer(linear):
    del linear.bias
    linear.register_buffer("bias", torch.zeros(4))


def of_class(linear):
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Plain))


def without_forward(module):
    module.forward = lambda x: x + 1


def watched(kind):
    return lambda module: getattr(module, f"register_{kind}")(lambda *args: None)


hooked = watched("forward_hook")


def own_call(module):
    module._call_impl = module._call_impl


def hiding(name):
    """Puts onto the object what Python finds before the parameter or method."""
    return lambda module: vars(module).update({name: getattr(module, name)})


OtherConv2d = type("OtherConv2d", (nn.Conv2d,), {})
small = functools.partial(nn.Conv2d, 1, 2, 3)
ON_META = {"device": "meta", "dtype": torch.bfloat16}
IMAGE = torch.randn(1, 1, 6, 6)
# The layer, its input, whether the two run as one operator with ReLU, and why fuse_ refuses it.
LAYERS = {
    "plain": (layer(), X, True),
    "no bias": (of(nn.Linear, 4, 4, bias=False), X, True),
    "low memory": (layer(mark="low"), X, True),
    "one row": (layer(), X[0], True),
    "no rows": (layer(), EMPTY, True),
    "transposed": (layer(make=Conv1D), X, True),
    "convolution": (of(nn.Conv2d, 1, 2, 3), IMAGE, True),
    "convolution of groups": (of(nn.Conv2d, 2, 2, 3, groups=2), torch.randn(1, 2, 6, 6), True),
    "padded later": (layer(lambda m: setattr(m, "padding", 1), make=small), IMAGE, True),
    "frozen": (layer(lambda m: m.requires_grad_(False)), X, True),
    "no mark": (layer(mark=None), X, False),
    "hook": (layer(hooked), X, False, "has forward hooks"),
    "pre hook": (layer(watched("forward_pre_hook")), X, False, "forward pre"),
    "backward hook": (layer(watched("full_backward_hook")), X, False, "has backward hooks"),
    "backward pre hook": (layer(watched("full_backward_pre_hook")), X, False, "backward pre"),
    "own forward": (layer(without_forward), X, False, "forward of its own"),
    "own call": (layer(own_call), X, False, "call_impl of its own"),
    "hidden weight": (layer(hiding("weight")), X, False, "a weight of its own, set on"),
    "hidden bias": (layer(hiding("bias")), X, False, "a bias of its own"),
    "own product": (
        layer(hiding("_conv_forward"), make=small),
        IMAGE,
        False,
        "a conv_forward of its own",
    ),
    "compiled": (layer(lambda m: m.compile(backend="eager")), X, False, "was compiled"),
    "parametrised": (layer(parametrizations.weight_norm), X, False, "has a parametrisation"),
    "bias as a buffer": (layer(buffer), X, False),
    "no weight": (layer(lambda m: m._parameters.update(weight=None)), X, False, "NoneType, not"),
    "weight of a class": (layer(of_class), X, False, "Plain, not a plain nn.Parameter"),
    "child of nn.Linear": (of(tfl.FusedLinear, 4, 4), X, False, "exactly nn.Linear"),
    "child of nn.Conv2d": (of(OtherConv2d, 1, 2, 3), IMAGE, False, "exactly nn.Conv2d"),
    "no layer": (layer(make=nn.Tanh), X, False, "Tanh is not exactly nn.Linear"),
    "width": (layer(), torch.randn(3, 5), False),
    "scalar": (layer(), torch.tensor(1.0), False),
    "other type": (layer(), X.double(), False),
    "whole numbers": (layer(), torch.ones(3, 4, dtype=torch.long), False),
    "other device": (layer(), X.to("meta"), False),
    "other type on meta": (of(nn.Linear, 4, 4, **ON_META), X.to("meta"), False),
    "sparse": (layer(), X.to_sparse(), True),
    "of a class": (layer(), X.as_subclass(Plain), False),
    "a tuple": (layer(), (X, X), False),
    "a number": (layer(), 3, False),
    "channels": (of(nn.Conv2d, 1, 2, 3), torch.randn(1, 2, 6, 6), False),
}
# The activation, and which it is.
ACTIVATIONS = {
    "ReLU": (nn.ReLU(), "linear_relu"),
    "in place": (nn.ReLU(inplace=True), "linear_relu"),
    "GELU": (nn.GELU(), "linear_gelu"),
    "GELU, tanh": (nn.GELU("tanh"), "linear_gelu"),
    "SiLU": (nn.SiLU(), "linear_silu"),
    "ReLU²": (SquaredReLU(), "linear_relu2"),
    "F.relu": (F.relu, "linear_relu"),
    "torch.relu": (torch.relu, "linear_relu"),
    "torch.relu_": (torch.relu_, "linear_relu"),
    "F.gelu": (F.gelu, "linear_gelu"),
    "F.silu": (F.silu, "linear_silu"),
    "method": (plain.METHODS["relu"], "linear_relu"),
    "partial": (functools.partial(F.gelu, approximate="tanh"), "linear_gelu"),
    "lambda": (lambda x: F.silu(x), "linear_silu"),
    "child of nn.ReLU": (LoudReLU(), "linear"),
    "child of ReLU²": (type("Child", (SquaredReLU,), {})(), "linear"),
    "hooked": (layer(hooked, make=nn.ReLU, mark=None), "linear"),
    "own forward": (layer(without_forward, make=nn.ReLU, mark=None), "linear"),
    "another": (nn.Tanh(), "linear"),
    "F.mish": (F.mish, "linear"),
    "partial of two": (functools.partial(F.relu, X), None),
    "unknown form": (
        layer(lambda m: setattr(m, "approximate", "?"), make=nn.GELU, mark=None),
        None,
    ),
}


def outcome(function):
    """The result, or the error that it raises."""
    try:
        return function()
    except Exception as error:
        return type(error), str(error)


def assert_alike(got, want):
    if isinstance(want, torch.Tensor) and want.device.type == "cpu":
        torch.testing.assert_close(got, want)
    else:
        assert type(got) is type(want) and (not isinstance(got, tuple) or got == want)


@pytest.mark.parametrize("name", LAYERS)
def test_which_layers_run_as_operators(name):
    module, x, is_fused, *reason = LAYERS[name]
    objection = plain.layer_objection(module)
    assert reason[0] in objection if reason else objection is None
    want = outcome(lambda: F.relu(type(module).forward(module, x) if is_fused else module(x)))
    with tfl.explain() as calls:
        got = outcome(lambda: in_code.run(x, module, F.relu))
    assert (got is not None) is is_fused
    assert ("relu" in str([call.operator for call in calls.calls])) is is_fused
    assert_alike(outcome(lambda: in_code.nested(F.relu, module, x)), want)
    if is_fused:
        assert_alike(got, want)
    alone = outcome(lambda: type(module).forward(module, x) if is_fused else module(x))
    assert_alike(outcome(lambda: in_code.nested(nn.Identity(), module, x)), alone)


def lone(module):
    """Marked to run alone, and not in runs."""
    plain.mark(module, "alone")
    return module


OTHERS = (nn.Conv2d, tfl.FusedLinear)  # the second is an operator by itself
LONE = {name: row for name, row in LAYERS.items() if not isinstance(row[0], OTHERS)}


@pytest.mark.parametrize("name", LONE)
def test_which_layers_run_alone(name, monkeypatch):
    module, x, is_fused, *_ = LONE[name]
    assert_alike(outcome(lambda: in_code.alone(module, x)), outcome(lambda: module(x)))
    if plain.MARK in vars(module):
        monkeypatch.setitem(vars(module), plain.MARK, {**plain.MARKS["alone"]})
    want = outcome(lambda: type(module).forward(module, x) if is_fused else module(x))
    for call in (in_code.alone, lambda *given: in_code.nested(nn.Identity(), *given)):
        with tfl.explain() as calls:
            assert_alike(outcome(functools.partial(call, module, x)), want)
        assert ("linear" in [call.operator for call in calls.calls]) is is_fused
    assert in_code.run(x, module, F.relu) is None


def test_a_layer_that_runs_alone_is_no_part_of_a_run():
    lonely, other, relu = lone(layer(mark=None)), layer(), nn.ReLU()
    want = other(F.relu(lonely(X)))
    assert in_code.run(X, lonely, relu, other) is None
    assert in_code.gated(X, F.silu, lonely, other) is None
    assert in_code.gated(X, F.silu, other, other, lonely) is None
    sequence = nn.Sequential(lonely, relu, other)
    assert in_code.leads(nn.Sequential(lonely))
    calls_of = (
        lambda: in_code.nested(other, relu, lonely, X),
        lambda: in_code.sequence(sequence, X),
    )
    for call in calls_of:
        with torch.no_grad(), tfl.explain() as calls:
            torch.testing.assert_close(call(), want)
        assert [call.operator for call in calls.calls] == ["linear", "linear"]


def test_a_layer_of_a_run_does_not_run_alone_unless_marked():
    for module, names in ((layer(), []), (layer(mark="low"), []), (lone(layer()), ["linear"])):
        with torch.no_grad(), tfl.explain() as calls:
            torch.testing.assert_close(in_code.alone(module, X), type(module).forward(module, X))
        assert [call.operator for call in calls.calls] == names
        assert in_code.run(X, module, F.relu) is not None


def test_marks_are_added_to_each_other():
    def marked(*options):
        module = layer(mark=None)
        for option in options:
            plain.mark(module, option)
        return {*vars(module)[plain.MARK]}, plain.RULES.memory_of(module)

    assert marked("default") == (set(), "default")
    assert marked("low", "default") == marked("default", "low") == ({"low"}, "low")
    assert marked("alone") == ({"alone"}, None)
    assert marked("alone", "default") == marked("default", "alone", "alone")
    assert marked("default", "alone") == ({"alone", "default"}, "default")
    assert marked("default", "alone", "low") == marked("low", "alone") == ({"alone", "low"}, "low")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_which_activation_it_is(name):
    act, operator = ACTIVATIONS[name]
    plain.learn(act)  # as fuse_ does
    linear = layer()
    want = outcome(lambda: act(linear(X)))
    with torch.no_grad(), tfl.explain() as calls:
        got = outcome(lambda: in_code.nested(act, linear, X))
    assert_alike(got, want)
    assert operator is None or [call.operator for call in calls.calls] == [operator]
    got = outcome(lambda: in_code.run(X, linear, act))
    assert got is None if operator in (None, "linear") else torch.is_tensor(got)


# Functions one after the other, and the operators that run; an error in None's place is torch's.
DROPS, KEEPS, HALF = nn.Dropout(0.5), nn.Dropout(0.5).eval(), functools.partial(F.dropout, p=0.0)
RELU, GELU, TANH = nn.ReLU(), nn.GELU(), nn.Tanh()
RUNS = {
    "block": ((layer(), RELU, layer()), ["mlp", "mlp"], "FusedMlpBackward"),
    "low": ((layer(mark="low"), GELU, layer()), ["mlp", "mlp"], "FusedMlpBackward"),
    "three": ((layer(), RELU, layer(), RELU, layer()), None, "FusedMlpBackward"),
    "passed": ((layer(), KEEPS, RELU, nn.Identity(), HALF, layer()), None, "FusedMlpBackward"),
    "transposed": ((layer(make=Conv1D), GELU, layer(make=Conv1D)), None, "FusedMlpBackward"),
    "two kinds": ((layer(), RELU, layer(), GELU, layer()), None, "FusedMlpBackward"),
    "ends in one": ((layer(), RELU, layer(), RELU), None, "FusedLinear_relu_Backward"),
    "two layers": ((layer(), layer()), None, "FusedLinear_none_Backward"),
    "dropout acts": ((layer(), RELU, DROPS, layer()), None, "FusedLinear_none_Backward"),
    "dropout before": ((layer(), DROPS, RELU, layer()), None, "FusedLinear_none_Backward"),
    "widths": ((layer(), RELU, of(nn.Linear, 5, 4)), False, None),
    "second hooked": ((layer(), RELU, layer(hooked)), False, None),
    "second unmarked": ((layer(), RELU, layer(mark=None)), False, None),
    "other type": ((layer(), RELU, of(nn.Linear, 4, 4, dtype=torch.float64)), False, None),
    "norm between": ((layer(), RELU, nn.LayerNorm(4), layer()), False, None),
    "drop before GELU": ((layer(), DROPS, GELU), False, None),
    "unknown": ((layer(), TANH), False, None),
    "nothing before": ((KEEPS, layer()), False, None),
}


@pytest.mark.parametrize("name", RUNS)
def test_which_operators_a_run_becomes(name):
    functions, operators, node = RUNS[name]

    def loop():
        h = X
        for function in functions:
            h = function(h)
        return h

    torch.manual_seed(0)
    want = outcome(loop)
    torch.manual_seed(0)
    got = outcome(lambda: in_code.run(X, *functions))
    assert (got is None) is (node is None)
    if got is not None:
        assert got.grad_fn.name() == node
        torch.testing.assert_close(got, want)
    torch.manual_seed(0)
    assert_alike(outcome(lambda: in_code.nested(*functions[::-1], X)), want)
    sequence = nn.Sequential(*(f for f in functions if isinstance(f, nn.Module)))
    if len(sequence) == len(functions):
        torch.manual_seed(0)
        assert_alike(outcome(lambda: in_code.sequence(sequence, X)), want)
        assert in_code.leads(sequence)
    if operators:
        with torch.no_grad(), tfl.explain() as calls:
            in_code.run(X, *functions)
        assert [call.operator for call in calls.calls] == operators


def test_a_module_that_exchanges_what_comes_after_it_is_seen():
    torch.manual_seed(0)  # so that Tanh has negative results, which ReLU has not
    sequence = nn.Sequential(layer(), nn.ReLU(), nn.LayerNorm(4), layer(), nn.ReLU())
    sequence[2].register_forward_hook(lambda *args: sequence.__setitem__(4, nn.Tanh()))
    assert in_code.sequence(sequence, X).min() < 0
    sequence[2].register_forward_hook(lambda *args: sequence.append(nn.Tanh()))
    with pytest.raises(RuntimeError, match="size"):
        in_code.sequence(sequence, X)


def test_a_sequence_that_iterates_in_another_way_is_torchs():
    class Reversed(nn.Sequential):
        def __iter__(self):
            return iter([*self._modules.values()][::-1])

    assert not in_code.leads(Reversed(layer(), nn.ReLU()))
    assert not in_code.leads(nn.Sequential(layer(mark=None), nn.ReLU()))


CONVOLUTIONS = {
    "strides": {"stride": 2, "padding": (1, 0), "dilation": (1, 2)},
    "same": {"padding": "same"},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "no bias": {"bias": False},
}
LATER = [("padding", n) for n in (1, True, (1,), (1, 1, 1), (1.0, 1.0), "SAME", torch.tensor(1))]
LATER += [(w, n) for w in ("stride", "dilation") for n in (2, (2,), (2, 1), (1, 1, 1), True, ())]
BETWEEN = {
    "identity": (nn.Identity(), ["conv2d_relu"]),
    "dropout": (nn.Dropout().eval(), ["conv2d_relu"]),
    "hooked": (layer(hooked, make=nn.Identity, mark=None), []),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_with_something_between(name, between):
    convolution = of(nn.Conv2d, 1, 2, 3, **CONVOLUTIONS[name])
    module, operators = BETWEEN[between]
    with torch.no_grad(), tfl.explain() as calls:
        got = in_code.nested(F.relu, module, convolution, IMAGE)
        torch.testing.assert_close(got, F.relu(convolution(IMAGE)))
    assert [call.operator for call in calls.calls] == operators


@pytest.mark.parametrize("name, value", LATER, ids=str)
@pytest.mark.parametrize("padding", ["same", 1])
def test_attributes_set_on_a_convolution_later_work_as_in_torch(name, value, padding):
    convolution = of(nn.Conv2d, 1, 2, 3, padding=padding)
    setattr(convolution, name, value)
    want = outcome(lambda: F.relu(convolution(IMAGE)))
    assert_alike(outcome(lambda: in_code.nested(F.relu, convolution, IMAGE)), want)


# Functions that square ReLU's result, with the exponent if they take one, and the operator.
SQUARES = {
    "method": (plain.METHODS["square"], (), "linear_relu2"),
    "torch.square": (torch.square, (), "linear_relu2"),
    "** 2": (operator.pow, (2,), "linear_relu2"),
    "pow(2)": (plain.method_pow, (2,), "linear_relu2"),
    "torch.pow": (torch.pow, (2,), "linear_relu2"),
    "** 3": (operator.pow, (3,), "linear_relu"),
    "** 2.0": (operator.pow, (2.0,), "linear_relu"),
    "by a tensor": (torch.pow, (torch.tensor(2),), "linear_relu"),
    "no square": (torch.exp, (), "linear_relu"),
    "a module": (nn.Tanh(), (), "linear_relu"),
}


@pytest.mark.parametrize("name", SQUARES)
def test_squares_of_relu(name):
    square, more, name_of_operator = SQUARES[name]
    linear = layer()
    want = square(F.relu(linear(X)), *more)

    def fused(act=F.relu):
        given = functools.partial(plain.applied, square, more, {}) if more else square
        return in_code.nested(given, act, linear, X)

    with torch.no_grad(), tfl.explain() as calls:
        torch.testing.assert_close(fused(), want)
        torch.testing.assert_close(fused(F.silu), square(F.silu(linear(X)), *more))
    assert [call.operator for call in calls.calls] == [name_of_operator, "linear_silu"]


@pytest.mark.parametrize("act", [SquaredReLU(), F.relu], ids=["module", "written out"])
def test_squares_stay_wide_under_the_autocast_of_a_gpu(act):
    """There torch squares in fp32; the switch alone needs no GPU."""
    linear, more = layer(), [] if isinstance(act, nn.Module) else [torch.square]
    switch = functools.partial(torch.set_autocast_enabled, "cuda")
    with setting(switch, True, False), torch.no_grad(), tfl.explain() as calls:
        in_code.nested(*more, act, linear, X)
    assert "linear_relu2" not in [call.operator for call in calls.calls]


# Gate, up and the layer after them; the operators that run with it are one, or none of ours.
GLU = "FusedGatedMlp_silu_Backward"
GATES = {
    "plain": (layer(), layer(), layer(), GLU),
    "no bias": (of(nn.Linear, 4, 4, bias=False), layer(), layer(), GLU),
    "transposed": (layer(make=Conv1D), layer(make=Conv1D), layer(make=Conv1D), GLU),
    "low": (layer(mark="low"), layer(mark="low"), layer(mark="low"), GLU),
    "up hooked": (layer(), layer(hooked), layer(), None),
    "gate hooked": (layer(hooked), layer(), layer(), None),
    "down hooked": (layer(), layer(), layer(hooked), None),
    "up unmarked": (layer(), layer(mark=None), layer(), None),
    "widths": (layer(), of(nn.Linear, 4, 1), layer(), None),
    "down's width": (layer(), layer(), of(nn.Linear, 5, 4), None),
    "a convolution": (of(nn.Conv2d, 1, 2, 3), layer(), layer(), None),
}


@pytest.mark.parametrize("drop", [nn.Identity(), nn.Dropout(0.5)], ids=["identity", "dropout"])
@pytest.mark.parametrize("name", GATES)
def test_gates(name, drop):
    gate, up, down, node = GATES[name]
    torch.manual_seed(0)
    want = outcome(lambda: down(drop(F.silu(gate(X)) * up(X))))
    torch.manual_seed(0)
    got = in_code.gated(X, F.silu, gate, up, drop, down)
    assert (got is None) is (node is None)
    if node is not None:
        torch.testing.assert_close(got, want)
        acts = isinstance(drop, nn.Dropout)
        assert got.grad_fn.name() == ("FusedLinear_none_Backward" if acts else node)
        alone = in_code.gated(X, nn.SiLU(), gate, up)
        torch.testing.assert_close(alone, F.silu(gate(X)) * up(X))
    assert in_code.gated(X, nn.Tanh(), gate, up, down) is None
    assert in_code.gated(X, F.silu, gate, up, nn.Tanh()) is None


def chunk(function, *more, **named):
    return functools.partial(plain.applied, function, more, named)


# How a layer's result is halved.
CHUNKS = {
    "method": (chunk(run.method_chunk, 2, -1), True),
    "by name": (chunk(torch.chunk, 2, dim=1), True),
    "another dimension": (chunk(torch.chunk, 2), False),
    "three": (chunk(torch.chunk, 3, -1), False),
    "another function": (chunk(torch.split, 2, -1), False),
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", CHUNKS)
def test_halves(name, number):
    both, down = of(nn.Linear, 4, 8), layer()
    made, is_fused = CHUNKS[name]
    got = in_code.halves(X, F.silu, both, number, made, down)
    assert (got is not None) is is_fused
    if is_fused:
        halves = both(X).chunk(2, -1)
        torch.testing.assert_close(got, down(F.silu(halves[number]) * halves[1 - number]))
        assert got.grad_fn.name() == GLU
    assert in_code.halves(X, nn.SiLU(inplace=True), both, number, made, down) is None
    assert in_code.halves(X, F.silu, layer(mark=None), number, made, down) is None
