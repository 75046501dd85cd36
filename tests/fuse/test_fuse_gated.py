"""fuse_ on gated layers: act(gate(x)) * up(x), written as models write it."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from fused_models import assert_fuses, gated, results
from helpers import one_thread  # noqa: F401
from stacks import assert_same
from torch import nn

import torch_fused_linear as tfl
from torch_fused_linear.fuse import call as forms
from torch_fused_linear.fuse import in_code

SILU, TANH, ERF = (f"gated_mlp ({act})" for act in ("SiLU", "GELU (tanh)", "GELU (erf)"))
GLU = "linear_glu (GELU (tanh))"


# --- blocks written in one way or another -------------------------------------------------------


class Block(nn.Module):
    def __init__(self, form, act=None, bias=True):
        super().__init__()
        self.w1, self.w3 = nn.Linear(6, 8, bias), nn.Linear(6, 8, bias)
        self.both, self.w2 = nn.Linear(6, 16, bias), nn.Linear(8, 5, bias)
        self.act, self.drop, self.axis = act or nn.SiLU(), nn.Dropout(0.0), -1
        self.__class__ = form


class Torchtune(Block):
    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class UpFirst(Block):
    def forward(self, x):
        return self.w2(self.w3(x) * self.act(self.w1(x)))


class Statements(Block):
    def forward(self, x):
        up = self.w3(x)
        gate = self.w1(x)
        gate = self.act(gate)
        hidden = self.drop(up * gate)
        return self.w2(hidden)


class Alone(Block):
    def forward(self, x):
        gate = F.gelu(self.w1(x), approximate="tanh")
        return (gate * self.w3(x)).tanh()


class ByName(Block):
    def forward(self, x):
        gate = F.silu(input=self.w1(input=x))
        return self.w2(input=gate * self.w3(x))


class Method(Block):
    def forward(self, x):
        return self.w2(self.w1(x).relu() * self.w3(x))


class Several(Block):
    """Lines and brackets within the calls."""

    def forward(self, x):
        return self.w2(
            (
                self.act(
                    self.w1(
                        x,
                    )
                )
            )
            * (self.w3(x))
        )


class Chunks(Block):
    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.w2(self.act(gate) * up)


class ChunksUpFirst(Block):
    def forward(self, x):
        h = self.both(x)
        up, h = h.chunk(2, self.axis)
        h = up * self.act(h)
        h = self.w2(h)
        return h


class TorchChunk(Block):
    def forward(self, x):
        up, gate = torch.chunk(self.both(x), 2, -1)
        return self.w2(up * self.act(gate))


class Branches(Block):
    def forward(self, x):
        a, b = self.both(x).chunk(2, self.axis)
        h = a * self.act(b) if self.training else self.act(a) * b
        return self.w2(h)


FORMS = {
    **dict.fromkeys((Torchtune, UpFirst, Statements, Several, Chunks), SILU),
    **dict.fromkeys((ChunksUpFirst, TorchChunk, Branches), SILU),
    Method: "gated_mlp (ReLU)",
    Alone: GLU,
}
X = torch.randn(2, 3, 6, dtype=torch.float64)


def block(form, **options):
    torch.manual_seed(0)
    return Block(form, **options).double()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "without"])
def test_forms(form, bias):
    model = assert_fuses(lambda: block(form, bias=bias), [X], 1, 0)
    plain = block(form, bias=bias)
    plain.load_state_dict(model.state_dict())
    assert tfl.fuse_(tfl.unfuse_(model) or model).fused[0].after == (FORMS[form],)
    want = results(plain, [X])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(results(other, [X]), want)
        tfl.unfuse_(other)
        assert type(other) is form
    with tfl.explain() as calls:
        results(model, [X])
    name = FORMS[form].split()[0]
    assert f"{name} " in str(calls) or "_glu_backward" in str(calls), calls


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_scripted_compiled_and_exported(form):
    model = block(form).eval()
    want = model(X)
    tfl.fuse_(model)
    exported = torch.export.export(model, (X,))
    torch._dynamo.reset()
    made = [torch.compile(model, backend="eager", fullgraph=True), exported.module()]
    graphs = [str(exported.graph)]
    if form not in (Branches, ChunksUpFirst, TorchChunk):  # gate is the second half, or either
        made.append(torch.jit.script(model))
        tfl.fuse_script_(made[-1])
        graphs.append(str(made[-1].inlined_graph))
    for other in made:
        torch.testing.assert_close(other(X), want)
    names = [FORMS[form].split()[0]] * len(graphs)
    if form is Statements:  # beyond whose dropout the graph's operator does not reach
        names[-1] = "linear_glu"
    assert all(name in graph for name, graph in zip(names, graphs))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_decided_in_python(form, monkeypatch):
    for name in in_code.IN_C:
        monkeypatch.setattr(in_code, name, getattr(forms, name))
    assert_fuses(lambda: block(form), [X], 1, 0)


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        for name, i, o in (("gates", 6, 8), ("ups", 6, 8), ("downs", 8, 6)):
            setattr(self, name, nn.ModuleList(nn.Linear(i, o) for _ in range(3)))
        self.act = nn.SiLU()

    def forward(self, x):
        for gate, up, down in zip(self.gates, self.ups, self.downs):
            x = x + down(self.act(gate(x)) * up(x))
        return x


class Experts(nn.Module):
    """Each token goes to one of them; how many each gets is its own affair."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(block(Torchtune) for _ in range(4))

    def forward(self, x, chosen):
        y = x.new_zeros(len(x), 5)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]))
        return y


