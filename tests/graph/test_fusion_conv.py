"""Convolutions with ReLU in the pass over compiled graphs: what is taken, what is left alone."""

import contextlib
import pickle
import shutil
from functools import partial

import fusion
import pytest
import torch
import torch.nn.functional as F
from fusion import fresh_dynamo, recording_backend, results  # noqa: F401
from helpers import one_thread  # noqa: F401
from operators import ODD
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import torch_fused_linear as tfl
from torch_fused_linear.graph import matching_conv
from torch_fused_linear.graph.fusion_pass import FusionPass

LAST = torch.channels_last


def tensors(*lead, dtype=torch.float32, kernel=3, last=False):
    """x [*lead, 4, 7, 6], weight and bias of 4 -> 6 channels."""
    torch.manual_seed(0)
    shapes = [(*lead, 4, 7, 6), (6, 4, kernel, kernel), (6,)]
    made = [torch.randn(shape, dtype=dtype) for shape in shapes]
    if last:
        made[0] = made[0].to(memory_format=LAST)
    return [t.requires_grad_() for t in made]


check = partial(fusion.check, conv=True)
ONE = {"conv2d_relu": 1}
SPELLINGS = {
    "F": lambda x, w, b: F.relu(F.conv2d(x, w, b)),
    "F, in place": lambda x, w, b: F.relu(F.conv2d(x, w, b), inplace=True),
    "F.relu_": lambda x, w, b: F.relu_(F.conv2d(x, w, b)),
    "torch": lambda x, w, b: torch.relu(torch.conv2d(x, w, b)),
    "torch.relu_": lambda x, w, b: torch.relu_(torch.conv2d(x, w, b)),
    "methods": lambda x, w, b: torch.conv2d(x, w, b).relu(),
    "in-place methods": lambda x, w, b: torch.conv2d(x, w, b).relu_(),
    "ATen": lambda x, w, b: torch.ops.aten.relu(torch.ops.aten.conv2d(x, w, b)),
    "by name": lambda x, w, b: F.relu(input=F.conv2d(weight=w, input=x, bias=b, padding=1)),
    "no bias": lambda x, w, b: F.relu(F.conv2d(x, w)) + b[:, None, None],
    "all options": lambda x, w, b: F.relu(F.conv2d(x, w[:, :2], b, (2, 1), [1, 2], 2, 2)),
    "one number in a list": lambda x, w, b: F.relu(F.conv2d(x, w, b, [2], (1,))),
    "valid": lambda x, w, b: F.relu(F.conv2d(x, w, b, padding="valid")),
    "same": lambda x, w, b: F.relu(F.conv2d(x, w, b, padding="same", dilation=(2, 1))),
    "weight and image in one": lambda x, w, b: F.relu(F.conv2d(w, w, b)),
}


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name, last):
    args = tensors(2, last=last)
    if name == "weight and image in one":
        args[1] = torch.randn(6, 6, 3, 3, requires_grad=True)
        args = args[1:]
        check(lambda w, b: F.relu(F.conv2d(w, w, b)), args, **ONE)
    else:
        check(SPELLINGS[name], args, **ONE)


def test_without_a_batch():
    check(SPELLINGS["F"], tensors(), **ONE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(dtype):
    args = tensors(2, dtype=dtype)
    backend = tfl.compile_backend("eager", conv=True)
    compiled = torch.compile(SPELLINGS["F"], fullgraph=True, backend=backend)
    for got, want in zip(results(compiled, args), results(SPELLINGS["F"], args), strict=True):
        level = 8 * torch.finfo(dtype).eps * float(want.abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=level)
    assert backend.replaced == ONE


@pytest.mark.parametrize("odd", ODD)
def test_every_geometry(odd):
    check(ODD[odd].eager, ODD[odd].case(dtype=torch.float32).leaves(), **ONE)


MODULES = {
    "Sequential": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU()), 1),
    "in place": (nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(inplace=True)), 1),
    "same": (nn.Sequential(nn.Conv2d(4, 6, 3, padding="same"), nn.ReLU()), 1),
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
    check(model, tensors(2)[:1], "aot_eager", **({"conv2d_relu": count} if count else {}))


