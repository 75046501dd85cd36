"""The pass over compiled graphs under autocast, checkpoints, vmap; what it counts and refuses."""

import contextlib
import logging
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fusion import (
    chain,
    chain_of,
    check,
    conv_relu,
    images,
    recording_backend,
    results,
    tanh_formula,
    tensors,
)
from torch import nn

import torch_fused_linear as tfl
from torch_fused_linear._support import library
from torch_fused_linear.graph import identity
from torch_fused_linear.graph.accumulated_weights import StoragesPass, WeightsPass
from torch_fused_linear.graph.fusion_pass import FusionPass


def chain_and_gelu(x, w, b, v, c):
    return chain(x, w, b, v, c) * F.gelu(torch.addmm(b, x, w.t())).sum()


# A function, its arguments and what is replaced in it.
KINDS = {
    "linear": (chain_and_gelu, partial(tensors, 5), {"mlp": 1, "linear_gelu": 1}),
    "GELU written out": (chain_of(tanh_formula), partial(tensors, 5), {"mlp": 1}),
    "conv": (conv_relu, partial(images, 2), {"conv2d_relu": 1}),
}
kind_param = pytest.mark.parametrize("kind", KINDS)


@kind_param
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside, mixed, kind, device):
    """Inside the graph or around it: the dtype of the result, and numbers near autocast's own."""
    plain, make, replaced = KINDS[kind]

    def low(here):
        return torch.autocast(device.type, torch.bfloat16) if here else contextlib.nullcontext()

    def function(*args):
        with low(inside):
            return plain(*args)

    with low(not inside):
        args = [t.detach().to(device).requires_grad_() for t in make()]
        if mixed:  # as between two layers
            args[0] = args[0].detach().bfloat16().requires_grad_()
        backend = tfl.compile_backend("aot_eager", conv=True)
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        got, want = results(compiled, args), results(function, args)
    assert [t.dtype for t in got] == [t.dtype for t in want] and got[0].dtype == torch.bfloat16
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()
    # A convolution as small as this does not pay on a GPU.
    assert backend.replaced == ({} if (device.type, kind) == ("cuda", "conv") else replaced)


@kind_param
def test_checkpointed_blocks(kind):
    """Their graphs are inside of the graph."""
    plain, make, replaced = KINDS[kind]

    def function(*args):
        return torch.utils.checkpoint.checkpoint(plain, *args, use_reentrant=False).sin()

    check(function, make(), backend="aot_eager", conv=kind == "conv", **replaced)


@kind_param
def test_vmap(kind):
    plain, make, _ = KINDS[kind]

    def function(x, *others):
        return torch.vmap(lambda one: plain(one, *others))(torch.stack([x, x.cos()]))

    args = make()
    backend = tfl.compile_backend("aot_eager", conv=True)
    got = results(torch.compile(function, backend=backend), args)
    torch.testing.assert_close(got, results(function, args), rtol=1e-4, atol=1e-4)


# The operators of ours that forward and backward call, and those of ATen's that do the same.
FIRST = {F.relu: "linear_relu", F.gelu: "_linear_aux", tanh_formula: "_linear_aux"}
ACROSS = ["fused._linear_backward_across.default", "fused._linear_backward.default"]
OF_IMAGES = ["fused._channels_relu_backward.default", "aten.convolution_backward.default"]
GRAPHS = [
    (chain_of(act), partial(tensors, 2, 5), [f"fused.{op}.default", "fused.linear.default"], ACROSS)
    for act, op in FIRST.items()
]
GRAPHS += [(conv_relu, partial(images, 2), ["fused.conv2d_relu.default"], OF_IMAGES)]


@pytest.mark.parametrize("function, make, forward, backward", GRAPHS)
def test_compiled_backward_is_fused_across_layers(function, make, forward, backward):
    """In mlp the next layer's step computes the hidden activation's gradient."""
    graphs = {}
    backend = tfl.compile_backend(recording_backend(graphs), conv=True)
    torch.compile(function, backend=backend)(*make()).sum().backward()
    theirs = ("aten.mm", "aten.addmm", "aten.conv", "aten.relu", "aten.th")
    calls = [[t for t in graphs[name] if t.startswith(("fused.", *theirs))] for name in graphs]
    assert calls == [forward, backward]


EXPORTED = {
    "mlp": (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), (5, 6), 1),
    "conv2d_relu": (
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.ReLU()),
        (2, 4, 7, 6),
        2,
    ),
}


@pytest.mark.parametrize("operator", EXPORTED)
def test_exported_graphs_are_taken_too(operator):
    model, size, count = EXPORTED[operator]
    x = torch.randn(size)
    module = torch.export.export(model.eval(), (x,)).module()
    fusion = FusionPass(conv=True)
    fusion(module.graph)
    module.recompile()
    assert fusion.replaced == {operator: count}
    torch.testing.assert_close(module(x), model(x))


