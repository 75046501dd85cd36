"""Which calls from Python go to the operators directly (csrc/python/direct.cpp)."""

import sys
import time
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_bits
from operators import ERRORS
from torch.overrides import TorchFunctionMode

import torch_fused_linear as tfl
from torch_fused_linear import _library, functional

direct = _library.direct
pytestmark = pytest.mark.skipif(
    isinstance(direct, _library._NotDirect), reason="built without Python's headers"
)

X, W, B = torch.randn(5, 6), torch.randn(4, 6), torch.randn(4)
IMAGE, KERNEL = torch.randn(2, 3, 8, 9), torch.randn(4, 3, 3, 3)
LAYERS = ([W, torch.randn(2, 4)], [B, None])

# function, its tensors, its other arguments, and the same call by torch.ops
CASES = {
    "linear": ((X, W, B), (), {}),
    "linear_relu": ((X, W, B), ("low",), {"memory": "low"}),
    "linear_gelu": ((X, W, B), ("none", "default"), {"approximate": "none"}),
    "linear_silu": ((X, W, B), ("low",), {"memory": "low"}),
    "linear_relu2": ((X, W, B), ("low",), {"memory": "low"}),
    "linear_glu": ((X, W, W + 1, B, None), ("relu", "default"), {"activation": "relu"}),
    "gated_mlp": ((X, W, W + 1, W.t(), None, B, None), ("silu", "low"), {"memory": "low"}),
    "mlp": ((X, *LAYERS), ("gelu_tanh", "default"), {}),
    "conv2d_relu": ((IMAGE, KERNEL, B), ([2, 1], [0, 1], [1, 1], 1), {}),
}
case_param = pytest.mark.parametrize("name", CASES)


def by_torch_ops(name, tensors):
    _, others, by_name = CASES[name]
    positional = others[:1] if name == "mlp" else others if name == "conv2d_relu" else ()
    return getattr(torch.ops.fused, name)(*tensors, *positional, **by_name)


def leaves(arguments):
    """The arguments with every tensor a leaf that wants its gradient, and those leaves."""
    if isinstance(arguments, torch.Tensor):
        leaf = arguments.clone().requires_grad_()
        return leaf, [leaf]
    if arguments is None:
        return None, []
    pairs = [leaves(a) for a in arguments]
    return type(arguments)(p[0] for p in pairs), [leaf for p in pairs for leaf in p[1]]


@case_param
def test_the_bits_of_torch_ops_forward_and_backward(name):
    tensors, others, _ = CASES[name]
    results = []
    for call in (lambda t: getattr(direct, name)(*t, *others), lambda t: by_torch_ops(name, t)):
        given, wanted = leaves(tensors)
        y = call(given)
        assert y.grad_fn is not None
        results.append([y, *torch.autograd.grad(y, wanted, torch.ones_like(y))])
    assert_bits(*results)


@case_param
def test_the_functional_form_goes_there(name, monkeypatch):
    calls = []

    class Counting:
        def __getattr__(self, called):
            calls.append(called)
            return getattr(direct, called)

    monkeypatch.setattr(functional, "direct", Counting())
    tensors, others, _ = CASES[name]
    getattr(tfl, name)(*tensors, *others)
    assert calls == [name]


@case_param
def test_without_it_torch_ops_does_the_same(name, monkeypatch):
    tensors, others, _ = CASES[name]
    want = getattr(tfl, name)(*tensors, *others)
    monkeypatch.setattr(functional, "direct", _library._NotDirect())
    assert_bits([getattr(tfl, name)(*tensors, *others)], [want])


