"""Changes of a model before and after fuse_ mean what they mean in plain torch.

What C refuses is asked of Python, so that both are held to what they accept.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from fused_models import Block, Gated, chain, operators, pair
from processes import run_python
from stacks import assert_same
from torch import nn
from torch.ao import quantization
from tree_changes import PATCHED, patched
from tree_compare import SYSTEMS, assert_runs_the_same, attempt

import torch_fused_linear as tfl
from torch_fused_linear.fuse import plain

X = [torch.randn(4, 6, dtype=torch.float64)]


class ByMethod(Block):
    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


class Halves(Gated):
    def forward(self, x):
        gate, up = self.fc1(x).chunk(2, self.axis)
        h = up * self.act(gate) if self.training else self.act(up) * gate
        return self.fc2(torch.cat([h, h], -1)) + h.sum()


class Chunks(Gated):
    def forward(self, x):
        gate, up = torch.chunk(self.fc1(x), 2, dim=-1)
        return (self.act(gate) * up).sum(-1)


def dropped():
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Identity(), nn.ReLU())


FORMS = (chain, Block, Gated, Halves)


def test_dropout_in_place_before_relu():
    layers = nn.Linear(6, 6), nn.Dropout(0.5, inplace=True), nn.ReLU()
    model, plain = pair(lambda: nn.Sequential(*layers))
    assert_runs_the_same(model, plain, X[0], "dropout in place")
    model.train()
    assert operators(model, *X) == ["linear"]  # torch draws other numbers in place
    assert operators(model.eval(), *X) == ["linear_relu"]


@pytest.mark.parametrize("owner, name", PATCHED, ids=lambda p: getattr(p, "__name__", p))
@pytest.mark.parametrize("make", [ByMethod, Gated, Halves, Chunks, chain, dropped])
def test_functions_that_are_exchanged_later_are_seen(make, owner, name):
    """In compiled code too, as far as torch.compile and export see them in the plain model."""
    model, plain = pair(make)
    with patched(owner, name):
        assert_runs_the_same(model, plain, X[0], f"another {name}")
        for system in ("compile eager", "export") if make in (ByMethod, Gated) else ():
            SYSTEMS[system](model, plain, X[0])


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["forward", "_call_impl"])
@pytest.mark.parametrize("child", ["fc1", "act", "fc2", "up", "drop"])
def test_functions_that_are_set_on_an_object_are_seen(child, name):
    model, plain = pair(Gated)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(*X), plain(*X))
    for net in (model, plain):
        module = getattr(net, child)
        original = getattr(module, name)
        setattr(module, name, functools.partial(lambda run, x: run(x) * 3, original))
    if name == "forward":  # torch.compile does not look for the other
        torch.testing.assert_close(compiled(*X), plain(*X))
    assert_runs_the_same(model, plain, X[0], f"{name} of {child}")


class Lent(dict):
    def __getitem__(self, name):
        return super().__getitem__(name) * 2


def image():
    return nn.Sequential(nn.Conv2d(1, 1, 1, padding="same", bias=False), nn.ReLU())


@pytest.mark.parametrize(
    "make, change",
    [
        (chain, lambda net: setattr(net[0], "_parameters", Lent(net[0]._parameters))),
        (image, lambda net: setattr(net[0], "weight", nn.Parameter(X[0][:3, :3].view(1, 1, 3, 3)))),
    ],
)
def test_attributes_that_a_layer_reads_may_change(make, change):
    model, plain = pair(make)
    change(model), change(plain)
    assert_runs_the_same(model, plain, X[0][None] if make is image else X[0], "changed")


def test_the_function_that_an_activation_holds_may_be_exchanged():
    kinds = pytest.importorskip("transformers.activations")
    for act in (kinds.GELUActivation(), kinds.GELUActivation(True), kinds.GELUTanh()):
        model, plain = pair(functools.partial(nn.Sequential, nn.Linear(6, 6), act))
        assert operators(model, *X) == ["linear_gelu"]
        model[1].act = plain[1].act = torch.tanh
        assert_runs_the_same(model, plain, X[0], "tanh")


PATCHED_BEFORE = """
import torch
from torch import nn
owner, name = {place}
plain = getattr(owner, name)
setattr(owner, name, lambda *args, **named: plain(*args, **named) + 1)
import torch_fused_linear as tfl
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
x = torch.randn(3, 4)
want = model(x)
tfl.fuse_(model)
assert torch.equal(model(x), want)
"""


@pytest.mark.parametrize(
    "place", ["nn.Linear, 'forward'", "nn.functional, 'relu'", "nn.ReLU, 'forward'"]
)
def test_functions_that_were_exchanged_before_the_import_are_seen(place):
    run_python(PATCHED_BEFORE.format(place=place))


class GateLast(Gated):
    def forward(self, x):
        up = self.up(x)
        return self.fc2(up * self.act(self.fc1(x)))


class InSteps(Gated):
    def forward(self, x):
        gate = self.fc1(x)
        up = self.up(x)
        gate = self.act(gate)
        return self.fc2(gate * up)


class ByIndex(Gated):
    def __init__(self):
        super().__init__()
        self.gates, self.ups = nn.ModuleList([self.fc1]), nn.ModuleList([self.up])

    def forward(self, x):
        for k in range(len(self.ups)):
            x = self.fc2(self.act(self.gates[0](x)) * self.ups[k](x))
        return x


class ByName(Gated):
    def forward(self, x):
        gate, up = self.fc1, self.up
        hidden = self.act(gate(x))
        return self.fc2(hidden * up(x))


class LateName(Gated):
    def forward(self, x):
        up = None
        hidden = self.act(self.fc1(x))
        up = self.up
        return self.fc2(hidden * up(x))


def hooked(net, name):
    getattr(net, name).register_forward_pre_hook(lambda _, args: (args[0].relu_(),))


def hidden(net, name):
    vars(net)[name] = nn.Sequential(nn.ReLU(inplace=True), getattr(net, name))


@pytest.mark.parametrize("change", [hooked, hidden])
@pytest.mark.parametrize("make", [Gated, GateLast, InSteps, ByIndex, ByName, LateName])
@pytest.mark.parametrize("name", ["up", "fc1"])
def test_a_layer_does_not_wait_for_one_that_writes_to_its_input(make, name, change):
    nets = pair(make)
    gate = operators(nets[0], *X)
    assert ("linear_glu" in gate or "gated_mlp" in gate) is (make is not LateName)
    for net in nets:
        change(net, name)
    for is_compiled in (False, True):
        with torch.no_grad():
            runs = [torch.compile(net, backend="eager") if is_compiled else net for net in nets]
            torch.testing.assert_close(*(run(X[0].clone()) for run in runs))


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result + 1 if function is F.linear else result


def test_function_modes_see_torchs_functions():
    model, plain = pair(Block)
    with Mode():
        assert_same([model(*X)], [plain(*X)])
    with torch.device("cpu"):  # torch's own, which looks for factories
        assert operators(model, *X) == ["mlp"]


WRONG = {
    "size": torch.randn(4, 7).double(),
    "dtype": torch.randn(4, 6),
    "whole numbers": torch.ones(4, 6, dtype=torch.long),
    "scalar": torch.tensor(1.0).double(),
    "no tensor": None,
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("make", FORMS)
def test_errors_are_torchs_own(make, what):
    model, plain = pair(make)
    with pytest.raises(Exception) as theirs:
        plain(WRONG[what])
    with pytest.raises(type(theirs.value)) as ours:
        model(WRONG[what])
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("word", ["\ud800", "tanh\0", "none\0x"])
def test_words_that_only_begin_as_known_ones(word):
    """Or that are no text in UTF-8, in which C reads them."""
    for make, name in ((Block, "approximate"), (image, "padding_mode")):
        outcomes = []
        for net in pair(make):
            net.act = nn.GELU()
            setattr(net.act if make is Block else net[0], name, word)
            x = X[0] if make is Block else X[0][None]
            outcomes.append(attempt(functools.partial(net, x)))
        assert isinstance(outcomes[1], Exception) and repr(outcomes[0]) == repr(outcomes[1])


@pytest.mark.parametrize("make", FORMS)
def test_functional_transforms(make):
    model, plain = (net.eval() for net in pair(make))
    state = {name: 2 * value for name, value in plain.state_dict().items()}
    with tfl.explain() as calls:
        got = torch.func.functional_call(model, state, tuple(X))
    torch.testing.assert_close(got, torch.func.functional_call(plain, state, tuple(X)))
    assert calls.calls
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian, torch.vmap):
        torch.testing.assert_close(transform(model)(*X), transform(plain)(*X))
    graphs = [torch.fx.symbolic_trace(net) for net in (model, plain)]
    called = [[n.target for n in g.graph.nodes if n.op == "call_module"] for g in graphs]
    assert called[0] == called[1]
    torch.testing.assert_close(graphs[0](*X), plain(*X))


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("turn", range(4))
def test_eager_quantisation_in_any_order(turn):
    def run(net, fuses):
        steps = [
            lambda: quantization.fuse_modules(net, [["module.fc1", "module.act"]], inplace=True),
            lambda: quantization.prepare(net, inplace=True) and net(X[0].float()),
            lambda: quantization.convert(net, inplace=True),
        ]
        for step in [*steps[:turn], *[lambda: tfl.fuse_(net)] * fuses, *steps[turn:]]:
            step()
        return net(X[0].float())

    plain = quantization.QuantWrapper(Block()).eval()
    plain.qconfig = quantization.get_default_qconfig("qnnpack")
    model = copy.deepcopy(plain)
    torch.testing.assert_close(run(model, True), run(plain, False))
    assert type(model.module.fc1) is type(plain.module.fc1)


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)
        self.drop, self.norm = nn.Dropout(0.0), nn.Identity()

    def forward(self, x):
        h = self.act(self.fc1(x))
        h = self.norm(self.drop(h))
        return self.fc2(h)


def test_what_is_no_layer_is_asked_for_no_mark_before_a_call(fresh_compiler):
    """A missing attribute of a module is the dearest thing that Dynamo tests: it asks Python."""
    model = Dropped()
    assert tfl.fuse_(model).fused
    torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 6))
    (entry,) = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(Dropped.forward.__code__)
    lines = [line for line in str(entry.guard_manager).splitlines() if plain.MARK in line]
    assert lines and not [line for line in lines if "hasattr" in line]