def test_identity():
    """The caches pickle the pass: what it has counted must not matter, what it does must."""
    conv = partial(FusionPass, conv=True)
    for make in (FusionPass, conv, WeightsPass, StoragesPass):
        one, other = make(), make()
        if isinstance(other, FusionPass):
            other.replaced["mlp"] += 3
        assert one.uuid() == other.uuid()
        assert pickle.dumps(one) == pickle.dumps(other)
        assert type(pickle.loads(pickle.dumps(one))) is type(one)
    assert pickle.dumps(FusionPass()) != pickle.dumps(conv())
    assert [pickle.loads(pickle.dumps(p)).conv for p in (FusionPass(), conv())] == [False, True]


def test_identity_follows_the_source_and_the_library(monkeypatch, tmp_path):
    def uuids():
        identity.fingerprint.cache_clear()
        return FusionPass().uuid(), WeightsPass().uuid()

    before = uuids()
    assert len({*before, FusionPass(conv=True).uuid()}) == 3
    assert {"criterion.py", "matching.py", "activations.py"} <= {p.name for p in identity.SOURCES}
    try:
        with monkeypatch.context() as patch:
            patch.setattr(library, "build_info", lambda: {"fingerprint": "another"})
            assert not {*uuids()} & {*before}
        for i, path in enumerate(identity.SOURCES):
            changed = tmp_path / path.name
            changed.write_text(path.read_text() + "\n")
            with monkeypatch.context() as patch:
                sources = [*identity.SOURCES[:i], changed, *identity.SOURCES[i + 1 :]]
                patch.setattr(identity, "SOURCES", sources)
                assert not {*uuids()} & {*before}, path.name
    finally:
        identity.fingerprint.cache_clear()
    assert uuids() == before


# --- what the user sees --------------------------------------------------------------------------


def test_replacements_are_counted_and_logged(caplog):
    backend = tfl.compile_backend("eager")
    with caplog.at_level(logging.INFO, logger="torch_fused_linear"):
        torch.compile(chain, backend=backend)(*tensors(5))
        torch.compile(lambda x, w: F.relu(x @ w.t()), backend=backend)(*tensors(5)[:2])
    lines = [r.getMessage() for r in caplog.records if r.name == "torch_fused_linear"]
    assert lines == ["put into a graph: 1 mlp", "put into a graph: 1 linear_relu"]
    assert backend.replaced == {"mlp": 1, "linear_relu": 1}


def test_wrong_use_says_so():
    with pytest.raises(ValueError, match="has a pre_grad_custom_pass already"):
        tfl.compile_options(options={"pre_grad_custom_pass": print})
    with pytest.raises(Exception, match="no_such_backend"):
        tfl.compile_backend("no_such_backend")
    with pytest.raises(RuntimeError, match="no-such-mode"):
        tfl.compile_options("no-such-mode")


@pytest.mark.parametrize("way", ["inductor", "aot_eager"])
@pytest.mark.parametrize("again", [False, True])
def test_bodies_of_control_flow_are_left_alone(way, again):
    """Those of cond and scan make backward graphs of their own."""
    w = torch.randn(8, 8, requires_grad=True)

    def layer(x):
        return F.relu(F.linear(x, w))

    def body(x):
        return (
            torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        )

    def conditional(x):
        return torch.cond(x.sum() > 0, body, torch.sin, (layer(x),))

    x = torch.randn(4, 8).abs()
    backend, options = tfl.compile_backend("aot_eager"), tfl.compile_options()
    how = {"options": options} if way == "inductor" else {"backend": backend}
    want = torch.autograd.grad(conditional(x).sum(), w)
    got = torch.autograd.grad(torch.compile(conditional, **how)(x).sum(), w)
    torch.testing.assert_close(got, want)
    fusion = options["pre_grad_custom_pass"] if way == "inductor" else backend
    assert fusion.replaced == {"linear_relu": 1}


class Conditional(nn.Linear):
    """Its control flow is given its own weight, and one of a module inside of it."""

    def forward(self, x):
        weights = self.weight, self.inner.weight
        return torch.cond(
            x.sum() > 0, lambda *ts: ts[0] @ ts[1], lambda *ts: sum(ts), (x, *weights)
        )


def test_weights_of_control_flow_in_exported_graphs():
    model, x = Conditional(8, 8), torch.randn(8, 8)
    model.inner = nn.Linear(8, 8)
    exported = torch.export.export(model, (x,)).module()
    FusionPass()(exported.graph)
    torch.testing.assert_close(exported(x), model(x))
