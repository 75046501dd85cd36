"""What is done to a model before and after fuse_ has the meaning that it has in plain torch.

What C refuses is asked of Python, so that both are held to what they accept.
"""

import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from fused_models import Block, Gated, chain, operators, results
from helpers import one_thread  # noqa: F401
from stacks import assert_same
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, prune

import torch_fused_linear as tfl

X = [torch.randn(4, 6, dtype=torch.float64)]


class ByMethod(Block):
    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


class Halves(Gated):
    def forward(self, x):
        gate, up = self.fc1(x).chunk(2, self.axis)
        h = up * self.act(gate) if self.training else self.act(up) * gate
        return self.fc2(torch.cat([h, h], -1)) + h.sum()


def pair(make):
    torch.manual_seed(0)
    plain = make().double()
    model = copy.deepcopy(plain)
    assert tfl.fuse_(model).fused
    return model, plain


class AdaptedLinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(6, 6).double()

    def forward(self, x):
        return self.base(x) + self.down(x)


class LoraLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Doubled(torch.Tensor):
    """A weight of another class, as quantised ones are."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [a.as_subclass(torch.Tensor) if isinstance(a, cls) else a for a in args]
        if function is F.linear:
            plain[1] = plain[1] * 2
        result = function(*plain, **(kwargs or {}))
        is_kept = function.__name__ in ("detach", "requires_grad_")
        return result.as_subclass(cls) if is_kept else result


def first(model):
    return model[0] if isinstance(model, nn.Sequential) else model.fc1


def act(model):
    return model[1] if isinstance(model, nn.Sequential) else model.act


def put(model, name, number, module):
    if isinstance(model, nn.Sequential):
        model[number] = module
    else:
        setattr(model, name, module)


def weight_class(model):
    weight = first(model).weight.detach().as_subclass(Doubled)
    first(model).weight = nn.Parameter(weight, requires_grad=False)


NOT_LINEAR = "is not exactly nn.Linear"
# The change, and the reason that the report of a later fuse_ gives where there is one.
CHANGES = {
    "adapter": (lambda m: put(m, "fc1", 0, AdaptedLinear(first(m))), f"AdaptedLinear {NOT_LINEAR}"),
    "child of nn.Linear": (lambda m: setattr(first(m), "__class__", LoraLinear), NOT_LINEAR),
    "weight of another class": (weight_class, "Doubled, not a plain nn.Parameter|Parameter"),
    "exchanged": (lambda m: put(m, "fc1", 0, nn.Linear(6, 6, bias=False).double()), ""),
    "no layer": (lambda m: put(m, "fc1", 0, nn.Tanh()), ""),
    "other activation": (lambda m: put(m, "act", 1, nn.SiLU()), ""),
    "another kind": (lambda m: put(m, "act", 1, nn.GELU("tanh")), ""),
    "no activation": (lambda m: put(m, "act", 1, nn.Tanh()), "Tanh: only ReLU, squared ReLU, GELU"),
    "tied": (lambda m: setattr(first(m), "weight", list(m.children())[2].weight), ""),
    "frozen": (lambda m: first(m).requires_grad_(False), ""),
    "forward of its own": (lambda m: setattr(first(m), "forward", lambda x: x + 1), "of its own"),
    "forward hook": (lambda m: first(m).register_forward_hook(lambda *a: a[2] * 2), "forward hook"),
    "forward pre hook": (
        lambda m: first(m).register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
        "forward pre hooks",
    ),
    "backward hook": (
        lambda m: first(m).register_full_backward_hook(lambda m, i, o: (i[0] * 2,)),
        "backward hooks",
    ),
    "weight norm": (lambda m: parametrizations.weight_norm(first(m)), "parametrisation"),
    "old weight norm": (lambda m: nn.utils.weight_norm(first(m)), "forward pre hooks"),
    "pruned": (lambda m: prune.l1_unstructured(first(m), "weight", 0.5), "forward pre hooks"),
    "hook of the activation": (
        lambda m: act(m).register_forward_hook(lambda *a: a[2] + 1),
        "the activation has forward hooks",
    ),
    "activation exchanged by a hook": (
        lambda m: first(m).register_forward_hook(lambda *a: put(m, "act", 1, nn.Tanh())),
        "forward hooks",
    ),
}
OF_A_GATE = {
    "up exchanged": lambda m: setattr(m, "up", LoraLinear(6, 6).double()),
    "up broadcast": lambda m: setattr(m, "up", nn.Linear(6, 1).double()),
    "down exchanged": lambda m: setattr(m, "fc2", LoraLinear(6, 6).double()),
    "dropout": lambda m: setattr(m.drop, "p", 0.5),
    "chunks of rows": lambda m: setattr(m, "axis", 0),
    "odd features": lambda m: setattr(m, "fc1", nn.Linear(6, 5).double()),
}
ROWS = [(make, name) for make in (chain, Block, Gated, Halves) for name in CHANGES]
ROWS += [(make, name) for make in (Gated, Halves) for name in OF_A_GATE]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("make, name", ROWS)
def test_any_order(make, name, is_first):
    change, reason = CHANGES[name] if name in CHANGES else (OF_A_GATE[name], "")
    torch.manual_seed(0)
    model = make().double()
    plain = copy.deepcopy(model)
    report = None if is_first else tfl.fuse_(model)
    for net in (plain, model):
        torch.manual_seed(1)
        change(net)
    if is_first:
        report = tfl.fuse_(model)
        reasons = [s.reason for s in report.skipped]
        assert make is Halves or any(re.search(reason, r) for r in [*reasons, ""]), reasons
    assert_same_outcome(model, plain)
    if make is chain and name not in ("weight of another class", "old weight norm"):
        assert_same([torch.compile(model, backend="eager")(*X)], [plain(*X)])
        torch._dynamo.reset()
    tfl.unfuse_(model)
    assert_same_outcome(model, plain)


def assert_same_outcome(model, plain):
    """Results and gradients, or the error that torch raises, in the same words."""
    outcomes = []
    for net in (model, plain):
        try:
            outcomes.append((results(net, X), ""))
        except RuntimeError as error:
            outcomes.append(([], str(error)))
    assert outcomes[0][1] == outcomes[1][1]
    assert_same(outcomes[0][0], outcomes[1][0])


def test_what_hooks_of_a_gate_see_comes_in_the_order_in_which_it_is_written():
    seen = []
    for net in pair(Gated):
        for name, child in net.named_children():
            child.register_forward_hook(
                lambda *args, n=name: seen.append((n, args[2].sum().item()))
            )
        net(*X)
    assert len(seen) == 10 and seen[:5] == seen[5:]


EDITS = {
    "insert": lambda m: m.insert(1, nn.LayerNorm(6).double()),
    "append": lambda m: m.append(nn.ReLU()),
    "delete": lambda m: m.__delitem__(1),
    "slice": lambda m: m[:1],
    "slices": lambda m: m[1:3],
    "sum": lambda m: m + nn.Sequential(nn.ReLU()),
    "training dropout": lambda m: m.insert(1, nn.Dropout(0.5)),
    "dropout in place": lambda m: m.insert(1, nn.Dropout(0.5, inplace=True)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_sequential_runs_its_children_as_they_are(edit):
    model, plain = (EDITS[edit](m) or m for m in pair(chain))
    assert_same(results(model, X), results(plain, X))
    model.eval(), plain.eval()
    for changed in (
        torch.compile(model, backend="aot_eager", fullgraph=True),
        torch.jit.script(model),
        torch.export.export(model, tuple(X)).module(),
    ):
        torch.testing.assert_close(changed(*X), plain(*X))
    torch._dynamo.reset()


def test_dropout_in_place_before_relu():
    layers = nn.Linear(6, 6), nn.Dropout(0.5, inplace=True), nn.ReLU()
    model, plain = pair(lambda: nn.Sequential(*layers))
    assert_same(results(model, X), results(plain, X))
    assert operators(model, *X) == ["linear"]  # torch draws other numbers in place
    assert operators(model.eval(), *X) == ["linear_relu"]


PATCHES = [
    *((cls, name) for cls in (nn.Linear, nn.ReLU, nn.Dropout)
      for name in ("forward", "__call__", "_call_impl")),
    *((nn.Module, name) for name in ("__call__", "_call_impl")),
    *((torch.Tensor, "relu"), (F, "relu"), (F, "linear"), (torch, "relu")),
]  # fmt: skip


@pytest.mark.parametrize("owner, name", PATCHES, ids=lambda p: getattr(p, "__name__", p))
@pytest.mark.parametrize("make", [Block, ByMethod, Gated, chain])
def test_functions_that_are_exchanged_later_are_seen(make, owner, name, monkeypatch):
    model, plain = pair(make)
    original, counts = getattr(owner, name), []

    def watching(*args, **kwargs):
        counts.append(1)
        result = original(*args, **kwargs)
        return result * 2 if torch.is_tensor(result) else result

    monkeypatch.setattr(owner, name, watching)
    got = model(*X)
    ours = len(counts)
    assert torch.equal(got, plain(*X)) and len(counts) == 2 * ours
    if ours and owner is not nn.Dropout:
        fused = {"linear_relu", "gated_mlp", *["linear_gelu"] * (owner is not nn.ReLU)}
        assert not fused & {*operators(model, *X)}


@pytest.mark.parametrize("cls", [nn.Dropout, nn.Identity])
def test_a_dropout_that_is_exchanged_for_all_is_seen(cls, monkeypatch):
    model, plain = pair(lambda: nn.Sequential(nn.Linear(6, 6), cls(), nn.ReLU(), nn.Linear(6, 6)))
    monkeypatch.setattr(cls, "forward", lambda self, x: x - 0.25)
    assert_same(results(model, X), results(plain, X))


@pytest.mark.parametrize("name", ["forward", "_call_impl"])
@pytest.mark.parametrize("child", ["fc1", "act", "fc2", "up", "drop"])
def test_functions_that_are_set_on_an_object_are_seen(child, name):
    model, plain = pair(Gated)
    for net in (model, plain):
        module = getattr(net, child)
        original = getattr(module, name)
        setattr(module, name, functools.partial(lambda run, x: run(x) * 3, original))
    assert_same(results(model, X), results(plain, X))


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result + 1 if function is F.linear else result


def test_function_modes_see_torchs_functions():
    model, plain = pair(Block)
    with Mode():
        assert_same([model(*X)], [plain(*X)])
    with torch.device("cpu"):  # torch's own, which looks for factories
        assert operators(model, *X) == ["linear_relu", "linear"]


WRONG = {
    "size": torch.randn(4, 7).double(),
    "dtype": torch.randn(4, 6),
    "whole numbers": torch.ones(4, 6, dtype=torch.long),
    "scalar": torch.tensor(1.0).double(),
    "no tensor": None,
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("make", [chain, Block, Gated, Halves])
def test_errors_are_torchs_own(make, what):
    model, plain = pair(make)
    with pytest.raises(Exception) as theirs:
        plain(WRONG[what])
    with pytest.raises(type(theirs.value)) as ours:
        model(WRONG[what])
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("make", [chain, Block, Gated, Halves])
def test_functional_transforms(make):
    model, plain = (net.eval() for net in pair(make))
    state = {name: 2 * value for name, value in plain.state_dict().items()}
    with tfl.explain() as calls:
        got = torch.func.functional_call(model, state, tuple(X))
    torch.testing.assert_close(got, torch.func.functional_call(plain, state, tuple(X)))
    assert calls.calls
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian, torch.vmap):
        torch.testing.assert_close(transform(model)(*X), transform(plain)(*X))
    graph = torch.fx.symbolic_trace(model)
    called = [n.target for n in graph.graph.nodes if n.op == "call_module"]
    assert called == [
        n.target for n in torch.fx.symbolic_trace(plain).graph.nodes if n.op == "call_module"
    ]
    torch.testing.assert_close(graph(*X), plain(*X))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [Block, Gated])
def test_autocast(make, dtype):
    model, plain = (net.float() for net in pair(make))
    x = X[0].float()
    with torch.autocast("cpu", dtype):
        got, want = model(x), plain(x)
        assert operators(model, x.to(dtype))
    assert got.dtype == want.dtype == dtype
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.fc, self.act = quantization.QuantStub(), nn.Linear(6, 6), nn.ReLU()
        self.dequant = quantization.DeQuantStub()

    def forward(self, x):
        return self.dequant(self.act(self.fc(self.quant(x))))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("turn", range(4))
def test_eager_quantisation_in_any_order(turn):
    def run(net, fuses):
        steps = [
            lambda: quantization.fuse_modules(net, [["fc", "act"]], inplace=True),
            lambda: quantization.prepare(net, inplace=True) and net(X[0].float()),
            lambda: quantization.convert(net, inplace=True),
        ]
        for step in [*steps[:turn], *[lambda: tfl.fuse_(net)] * fuses, *steps[turn:]]:
            step()
        return net(X[0].float())

    plain = Quantised().eval()
    plain.qconfig = quantization.get_default_qconfig("qnnpack")
    model = copy.deepcopy(plain)
    torch.testing.assert_close(run(model, True), run(plain, False))
    assert type(model.fc) is type(plain.fc)
