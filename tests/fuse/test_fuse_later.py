"""What is done to a model before and after fuse_ has the meaning that it has in plain torch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fused_models import results
from helpers import one_thread  # noqa: F401
from stacks import assert_same
from torch import nn
from torch.nn.utils import parametrizations, prune

import torch_fused_linear as tfl
from torch_fused_linear import _library, functional
from torch_fused_linear.fuse import call as forms
from torch_fused_linear.fuse import in_code

X = [torch.randn(4, 6, dtype=torch.float64)]


@pytest.fixture(params=["C", "Python"], autouse=True)
def decides(request, monkeypatch):
    """What looks at layers and activations; Python does where C cannot be had."""
    if request.param == "Python":
        for name in in_code.IN_C:
            monkeypatch.setattr(in_code, name, getattr(forms, name))
        monkeypatch.setattr(functional, "direct", _library._NotDirect())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)

    def forward(self, x):
        h = self.fc1(x)
        h = self.act(h)
        return self.fc2(h)


def chain():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))


def operators(model, x=X[0]):
    with torch.no_grad(), tfl.explain() as calls:
        model(x)
    return [c.operator for c in calls.calls]


class Functions(Block):
    def forward(self, x):
        return F.relu(self.fc1(x))


class Lora(nn.Module):
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


def put(model, name, number, module):
    if isinstance(model, nn.Sequential):
        model[number] = module
    else:
        setattr(model, name, module)


def wrap(model):
    put(model, "fc1", 0, Lora(first(model)))


def subclass(model):
    first(model).__class__ = LoraLinear


def weight_class(model):
    weight = first(model).weight.detach().as_subclass(Doubled)
    first(model).weight = nn.Parameter(weight, requires_grad=False)


def other_function(model):
    first(model).forward = lambda x: x + 1


def in_another_mode(model):
    put(model, "act", 1, nn.GELU("tanh"))


CHANGES = {
    "LoRA": wrap,
    "child of nn.Linear": subclass,
    "weight of another class": weight_class,
    "exchanged": lambda m: put(m, "fc1", 0, nn.Linear(6, 6, bias=False).double()),
    "no layer": lambda m: put(m, "fc1", 0, nn.Tanh()),
    "other activation": lambda m: put(m, "act", 1, nn.SiLU()),
    "GELU": in_another_mode,
    "tied": lambda m: setattr(first(m), "weight", list(m.children())[2].weight),
    "frozen": lambda m: first(m).requires_grad_(False),
    "forward of its own": other_function,
    "forward hook": lambda m: first(m).register_forward_hook(lambda *a: a[2] * 2),
    "forward pre hook": lambda m: first(m).register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
    "backward hook": lambda m: first(m).register_full_backward_hook(lambda m, i, o: (i[0] * 2,)),
    "weight norm": lambda m: parametrizations.weight_norm(first(m)),
    "old weight norm": lambda m: nn.utils.weight_norm(first(m)),
    "pruned": lambda m: prune.l1_unstructured(first(m), "weight", 0.5),
    "hook of the activation": lambda m: list(m.children())[1].register_forward_hook(
        lambda *a: a[2] + 1
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", [chain, Block])
@pytest.mark.parametrize("change", CHANGES)
def test_any_order(change, make):
    for is_first in (False, True):
        torch.manual_seed(0)
        model = make().double()
        plain = copy.deepcopy(model)
        for one, steps in ((plain, (change,)), (model, (change, "") if is_first else ("", change))):
            for step in steps:
                torch.manual_seed(1)
                CHANGES[step](one) if step else tfl.fuse_(one)
        assert_same(results(model, X), results(plain, X), f"{change}, first: {is_first}")
        if change not in ("forward of its own", "weight of another class", "old weight norm"):
            compiled = torch.compile(model, backend="eager")
            assert_same([compiled(*X)], [plain(*X)])
            torch._dynamo.reset()
        tfl.unfuse_(model)
        assert_same(results(model, X), results(plain, X))


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
    model = chain().double()
    plain = copy.deepcopy(model)
    tfl.fuse_(model)
    model, plain = (EDITS[edit](m) or m for m in (model, plain))
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
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5, inplace=True), nn.ReLU()).double()
    plain = copy.deepcopy(model)
    assert tfl.fuse_(model).fused
    assert_same(results(model, X), results(plain, X))
    assert operators(model) == ["linear"]  # torch draws other numbers in place
    assert operators(model.eval()) == ["linear_relu"]


def test_a_child_of_a_sequential_used_apart():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([chain(), chain()])
            self.alias = [self.blocks[0][0]]

        def forward(self, x):
            for block in self.blocks:
                before = next(block.children())(x)
                x = block(x) + before + self.alias[0](x) + getattr(block, "2")(x)
            return x

    model = Apart().double()
    plain = copy.deepcopy(model)
    assert len(tfl.fuse_(model).fused) == 2
    assert_same(results(model, X), results(plain, X))


def test_global_hooks_see_every_module():
    model = Block().double()
    tfl.fuse_(model)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *a: seen.append(m))
    try:
        model(*X)
    finally:
        handle.remove()
    assert seen == [model.fc1, model.act, model.fc2, model]
    assert operators(model) == ["linear_relu", "linear"]


def test_what_replaces_torchs_functions_is_called(monkeypatch):
    model = Block().double()
    tfl.fuse_(model)
    monkeypatch.setattr(F, "linear", lambda x, w, b: torch.zeros(4, 6))
    torch.testing.assert_close(model(*X), torch.zeros(4, 6))
    functions = Functions().double()
    tfl.fuse_(functions)
    torch.testing.assert_close(functions(*X), torch.zeros(4, 6))
    monkeypatch.undo()
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x)
    torch.testing.assert_close(model(*X), model.fc2(model.fc1(*X)))


@pytest.mark.parametrize("owner, name", [(torch, "relu"), (nn.Module, "_call_impl")])
def test_what_replaces_what_they_call_is_called(owner, name, monkeypatch):
    model = Block().double()
    plain = copy.deepcopy(model)
    tfl.fuse_(model)
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: original(*args) + 1)
    torch.testing.assert_close(model(*X), plain(*X))


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result + 1 if function is F.linear else result


def test_function_modes_see_torchs_functions():
    model = Block().double()
    plain = copy.deepcopy(model)
    tfl.fuse_(model)
    with Mode():
        assert_same([model(*X)], [plain(*X)])
    with torch.device("cpu"):  # torch's own, which looks for factories
        assert operators(model) == ["linear_relu", "linear"]


WRONG = {
    "size": torch.randn(4, 7).double(),
    "dtype": torch.randn(4, 6),
    "whole numbers": torch.ones(4, 6, dtype=torch.long),
    "scalar": torch.tensor(1.0).double(),
    "no tensor": None,
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_are_torchs_own(what):
    for make in (chain, Block):
        model = make().double()
        plain = copy.deepcopy(model)
        tfl.fuse_(model)
        with pytest.raises(Exception) as theirs:
            plain(WRONG[what])
        with pytest.raises(type(theirs.value)) as ours:
            model(WRONG[what])
        assert str(ours.value) == str(theirs.value)


def test_the_order_in_which_things_are_looked_up():
    """A hook of the layer that exchanges the activation takes effect, as it always did."""

    class Nested(Block):
        def forward(self, x):
            return self.act(self.fc1(x))

    for cls in (Block, Nested):
        model = cls().double()
        plain = copy.deepcopy(model)
        tfl.fuse_(model)
        for m in (model, plain):
            m.fc1.register_forward_hook(lambda *a, m=m: setattr(m, "act", nn.Tanh()))
        assert_same([model(*X), model(*X)], [plain(*X), plain(*X)])


def test_functional_transforms():
    model = Block().double()
    plain = copy.deepcopy(model)
    tfl.fuse_(model)
    state = {name: 2 * value for name, value in plain.state_dict().items()}
    with tfl.explain() as calls:
        got = torch.func.functional_call(model, state, tuple(X))
    torch.testing.assert_close(got, torch.func.functional_call(plain, state, tuple(X)))
    assert len(calls.calls) == 2
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.vmap):
        torch.testing.assert_close(transform(model)(*X), transform(plain)(*X))
    graph = torch.fx.symbolic_trace(model)
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["fc1", "act", "fc2"]
    torch.testing.assert_close(graph(*X), plain(*X))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = Block()
    plain, x = copy.deepcopy(model), X[0].float()
    tfl.fuse_(model)
    with torch.autocast("cpu", dtype):
        got, want = model(x), plain(x)
        assert operators(model, x.to(dtype)) == ["linear_relu", "linear"]
    assert got.dtype == want.dtype == dtype
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)
