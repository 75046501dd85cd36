"""Convolutions with ReLU in the pass over compiled graphs: what is taken, what is left alone."""

from functools import partial
from itertools import islice

import fusion
import pytest
import torch
import torch.nn.functional as F
from fusion import conv_relu, fresh_dynamo, images, results  # noqa: F401
from helpers import one_thread  # noqa: F401
from operators import ODD
from torch import nn

import torch_fused_linear as tfl
from torch_fused_linear.graph import matching_conv

check = partial(fusion.check, conv=True)
ONE = {"conv2d_relu": 1}
# The ways to write ReLU are those behind linear layers.
SPELLINGS = {
    "F": conv_relu,
    "torch.relu_": lambda x, w, b: torch.relu_(torch.conv2d(x, w, b)),
    "in-place methods": lambda x, w, b: torch.conv2d(x, w, b).relu_(),
    "ATen": lambda x, w, b: torch.ops.aten.relu(torch.ops.aten.conv2d(x, w, b)),
    "by name": lambda x, w, b: F.relu(input=F.conv2d(weight=w, input=x, bias=b, padding=1)),
    "no bias": lambda x, w, b: F.relu(F.conv2d(x, w)) + b[:, None, None],
    "all options": lambda x, w, b: F.relu(F.conv2d(x, w[:, :2], b, (2, 1), [1, 2], 2, 2)),
    "one number in a list": lambda x, w, b: F.relu(F.conv2d(x, w, b, [2], (1,))),
    "valid": lambda x, w, b: F.relu(F.conv2d(x, w, b, padding="valid")),
    "same": lambda x, w, b: F.relu(F.conv2d(x, w, b, padding="same", dilation=(2, 1))),
    "weight and image in one": lambda x, w, b: F.relu(F.conv2d(w, w, b)) + x.sum(),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    for last in (False, True) if name in ("F", "all options", "same") else (False,):
        torch._dynamo.reset()
        check(SPELLINGS[name], images(2, last=last), **ONE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    args = images(2, dtype=dtype)
    backend = tfl.compile_backend("eager", conv=True)
    compiled = torch.compile(conv_relu, fullgraph=True, backend=backend)
    for got, want in zip(results(compiled, args), results(conv_relu, args), strict=True):
        level = 8 * torch.finfo(dtype).eps * float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=level)
    assert backend.replaced == ONE


def test_every_geometry():
    cases = [op.case(dtype=torch.float32).leaves() for op in ODD.values()]

    def function(*leaves):
        given = iter(leaves)
        return torch.cat([op.eager(*islice(given, 3)).flatten() for op in ODD.values()])

    check(function, [t for leaves in cases for t in leaves], conv2d_relu=len(ODD))


MODULES = {
    # The image has its padding already; the convolution itself has none.
    "reflect": (nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), nn.ReLU()), 1),
    "two": (nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.ReLU(True)), 2),
    "ours": (tfl.FusedConv2dReLU(4, 6, 3), 0),
    "normalised": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()), 0),
    "1-D": (nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 6, 3), nn.ReLU()), 0),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.ReLU()), 0),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    model, count = MODULES[name]
    check(model, images(2)[:1], "aot_eager", **({"conv2d_relu": count} if count else {}))


def rectified_in_place_and_used(x, w, b):
    z = F.conv2d(x, w, b)
    return F.relu(z, inplace=True) + z


def under_no_grad_in_part(x, w, b):
    with torch.no_grad():
        z = F.conv2d(x, w, b)
    return F.relu(z) * b.sum() * w.sum() * x.sum()


def written_before_relu(x, w, b):
    z = F.conv2d(x, w, b)
    z.mul_(-1)
    return F.relu(z)


def relu_outside_of_autocast(x, w, b):
    """Its operand is bf16 all the same, but the mode has changed in between."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = F.conv2d(x, w, b)
    return F.relu(z)


LEFT_ALONE = {
    "a second use": lambda x, w, b: (lambda z: F.relu(z) + z)(F.conv2d(x, w, b)),
    "a second use of what is rectified in place": rectified_in_place_and_used,
    "gradients of one part only": under_no_grad_in_part,
    "written in between": written_before_relu,
    "autocast of one part only": relu_outside_of_autocast,
    "uneven padding": lambda x, w, b: F.relu(F.conv2d(x, w[..., :2], b, padding="same")),
    "another activation": lambda x, w, b: F.gelu(F.conv2d(x, w, b)),
    "no activation": lambda x, w, b: F.conv2d(x, w, b),
    "flattened first": lambda x, w, b: F.relu(F.conv2d(x, w, b).flatten(1)),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name):
    check(LEFT_ALONE[name], images(2))


def test_other_dtypes_are_left_alone():
    check(conv_relu, images(2, dtype=torch.long))


def test_a_result_of_other_strides_is_left_alone(monkeypatch):
    """What comes after may view it: our result must lie in memory as eager's does."""
    real = matching_conv._conv2d_relu
    monkeypatch.setattr(matching_conv, "_conv2d_relu", lambda *a: real(*a).contiguous())
    check(conv_relu, images(2, last=True))


def test_only_where_it_is_asked_for():
    for backend in (tfl.compile_backend("eager"), tfl.compile_backend("eager", conv=False)):
        torch._dynamo.reset()
        torch.compile(conv_relu, backend=backend)(*images(2))
        assert not backend.replaced
    key = "pre_grad_custom_pass"
    assert [tfl.compile_options(conv=conv)[key].conv for conv in (False, True)] == [False, True]
    assert tfl.compile_options()[key].conv is False


def test_beside_linear_layers():
    def function(x, w, b, v, c):
        hidden = F.relu(F.conv2d(F.relu(F.conv2d(x, w, b)), w.transpose(0, 1))).flatten(1)
        return F.linear(F.relu(F.linear(hidden, v, c)), v.t())

    args = [*images(2), torch.randn(5, 24, requires_grad=True), torch.randn(5).requires_grad_()]
    check(function, args, conv2d_relu=2, mlp=1)


def test_any_size_of_batch_and_image():
    backend = tfl.compile_backend("aot_eager", conv=True)
    function = SPELLINGS["all options"]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    _, w, b = images(2)
    for size in ((2, 4, 9, 8), (3, 4, 11, 12), (5, 4, 8, 13)):
        args = [torch.randn(size, requires_grad=True), w, b]
        got, want = results(compiled, args), results(function, args)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert backend.replaced == ONE, "one graph for all"