def used_twice(x, w, b):
    z = F.conv2d(x, w, b)
    return F.relu(z) + z


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


LEFT_ALONE = {
    "a second use": used_twice,
    "a second use of what is rectified in place": rectified_in_place_and_used,
    "gradients of one part only": under_no_grad_in_part,
    "written in between": written_before_relu,
    "uneven padding": lambda x, w, b: F.relu(F.conv2d(x, w[..., :2], b, padding="same")),
    "another activation": lambda x, w, b: F.gelu(F.conv2d(x, w, b)),
    "leaky": lambda x, w, b: F.leaky_relu(F.conv2d(x, w, b)),
    "clamped at 6": lambda x, w, b: F.relu6(F.conv2d(x, w, b)),
    "no activation": lambda x, w, b: F.conv2d(x, w, b),
    "flattened first": lambda x, w, b: F.relu(F.conv2d(x, w, b).flatten(1)),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name):
    check(LEFT_ALONE[name], tensors(2))


def test_other_dtypes_are_left_alone():
    integers = [torch.ones(1, 4, 7, 6, dtype=torch.long), torch.ones(6, 4, 3, 3, dtype=torch.long)]
    backend = tfl.compile_backend("eager", conv=True)
    got = torch.compile(lambda x, w: F.relu(F.conv2d(x, w)), backend=backend)(*integers)
    assert got.unique().tolist() == [36] and not backend.replaced


def test_what_is_written_after_the_convolution_is_read_before():
    def function(x, w, b):
        w = w * 1
        z = F.conv2d(x, w, b)
        w.zero_()
        return F.relu(z) + w.sum()

    with torch.no_grad():
        args = tensors(2)
        backend = tfl.compile_backend("eager", conv=True)
        got = torch.compile(function, fullgraph=True, backend=backend)(*args)
        torch.testing.assert_close(got, function(*args))
        assert backend.replaced == ONE


def test_only_where_it_is_asked_for():
    for backend in (tfl.compile_backend("eager"), tfl.compile_backend("eager", conv=False)):
        torch._dynamo.reset()
        torch.compile(SPELLINGS["F"], backend=backend)(*tensors(2))
        assert not backend.replaced
    key = "pre_grad_custom_pass"
    assert [tfl.compile_options(conv=conv)[key].conv for conv in (False, True)] == [False, True]
    assert tfl.compile_options()[key].conv is False


def test_beside_linear_layers():
    def function(x, w, b, v, c):
        hidden = F.relu(F.conv2d(F.relu(F.conv2d(x, w, b)), w.transpose(0, 1))).flatten(1)
        return F.linear(F.relu(F.linear(hidden, v, c)), v.t())

    args = [*tensors(2), torch.randn(5, 24, requires_grad=True), torch.randn(5).requires_grad_()]
    check(function, args, conv2d_relu=2, mlp=1)


# --- modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    """Inside the graph or around it: the dtype of the result, and numbers near autocast's own."""

    def low(here):
        return torch.autocast("cpu", dtype=torch.bfloat16) if here else contextlib.nullcontext()

    def function(x, w, b):
        with low(inside):
            return F.relu(F.conv2d(x, w, b))

    with low(not inside):
        args = tensors(2)
        args[0] = args[0].detach().bfloat16().requires_grad_()  # mixed, as between two layers
        backend = tfl.compile_backend("aot_eager", conv=True)
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        got, want = results(compiled, args), results(function, args)
    assert [t.dtype for t in got] == [t.dtype for t in want] and got[0].dtype == torch.bfloat16
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()
    assert backend.replaced == ONE


def test_relu_outside_of_autocast():
    """Its operand is bf16 all the same, but the mode has changed in between."""

    def function(x, w, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = F.conv2d(x, w, b)
        return F.relu(z)

    backend = tfl.compile_backend("eager", conv=True)
    torch.compile(function, fullgraph=True, backend=backend)(*tensors(2))
    assert not backend.replaced


def test_checkpointed_blocks():
    def function(*args):
        block = SPELLINGS["F"]
        return torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False).sin()

    check(function, tensors(2), backend="aot_eager", **ONE)


