"""fuse_(linear=True): layers without an activation run as operators, too."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
import zoo
from fused_models import Block, Gated, cast, decides, operators, results  # noqa: F401
from stacks import assert_same
from torch import nn

import torch_fused_linear as tfl

X = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Projections in the ways in which they are written, and a layer that nothing calls."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj, self.spare = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.k_proj = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.v_proj = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6, bias=False))
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})

    def forward(self, x):
        q = self.q_proj(x).view(2, 3, 2, 3)
        k = sum(layer(x) for layer in self.k_proj).view(2, 3, 2, 3)
        v = self.v_proj(x).view(2, 3, 2, 3)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        y = self.o_proj(y.transpose(1, 2).reshape(2, 3, 6)) + x
        head = self.heads["a"]
        return head(y) * 2 if y.dim() == 2 else self.heads["b"](y + 1)


CALLED = ["q_proj", "k_proj.0", "k_proj.1", "v_proj.1", "o_proj", "heads.a", "heads.b"]


def pair(make, **options):
    """The fused model, a plain one and the report."""
    torch.manual_seed(0)
    plain = make().double()
    model = copy.deepcopy(plain)
    return model, plain, tfl.fuse_(model, linear=True, **options)


def layers_in(report):
    return sorted(layer for block in report.fused for layer in block.layers)


@pytest.mark.usefixtures("decides")
def test_projections_are_operators():
    model, plain, report = pair(Attention)
    assert layers_in(report) == sorted(CALLED)
    assert {block.after for block in report.fused if len(block.layers) == 1} == {("linear",)}
    assert [s.path for s in report.skipped] == ["spare"]
    assert operators(model, X) == ["linear"] * 6
    assert_same(results(model, [X]), results(plain, [X]))
    again = tfl.fuse_(model, linear=True)
    assert not again.fused and {s.reason for s in again.skipped if s.path in CALLED} == {
        "already fused"
    }
    tfl.unfuse_(model)
    assert operators(model, X) == [] and not tfl.is_fused(model)


def test_without_the_option_they_are_left_alone():
    model = Attention().double()
    report = tfl.fuse_(model)
    assert not report.fused and not report.skipped and not tfl.is_fused(model)
    assert operators(model, X) == []


def test_a_report_alone_changes_nothing():
    model = Attention().double()
    report = tfl.fuse_(model, linear=True, dry_run=True)
    assert not tfl.is_fused(model) and operators(model, X) == []
    assert report == tfl.fuse_(model, linear=True)


def test_the_filter_is_asked_of_each():
    def is_wanted(name, module):
        return "proj" in name

    model, plain, report = pair(Attention, filter_fn=is_wanted)
    assert layers_in(report) == sorted(name for name in CALLED if is_wanted(name, None))
    assert {s.path for s in report.skipped if s.reason == "filter_fn says no"} == {
        "heads.a",
        "heads.b",
    }
    assert operators(model, X) == ["linear"] * 5
    assert_same(results(model, [X]), results(plain, [X]))


@pytest.mark.usefixtures("decides")
@pytest.mark.parametrize("memory", ["default", "low"])
@pytest.mark.parametrize("make", [Block, Gated])
def test_where_a_run_is_not_one_call_its_layers_are_operators(make, memory):
    model, plain, report = pair(make, memory=memory)
    (block,) = report.fused
    assert block.after[0].split()[0] == ("gated_mlp" if make is Gated else "mlp")
    for m in (model, plain):
        m.act.register_forward_hook(lambda *args: None)
    assert operators(model, X) == ["linear"] * len(block.layers)
    assert_same(results(model, [X]), results(plain, [X]))


@pytest.mark.usefixtures("decides")
def test_two_models_of_one_class_are_apart():
    """The code is one; the marks tell what each call may be."""
    runs, (single, plain, _) = Block().double(), pair(Block)
    tfl.fuse_(runs)
    for m in (runs, single):
        m.act.register_forward_hook(lambda *args: None)
    assert operators(single, X) == ["linear", "linear"]
    assert operators(runs, X) == [] and operators(plain, X) == []


class Late(nn.Module):
    """The activation is applied by a function in the method."""

    def __init__(self):
        super().__init__()
        self.fc, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.fc(x)

        def activated():
            return F.relu(h) + F.relu(self.other(x))

        return activated() + F.relu(self.other(h))


@pytest.mark.usefixtures("decides")
def test_an_activation_in_an_inner_function():
    model, plain, report = pair(Late)
    assert operators(model, X) == ["linear", "linear_relu"]
    assert_same(results(model, [X]), results(plain, [X]))
    assert {s.path: "in a function within" in s.reason for s in report.skipped} == {"other": True}


CHANGES = {
    "hook": lambda m: m.q_proj.register_forward_hook(lambda *args: None),
    "forward": lambda m: setattr(m.q_proj, "forward", lambda x: x * 2),
    "parametrisation": lambda m: nn.utils.parametrizations.weight_norm(m.q_proj),
    "another layer": lambda m: setattr(m, "q_proj", nn.Linear(6, 6).double()),
    "another class": lambda m: setattr(m, "q_proj", nn.Identity()),
}


@pytest.mark.usefixtures("decides")
@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_is_not_plain_any_more_runs_as_written(change):
    model, plain, _ = pair(Attention)
    for m in (model, plain):
        torch.manual_seed(1)
        CHANGES[change](m)
    assert operators(model, X) == ["linear"] * 5
    assert_same(results(model, [X]), results(plain, [X]))


class Unfollowed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.named, self.held, self.packed = (nn.Linear(6, 6) for _ in range(4))
        self.ours = tfl.FusedLinear(6, 6)

    @property
    def found(self):
        return self.held

    def forward(self, x):
        x = F.linear(x, self.used.weight) + self.named(input=x) + self.found(x)
        return self.ours(x) + self.packed(*(x,))


def test_a_layer_that_is_not_followed_is_reported():
    model, plain, report = pair(Unfollowed)
    assert not report.fused and operators(model, X) == ["linear"], "our own layer"
    reasons = {s.path: s.reason for s in report.skipped}
    assert reasons.keys() == {"used", "named", "held", "packed"}
    assert "its weight is read" in reasons["used"]
    assert all("by keyword" in reasons[name] for name in ("named", "packed"))
    assert "no method that can be followed" in reasons["held"]
    assert_same(results(model, [X]), results(plain, [X]))


def test_torchs_attention_says_that_it_is_left_alone():
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    model, plain, report = pair(lambda: layer)
    (skipped,) = report.skipped
    assert skipped.path == "self_attn" and "projections are nn.Linear layers" in skipped.reason
    assert not tfl.fuse_(copy.deepcopy(plain)).skipped
    assert_same(results(model, [X]), results(plain, [X]))


# Models of the zoo, the operators of one call beside "linear", and a projection by name.
MODELS = {
    "transformers/gpt2": (["mlp"] * 2, 2 * 2, "attn.c_attn"),
    "transformers/llama": (["gated_mlp"] * 2, 2 * 4, "self_attn.q_proj"),
    "transformers/bert": (["linear_gelu"] * 2, 2 * 5, "attention.self.query"),
    "timm/test_vit": (["mlp"] * 2, 2 * 2 + 1, "attn.qkv"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_others(name, fresh_compiler):
    pytest.importorskip(name.split("/")[0], reason="the model is theirs")
    plain, inputs = zoo.load(name)
    plain, inputs = plain.double(), cast(inputs, torch.float64)
    model = copy.deepcopy(plain)
    report = tfl.fuse_(model, linear=True)
    others, number, projection = MODELS[name]
    assert any(projection in layer for layer in layers_in(report)), report
    assert not report.skipped, report
    assert_same(results(model, inputs), results(plain, inputs))
    found = operators(functools.partial(model, **inputs))
    assert [op for op in found if op != "linear"] == others
    assert found.count("linear") >= number
    if name != "transformers/bert":
        ours, theirs = (torch.compile(m, backend="eager") for m in (model, plain))
        assert_same(results(ours, inputs), results(theirs, inputs))


SYSTEMS = {
    "trace": lambda model: torch.jit.trace(model, X),
    "fx": torch.fx.symbolic_trace,
    "compile": functools.partial(torch.compile, backend="aot_eager", fullgraph=True),
    "deepcopy": copy.deepcopy,
}


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.norm(x)).softmax(-1)


@pytest.mark.parametrize("system", SYSTEMS)
def test_systems_that_take_a_model(system, fresh_compiler):
    model, plain, _ = pair(Head)
    taken = SYSTEMS[system](model)
    assert_same(results(taken, [X]), results(plain, [X]))
    if system == "trace":
        assert "fused::linear" in str(taken.inlined_graph)


def test_a_compiled_model_follows_its_marks(fresh_compiler):
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    model, _, _ = pair(Head)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for is_fused in (True, False, True):
        compiled(X)
        assert ("fused.linear" in graphs[-1]) is is_fused
        tfl.unfuse_(model) if is_fused else tfl.fuse_(model, linear=True)
    model.head.register_forward_hook(lambda *args: None)
    tfl.fuse_(model)
    compiled(X)
    assert "fused.linear" not in graphs[-1]