class Subclass(torch.Tensor):
    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Mode(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@case_param
def test_a_mode_sees_the_operator(name):
    tensors, others, _ = CASES[name]
    want = getattr(tfl, name)(*tensors, *others)
    with Mode() as mode:
        assert getattr(direct, name)(*tensors, *others) is None
        got = getattr(tfl, name)(*tensors, *others)
    assert_bits([got], [want])
    assert getattr(torch.ops.fused, name) in mode.seen


def test_a_subclass_sees_torchs_own_functions():
    """It has never heard of the operators, and may override what it has heard of."""
    special = X.as_subclass(Subclass)
    assert direct.linear_relu(special, W, B, "default") is None
    Subclass.seen.clear()
    result = tfl.linear_relu(special, W, B)
    assert type(result) is Subclass and Subclass.seen == [F.linear, F.relu]


def test_parameters_and_missing_biases_are_plain():
    parameter = torch.nn.Parameter(W)
    assert_bits([direct.linear(X, parameter, None)], [F.linear(X, W)])


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (X, W),
        (X, W, B, "default", 1),
        (X.tolist(), W, B, "default"),
        (None, W, B, "default"),
        (X, W, 0.5, "default"),
        (X, W, B, None),
        (X, W, B, "café"),
    ],
)
def test_what_is_not_plain_is_left_to_torch_ops(arguments):
    assert direct.linear_relu(*arguments) is None


def test_lists_are_plain_when_all_in_them_is():
    weights, biases = LAYERS
    assert direct.mlp(X, tuple(weights), biases, "relu", "default") is None
    assert direct.mlp(X, [W, None], biases, "relu", "default") is None
    assert direct.mlp(X, weights, [B, 1], "relu", "default") is None
    sizes = [1, 1], [0, 0], [1, 1]
    for wrong in ([1.0, 1], [True, 1], [2**70, 1]):
        assert direct.conv2d_relu(IMAGE, KERNEL, B, wrong, *sizes[1:], 1) is None
    assert direct.conv2d_relu(IMAGE, KERNEL, B, *sizes, True) is None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("linear", (X, W.t(), B)),
        ("linear_relu", (X, W.half(), B)),
        ("linear_relu", (X, W, B, "much")),
        ("linear_relu", (X, "weight", B)),
        ("linear_gelu", (X, W, B[1:])),
        ("linear_gelu", (X, W, B, "erf")),
        ("mlp", (X, [W, W], [B, B])),
        ("mlp", (X, [], [])),
        ("conv2d_relu", (IMAGE, KERNEL, B, 0)),
    ],
)
def test_errors_are_those_of_torch_ops(name, arguments, monkeypatch):
    with pytest.raises(ERRORS) as found:
        getattr(tfl, name)(*arguments)
    monkeypatch.setattr(functional, "direct", _library._NotDirect())
    with pytest.raises(ERRORS) as wanted:
        getattr(tfl, name)(*arguments)
    assert (found.type, str(found.value)) == (wanted.type, str(wanted.value))
    assert name in str(found.value)


def test_no_reference_is_lost_or_kept():
    def call(memory):
        try:
            direct.linear_relu(X, W, B, memory)
        except ValueError:
            return
        assert memory == "default"

    held = [X, W, B, "default", "wrong"]
    before = [sys.getrefcount(o) for o in held]
    for _ in range(100):
        call("default")
        call("wrong")
    assert [sys.getrefcount(o) for o in held] == before


def test_it_takes_less_time_than_torch_ops():
    def seconds(call):
        start = time.thread_time()
        for _ in range(300):
            call()
        return time.thread_time() - start

    def ours():
        return tfl.linear_relu(X, W, B)

    def theirs():
        return torch.ops.fused.linear_relu(X, W, B)

    with torch.no_grad():
        pairs = [(seconds(ours), seconds(theirs)) for _ in range(40)]
    assert min(a for a, _ in pairs) < min(b for _, b in pairs)


def test_what_a_call_works_on_cannot_be_swapped_away():
    """Here by a hook on saved tensors, elsewhere by another thread."""
    x, w = torch.randn(3, 4), torch.randn(4, 4).requires_grad_()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    tfl.fuse_(model)
    for linear in (torch.nn.functional.linear, tfl.linear, lambda x, _: model(x)):
        refused = []

        def pack(saved):
            with pytest.raises(RuntimeError, match="use_count"):
                torch.utils.swap_tensors(x, torch.randn(3, 4))
            refused.append(saved)  # noqa: B023 (called within the turn)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            linear(x, w)
        assert refused