def test_layers_in_a_loop():
    assert_fuses(Loop, [X], 1, 0)
    model = Loop()
    report = tfl.fuse_(model, filter_fn=lambda name, layer: name != "ups.1")
    assert report.fused[0].layers == ("gates.0", "ups.0", "downs.0", "gates.2", "ups.2", "downs.2")
    plain = copy.deepcopy(model)
    tfl.unfuse_(plain)
    assert_same(results(model, [X.float()]), results(plain, [X.float()]))


@pytest.mark.parametrize("counts", [(4, 1, 0, 2), (0, 0, 7, 0), (0, 0, 0, 0)], ids=str)
def test_experts_of_unequal_and_no_tokens(counts):
    chosen = torch.arange(4).repeat_interleave(torch.tensor(counts))
    x = torch.randn(len(chosen), 6, dtype=torch.float64)
    fused, plain = Experts(), Experts()
    assert gated(tfl.fuse_(fused)) == [SILU] * 4
    assert_same(results(fused, [x, chosen]), results(plain, [x, chosen]))


def timm_block(name, **options):
    layers = pytest.importorskip("timm").layers
    return lambda: getattr(layers, name)(6, 8, bias=True, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SwiGLU", {}),
        ("SwiGLUPacked", {}),
        ("GluMlp", {"act_layer": nn.SiLU}),  # which has gate last
        ("GluMlp", {"act_layer": nn.GELU, "gate_last": False}),
        ("SwiGLU", {"norm_layer": nn.LayerNorm}),
    ],
)
def test_blocks_of_timm(name, options):
    make = timm_block(name, **options)
    assert_fuses(make, [X], 1, 0)
    has_norm = "norm_layer" in options
    assert gated(tfl.fuse_(make()))[0].startswith("linear_glu" if has_norm else "gated_mlp")


def test_a_convolution_or_sigmoid_in_timms_block_is_left_alone():
    for options, x in (({}, X), ({"use_conv": True, "act_layer": nn.SiLU}, X.reshape(1, 6, 2, 3))):
        fused = timm_block("GluMlp", **options)().double()
        plain = copy.deepcopy(fused)
        assert not gated(tfl.fuse_(fused))
        assert_same(results(fused, [x]), results(plain, [x]))


def test_eva_of_timm():
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 2, "num_heads": 2}
    for packed in (True, False):
        options = {"swiglu_mlp": True, "scale_mlp": not packed, "mlp_ratio": 2}
        fused = timm.models.eva.Eva(**sizes, **options, num_classes=3).double()
        plain = copy.deepcopy(fused)
        assert len(gated(tfl.fuse_(fused))) == 2
        image = [torch.randn(1, 3, 8, 8, dtype=torch.float64)]
        assert_same(results(fused, image), results(plain, image))


# --- what is not plain, when it is fused or later -----------------------------------------------