def test_vmap():
    def function(x, w, b):
        return torch.vmap(lambda image: F.relu(F.conv2d(image, w, b)))(x)

    args = tensors(3, 2)
    backend = tfl.compile_backend("aot_eager", conv=True)
    got = results(torch.compile(function, backend=backend), args)
    for a, b in zip(got, results(function, args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_any_size_of_batch_and_image():
    backend = tfl.compile_backend("aot_eager", conv=True)
    function = SPELLINGS["all options"]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    _, w, b = tensors(2)
    for size in ((2, 4, 9, 8), (3, 4, 11, 12), (5, 4, 8, 13)):
        args = [torch.randn(size, requires_grad=True), w, b]
        for got, want in zip(results(compiled, args), results(function, args), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert backend.replaced == ONE, "one graph for all"


# --- what comes out ------------------------------------------------------------------------------


def test_forward_and_backward_are_ours():
    graphs = {}
    compiled = torch.compile(
        SPELLINGS["F"], backend=tfl.compile_backend(recording_backend(graphs), conv=True)
    )
    compiled(*tensors(2)).sum().backward()
    calls = {
        name: [t for t in targets if t.startswith(("fused.", "aten.conv", "aten.relu", "aten.th"))]
        for name, targets in graphs.items()
    }
    assert calls["forward"] == ["fused.conv2d_relu.default"]
    assert calls["backward"] == [
        "fused._channels_relu_backward.default",
        "aten.convolution_backward.default",
    ]


def test_exported_graphs_are_taken_too():
    model, x = MODULES["two"][0], tensors(2)[0].detach()
    module = torch.export.export(model.eval(), (x,)).module()
    fusion = FusionPass(conv=True)
    fusion(module.graph)
    module.recompile()
    assert fusion.replaced == {"conv2d_relu": 2}
    torch.testing.assert_close(module(x), model(x), rtol=1e-4, atol=1e-5)


def test_identity():
    """The compiler's caches must not take the one for the other."""
    plain, conv = FusionPass(), FusionPass(conv=True)
    assert plain.uuid() != conv.uuid() == FusionPass(conv=True).uuid()
    assert pickle.dumps(plain) != pickle.dumps(conv) == pickle.dumps(FusionPass(conv=True))
    for each in (plain, conv):
        assert pickle.loads(pickle.dumps(each)).conv == each.conv


def test_a_result_of_other_strides_is_left_alone(monkeypatch):
    """What comes after may view it: our result must lie in memory as eager's does."""
    args = tensors(2, last=True)
    real = matching_conv._conv2d_relu
    monkeypatch.setattr(matching_conv, "_conv2d_relu", lambda *a: real(*a).contiguous())
    check(SPELLINGS["F"], args)
    torch._dynamo.reset()
    monkeypatch.setattr(matching_conv, "_conv2d_relu", real)
    check(SPELLINGS["F"], args, **ONE)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="needs a C++ compiler")
def test_inductor_runs_our_operator_and_its_caches_hold(tmp_path, monkeypatch):
    """Compiled in an empty cache, found there by an equal pass, and not by another one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    quick = {"cpp_cache_precompile_headers": False}
    model, x = MODULES["two"][0], tensors(2)[0]

    def step(call):
        y = call(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]

    want = step(model)
    for conv, hits in ((True, 0), (True, 1), (False, 0)):
        torch._dynamo.reset()
        counters.clear()
        options = tfl.compile_options(conv=conv)
        compiled = torch.compile(model, fullgraph=True, options=options)
        with torch._inductor.config.patch(quick):
            got, code = run_and_get_code(step, compiled)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
        assert options["pre_grad_custom_pass"].replaced == ({"conv2d_relu": 2} if conv else {})
        if not hits:
            both = "".join(code)
            for name in ("conv2d_relu", "_channels_relu_backward"):
                assert (f"torch.ops.fused.{name}" in both) == conv
