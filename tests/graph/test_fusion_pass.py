"""The pass over compiled graphs under autocast, checkpoints, vmap; what it counts and refuses."""

import contextlib
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
from fusion import (  # noqa: F401
    chain,
    check,
    fresh_dynamo,
    recording_backend,
    results,
    tanh_formula,
    tensors,
)
from helpers import one_thread  # noqa: F401
from torch import nn

import torch_fused_linear as tfl
from torch_fused_linear import _library
from torch_fused_linear.graph import identity
from torch_fused_linear.graph.formula_pass import FormulaPass
from torch_fused_linear.graph.fusion_pass import FusionPass


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    """Inside the graph or around it: the dtype of the result, and numbers near autocast's own."""

    def low(here):
        return torch.autocast("cpu", dtype=torch.bfloat16) if here else contextlib.nullcontext()

    def function(x, w, b, v, c):
        with low(inside):
            return chain(x, w, b, v, c) * F.gelu(torch.addmm(b, x, w.t())).sum()

    with low(not inside):
        args = tensors(5)
        backend = tfl.compile_backend("aot_eager")
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        got, want = results(compiled, args), results(function, args)
    assert got[0].dtype == want[0].dtype
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()
    assert backend.replaced == {"mlp": 1, "linear_gelu": 1}


def test_sum_that_autocast_widens_is_left_alone():
    """The product is bf16 there, the sum with an fp32 bias fp32: no layer gives that."""

    def function(x, w, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.relu(x @ w.t() + b)

    check(function, tensors(5)[:3])


def test_checkpointed_blocks():
    """Their graphs are inside of the graph."""

    def function(*args):
        return torch.utils.checkpoint.checkpoint(chain, *args, use_reentrant=False).sin()

    check(function, tensors(5), backend="aot_eager", mlp=1)


def test_vmap():
    def function(x, w, b):
        return torch.vmap(lambda row: F.relu(F.linear(row, w, b)))(x)

    backend = tfl.compile_backend("aot_eager")
    args = tensors(5)[:3]
    got = results(torch.compile(function, backend=backend), args)
    for a, b in zip(got, results(function, args), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("act", [F.relu, F.gelu, tanh_formula])
def test_compiled_backward_is_fused_across_layers(act):
    """What mlp is put in for: the hidden activation's gradient comes with the next layer's step."""
    graphs = {}
    args = tensors(2, 5)
    compiled = torch.compile(
        lambda x, w, b, v, c: F.linear(act(F.linear(x, w, b)), v, c),
        backend=tfl.compile_backend(recording_backend(graphs)),
    )
    compiled(*args).sum().backward()
    ours = [name for name in graphs["backward"] if name.startswith("fused.")]
    assert ours == ["fused._linear_backward_across.default", "fused._linear_backward.default"]
    first = "fused.linear_relu.default" if act is F.relu else "fused._linear_aux.default"
    assert [n for n in graphs["forward"] if n.startswith("fused.")] == [
        first,
        "fused.linear.default",
    ]
    assert not any(n.startswith(("aten.mm", "aten.addmm")) for g in graphs.values() for n in g)


def test_exported_graphs_are_taken_too():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).eval()
    x = torch.randn(5, 6)
    module = torch.export.export(model, (x,)).module()
    fusion = FusionPass()
    fusion(module.graph)
    module.recompile()
    assert fusion.replaced == {"mlp": 1}
    torch.testing.assert_close(module(x), model(x))


def test_identity():
    """The caches pickle the pass: what it has counted must not matter, what it does must."""
    for cls, counts in ((FusionPass, "replaced"), (FormulaPass, "written_out")):
        one, other = cls(), cls()
        getattr(other, counts)["mlp"] += 3
        assert one.uuid() == other.uuid()
        assert pickle.dumps(one) == pickle.dumps(other)
        assert isinstance(pickle.loads(pickle.dumps(one)), cls)


def test_identity_follows_the_source_and_the_library(monkeypatch, tmp_path):
    def uuids():
        identity.fingerprint.cache_clear()
        return FusionPass().uuid(), FormulaPass().uuid()

    before = uuids()
    assert len({*before, FusionPass(conv=True).uuid()}) == 3
    assert {"criterion.py", "matching.py", "activations.py"} <= {p.name for p in identity.SOURCES}
    try:
        with monkeypatch.context() as patch:
            patch.setattr(_library, "build_info", lambda: {"fingerprint": "another"})
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
def test_bodies_of_control_flow_are_left_alone(way):
    """Those of cond and scan make backward graphs of their own; that of a checkpoint does not."""
    from torch.utils.checkpoint import checkpoint

    w = torch.randn(8, 8, requires_grad=True)

    def layer(x):
        return F.relu(F.linear(x, w))

    def conditional(x):
        return torch.cond(x.sum() > 0, layer, torch.sin, (layer(x),))

    def recomputed(x):
        return checkpoint(layer, x, use_reentrant=False)

    x = torch.randn(4, 8).abs()
    for function in (conditional, recomputed):
        backend, options = tfl.compile_backend("aot_eager"), tfl.compile_options()
        how = {"options": options} if way == "inductor" else {"backend": backend}
        want = torch.autograd.grad(function(x).sum(), w)
        got = torch.autograd.grad(torch.compile(function, **how)(x).sum(), w)
        torch.testing.assert_close(got, want)
        fusion = options["pre_grad_custom_pass"] if way == "inductor" else backend
        assert fusion.replaced == {"linear_relu": 1}, function