class Lora(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def hooked(model, layer, seen):
    getattr(model, layer).register_forward_hook(lambda m, i, o: seen.append(layer))


CHANGES = {
    **{f"hook on {layer}": lambda m, s, n=layer: hooked(m, n, s) for layer in ("w1", "w3", "w2")},
    "hooks on all": lambda m, s: [hooked(m, n, s) for n in ("w1", "w3", "w2", "act", "both")],
    "other activation": lambda m, s: setattr(m, "act", nn.Tanh()),
    "other kind": lambda m, s: setattr(m, "act", nn.GELU()),
    "up exchanged": lambda m, s: setattr(m, "w3", Lora(6, 8)),
    "down exchanged": lambda m, s: setattr(m, "w2", Lora(8, 5)),
    "both exchanged": lambda m, s: setattr(m, "both", Lora(6, 16)),
    "up broadcast": lambda m, s: setattr(m, "w3", nn.Linear(6, 1)),
    "gate frozen": lambda m, s: m.w1.requires_grad_(False),
    "dropout": lambda m, s: setattr(m.drop, "p", 0.5),
    "chunks of rows": lambda m, s: setattr(m, "axis", 0),
    "weight norm": lambda m, s: nn.utils.parametrizations.weight_norm(m.w3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", [Torchtune, Statements, Chunks, Branches], ids=str)
def test_what_changes_later_runs_as_it_is_written(form, change):
    fused, plain, seen = block(form), block(form), []
    assert tfl.fuse_(fused).fused
    outcomes = []
    for model in (fused, plain):
        torch.manual_seed(1)
        CHANGES[change](model, seen)
        model = model.double()
        try:
            outcomes.append((results(model, [X[:, :2]]), list(seen)))
        except RuntimeError as error:  # chunks of rows do not fit the layer after them
            outcomes.append(([torch.zeros(())], [str(error)]))
        seen.clear()
    (got, log), (want, expected) = outcomes
    assert log == expected, "in the order in which they are written"
    assert_same(got, want)


def test_a_factor_that_is_refused_leaves_the_other_to_linear_silu():
    model = block(Torchtune)
    report = tfl.fuse_(model, filter_fn=lambda name, layer: name != "w3")
    assert [b.after for b in report.fused] == [("linear_silu",)]
    assert [(s.path, s.reason) for s in report.skipped] == [("w3", "filter_fn says no")]
    assert_same(results(model, [X]), results(block(Torchtune), [X]))


def test_a_last_layer_that_is_refused_leaves_the_gated_layer():
    model = block(Torchtune)
    report = tfl.fuse_(model, filter_fn=lambda name, layer: name != "w2")
    assert [b.after for b in report.fused] == [("linear_glu (SiLU)",)]
    assert [(s.path, s.reason) for s in report.skipped] == [("w2", "filter_fn says no")]
    assert_same(results(model, [X]), results(block(Torchtune), [X]))


class ReadElsewhere(Block):
    def forward(self, x):
        gate = self.act(self.w1(x))
        up = self.w3(x)
        return self.w2(gate * up) + gate.sum()


class OtherInput(Block):
    def forward(self, x):
        y = x + 1
        return self.w2(self.act(self.w1(x)) * self.w3(y))


class CalledBetween(Block):
    def forward(self, x):
        gate = self.w1(x)
        self.drop(x)
        return self.w2(self.act(gate) * self.w3(x))


class Exchanged(Block):
    def forward(self, x):
        layer = self.w1
        gate = layer(x)
        layer = self.w3
        return self.w2(self.act(gate) * layer(x))


class ThreeChunks(Block):
    def forward(self, x):
        gate, up, rest = self.both(x)[..., :15].chunk(3, -1)
        return self.act(gate) * up + rest


class SameHalf(Block):
    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.w2(self.act(gate) * gate) + up.sum()


class Watched(Block):
    def forward(self, x):
        gate = self.act(self.w1(x))
        up = self.w3(x)
        assert "gate" in locals()
        return self.w2(gate * up)


OTHERS = [
    ByName,
    ReadElsewhere,
    OtherInput,
    CalledBetween,
    Exchanged,
    ThreeChunks,
    SameHalf,
    Watched,
]


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.__name__)
def test_what_is_no_gated_layer(form):
    model = block(form)
    assert not gated(tfl.fuse_(model))
    assert_same(results(model, [X]), results(block(form), [X]))


def test_the_report_and_its_picture(tmp_path):
    model = nn.ModuleList([block(Torchtune), block(Chunks, bias=False), block(Alone)])
    dry = tfl.fuse_(model, dry_run=True)
    assert {type(m) for m in model} == {Torchtune, Chunks, Alone}
    report = tfl.fuse_(model, memory="low")  # which gated layers do not have
    assert [b.layers for b in dry.fused] == [b.layers for b in report.fused]
    first, second, third = report.fused
    assert first.layers == ("0.w1", "0.w3", "0.w2")
    parts = ["MatMul", "BiasAdd", "SiLU", "MatMul", "BiasAdd", "Mul", "MatMul", "BiasAdd"]
    assert first.before == tuple(parts)
    assert second.layers == ("1.both", "1.w2")
    assert second.before == ("MatMul", "Chunk", "SiLU", "Mul", "MatMul")
    assert third.after == ("linear_glu (GELU (tanh))",)
    assert first.place.endswith(f":{line_of('self.w2(self.act(self.w1')}")
    report.save_picture(path := tmp_path / "blocks.svg")
    text = path.read_text()
    assert text.count("gated_mlp (SiLU)") == 2 and "linear_glu" in text


def line_of(text):
    with open(__file__) as file:
        return next(k for k, line in enumerate(file, 1) if text in line)
