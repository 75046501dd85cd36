"""Which calls from Python go to the operators directly (csrc/python/direct.cpp)."""

import sys
import time
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_bits
from torch.overrides import TorchFunctionMode

import torch_fused_linear as tfl
from torch_fused_linear import functional
from torch_fused_linear._support import library

direct = library.direct
pytestmark = pytest.mark.skipif(
    isinstance(direct, library._NotDirect), reason="built without Python's headers"
)

X, W, B = torch.randn(5, 6), torch.randn(4, 6), torch.randn(4)
X16, W16 = torch.randn(3, 16), torch.randn(16, 16)
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
    "float8_linear": ((X16, W16, None), ("relu",), {"activation": "relu"}),
    "float8_mlp": ((X16, [W16], [None]), ("silu",), {"activation": "silu"}),
    "float8_gated_mlp": (
        (X16, W16, W16 + 1, W16, None, None, None),
        ("relu2",),
        {"activation": "relu2"},
    ),
    "conv2d_relu": ((IMAGE, KERNEL, B), ([2, 1], [0, 1], [1, 1], 1), {}),
}
case_param = pytest.mark.parametrize("name", CASES)


def called(name, where=tfl):
    tensors, others, by_name = CASES[name]
    positional = others[:1] if name == "mlp" else others if name == "conv2d_relu" else ()
    return getattr(where, name)(*tensors, *positional, **by_name)


@case_param
def test_the_functional_form_goes_there(name, monkeypatch):
    """Gradients are compared by test_functions_and_operators_are_one (test_values.py)."""
    calls = []

    class Counting:
        def __getattr__(self, function):
            calls.append(function)
            return getattr(direct, function)

    monkeypatch.setattr(functional, "direct", Counting())
    got = called(name)
    assert calls == [name]
    assert_bits([got], [called(name, torch.ops.fused)])


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
    want = called(name)
    with Mode() as mode:
        assert getattr(direct, name)(*tensors, *others) is None
        got = called(name)
    assert_bits([got], [want])
    assert getattr(torch.ops.fused, name) in mode.seen


def test_a_subclass_sees_torchs_own_functions():
    """It has never heard of the operators, and may override what it has heard of."""
    special = X.as_subclass(Subclass)
    assert direct.linear_relu(special, W, B, "default") is None
    Subclass.seen.clear()
    result = tfl.linear_relu(special, W, B)
    assert type(result) is Subclass and Subclass.seen == [F.linear, F.relu]


PAIRS = [1, 1], [0, 0], [1, 1]


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("linear_relu", ()),
        ("linear_relu", (X, W)),
        ("linear_relu", (X, W, B, "default", 1)),
        ("linear_relu", (X.tolist(), W, B, "default")),
        ("linear_relu", (None, W, B, "default")),
        ("linear_relu", (X, W, 0.5, "default")),
        ("linear_relu", (X, W, B, None)),
        ("linear_relu", (X, W, B, "café")),
        ("mlp", (X, tuple(LAYERS[0]), LAYERS[1], "relu", "default")),
        ("mlp", (X, [W, None], LAYERS[1], "relu", "default")),
        ("mlp", (X, LAYERS[0], [B, 1], "relu", "default")),
        *(
            ("conv2d_relu", (IMAGE, KERNEL, B, wrong, *PAIRS[1:], 1))
            for wrong in ([1.0, 1], [True, 1], [2**70, 1])
        ),
        ("conv2d_relu", (IMAGE, KERNEL, B, *PAIRS, True)),
    ],
)
def test_arguments_that_are_not_plain_go_to_torch_ops(name, arguments):
    assert getattr(direct, name)(*arguments) is None


def test_no_reference_is_lost_or_kept():
    held = [X, W, B, "default", "wrong"]
    before = [sys.getrefcount(o) for o in held]
    for _ in range(100):
        direct.linear_relu(X, W, B, "default")
        with pytest.raises(ValueError):
            direct.linear_relu(X, W, B, "wrong")
    assert [sys.getrefcount(o) for o in held] == before


def test_it_takes_less_time_than_torch_ops():
    def seconds(call):
        start = time.thread_time()
        for _ in range(300):
            call()
        return time.thread_time() - start

    calls = (lambda: tfl.linear_relu(X, W, B), lambda: torch.ops.fused.linear_relu(X, W, B))
    with torch.no_grad():
        pairs = [tuple(map(seconds, calls)) for _ in range(40)]
    assert min(a for a, _ in pairs) < min(b for _, b in pairs)


def test_tensors_in_use_cannot_be_swapped():
    """Here by a hook on saved tensors, elsewhere by another thread."""
    x, w = torch.randn(3, 4), torch.randn(4, 4).requires_grad_()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    tfl.fuse_(model)
    for linear in (torch.nn.functional.linear, tfl.linear, lambda x, _: model(x)):
        refused = []

        def pack(saved):
            with pytest.raises(RuntimeError, match=r"use_count|gradient edge"):
                torch.utils.swap_tensors(x, torch.randn(3, 4))
            refused.append(saved)  # noqa: B023 (called within the turn)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            linear(x, w)
        assert refused
