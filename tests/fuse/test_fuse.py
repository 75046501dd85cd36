"""fuse_ and unfuse_: what changes in a model, what does not, and what they are given."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from fused_models import Snapshot, assert_fuses, chain, operators, results
from stacks import assert_same
from torch import nn
from torch.nn.utils import parametrize
from tree_parts import Positive

import torch_fused_linear as tfl
from torch_fused_linear.fuse.plain import MARK

X = [torch.randn(4, 6)]


class Net(nn.Module):
    """As people write them: one activation for all layers."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 7), nn.Linear(7, 8), nn.Linear(8, 3)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        return self.fc3(x)


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def of(*between, bias=True):
    return lambda: nn.Sequential(nn.Linear(6, 7, bias), *(make() for make in between))


def nested():
    blocks = (nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Identity()) for _ in "abc")
    return nn.Sequential(*blocks, nn.Sequential(nn.Linear(6, 3)))


last, dropout = partial(nn.Linear, 7, 3), partial(nn.Dropout, 0.5)
# maker, blocks, backward steps of two layers
MODELS = {
    "chain": (chain, 1, 1),
    "no next linear": (of(partial(nn.GELU, "tanh")), 1, 0),
    "no bias": (of(nn.ReLU, last, bias=False), 1, 1),
    "in place": (of(partial(nn.ReLU, inplace=True)), 1, 0),
    "nested": (nested, 3, 0),
    "two apart": (of(nn.ReLU, partial(nn.LayerNorm, 7), last, nn.GELU), 2, 0),
    "dropout after": (of(nn.GELU, dropout, last), 1, 1),  # in eval mode, which comes last
    "dropout of 0 between": (of(partial(nn.Dropout, 0.0), nn.GELU, last), 1, 1),
    # relu(c·z) = c·relu(z) for c >= 0
    "dropout between, ReLU": (of(dropout, nn.ReLU, last), 1, 1),
    "one activation": (Net, 1, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_function_its_gradients_and_the_way_back(name, device):
    make, blocks, joint = MODELS[name]
    assert_fuses(lambda: make().to(device), [X[0].to(device)], blocks, joint)


def test_layers_get_a_mark_and_nothing_else_changes():
    for model in (chain(), Net()):
        before, names, owner = Snapshot.of(model), list(vars(model)), type(model)
        children = list(model.children())
        report = tfl.fuse_(model)
        assert all(a is b for a, b in zip(children, model.children(), strict=True))
        assert type(model) is owner and {*vars(model)} - {*names} <= {MARK}
        marked = [m for m in children if MARK in vars(m)]
        assert marked == [m for m in children if isinstance(m, nn.Linear)]
        assert repr(model) == before.text
        before.assert_same_parameters(Snapshot.of(model))
    (block,) = report.fused
    assert (block.path, block.layers, report.skipped) == ("", ("fc1", "fc2", "fc3"), ())


def test_a_dry_run_says_the_same_and_changes_nothing():
    model = nn.Sequential(chain(), Net(), nn.Linear(3, 3), nn.Mish())
    before = Snapshot.of(model)
    said = tfl.fuse_(model, dry_run=True)
    before.assert_equals(Snapshot.of(model))
    assert len(said.fused) == 2 and {said} == {tfl.fuse_(model)}, "equal, and of one hash"


def test_is_fused_of_parts_and_copies():
    model = nn.Sequential(chain(), chain())
    assert not tfl.is_fused(model)
    tfl.fuse_(model)
    tfl.unfuse_(model[0])
    assert not tfl.is_fused(model[0]) and tfl.is_fused(model[1]) and tfl.is_fused(model)
    assert tfl.is_fused(copy.deepcopy(model)) and operators(model, *X) == ["linear_relu", "mlp"]


def test_a_watched_layer_beside_one_that_is_not():
    model, seen = Net().double(), []
    plain = copy.deepcopy(model)
    model.fc2.register_forward_hook(lambda *args: seen.append(float(args[2].detach().min())))
    report = tfl.fuse_(model)
    assert [b.layers for b in report.fused] == [("fc1",)]
    assert [(s.path, s.reason) for s in report.skipped] == [("fc2", "has forward hooks")]
    assert report.skipped[0].place.partition(":")[0] == __file__
    assert_same(results(model, [X[0].double()]), results(plain, [X[0].double()]))
    assert len(seen) == 1 and seen[0] < 0, "what comes before the activation"


def test_unfuse_leaves_other_changes_alone():
    for model in (
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Conv1d(1, 1, 1), nn.ReLU()),
        nn.Sequential(tfl.FusedMLP(4, 5, 6)),
    ):
        before = Snapshot.of(model)
        for change in (tfl.fuse_, tfl.unfuse_):
            change(model)
            before.assert_equals(Snapshot.of(model))
    model = nn.Sequential(tfl.FusedLinearReLU(6, 6), nn.Linear(6, 6), nn.ReLU())
    tfl.fuse_(model)
    tfl.unfuse_(model)
    assert [type(m) for m in model] == [tfl.FusedLinearReLU, nn.Linear, nn.ReLU]


def test_modes_conversions_and_the_meta_device():
    for model in (chain().eval(), nn.TransformerEncoderLayer(4, 2, 8).eval()):
        assert tfl.fuse_(model).fused and not any(m.training for m in model.modules())
    model = chain()
    tfl.fuse_(model)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert model.to(dtype)(X[0].to(dtype)).dtype == dtype
    assert model.to("meta")(X[0].double().to("meta")).shape == (4, 6)
    with torch.device("meta"):
        model = chain()
    assert tfl.fuse_(model).fused
    plain = chain()
    model.load_state_dict(plain.state_dict(), assign=True)
    torch.testing.assert_close(model(*X), plain(*X))


def test_a_deleted_model_is_gone_at_once():
    """And does not hold its memory until the garbage collector comes."""
    model = chain()
    tfl.fuse_(model)
    gc.disable()
    try:
        watch = weakref.ref(model)
        del model
        assert watch() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_parametrised_owner(is_first):
    """torch makes a class of it, before or after."""
    model, x = Net().double(), X[0].double()
    model.scale = nn.Parameter(-torch.ones(3).double())
    want = model(x)
    for change in (tfl.fuse_, None)[:: -1 if is_first else 1]:
        if change is None:
            parametrize.register_parametrization(model, "scale", Positive())
        else:
            assert len(change(model).fused) == 1
    torch.testing.assert_close(model(x), want)
    assert operators(model, x) == ["mlp"]
    tfl.unfuse_(model)
    torch.testing.assert_close(model(x), want)
    assert not operators(model, x) and float(model.scale.detach()[0]) == 1


def test_a_fused_encoder_is_compiled_scripted_traced_and_exported():
    encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    for model, inputs in ((chain(), X), (encoder, [torch.randn(2, 3, 6)])):
        want = results(model, inputs)
        tfl.fuse_(model)
        for changed in (
            torch.compile(model, backend="aot_eager", fullgraph=True),
            torch.jit.script(model),
            torch.jit.trace(model, tuple(inputs)),
        ):
            assert_same(results(changed, inputs), want)
        assert_same([torch.export.export(model, tuple(inputs)).module()(*inputs)], want[:1])
        torch._dynamo.reset()


def inside():
    """In code that stays, while that which is compiled with it changes."""
    return nn.Sequential(Loop(), nn.Tanh())


@pytest.mark.parametrize("make", [Loop, inside])
@pytest.mark.parametrize("stays", [False, True], ids=["alone", "beside a fused one"])
def test_compiled_models_are_compiled_again(make, stays):
    other = make()  # whose fused code stays in the class
    if stays:
        tfl.fuse_(other)
    for is_inside in (False, True):
        model, x, ran = make(), X[0], []

        def count(graph, inputs, ran=ran):
            called = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
            return lambda *args: (ran.append(called), graph.forward(*args))[1]

        want = model(x)
        if is_inside:
            compiled = model
            model.compile(backend=count)
        else:
            compiled = torch.compile(model, backend=count)
        for change, fused in ((lambda m: m, 0), (tfl.fuse_, 3), (tfl.unfuse_, 0)):
            change(compiled)
            torch.testing.assert_close(compiled(x), want)
            assert ran[-1].count("fused.linear_relu") == fused
        torch._dynamo.reset()


# --- filter_fn and wrong use ----------------------------------------------------------------------


def test_filter_fn_is_asked_once_for_every_layer_that_is_to_change():
    asked = []
    model = nn.Sequential(chain(), nn.Linear(3, 3), nn.Tanh())
    tfl.fuse_(model, lambda name, module: asked.append((name, module)) or True)
    assert [name for name, _ in asked] == ["0.0", "0.2", "0.4"]
    assert all(model.get_submodule(name) is module for name, module in asked)


def test_layers_that_filter_fn_refuses_stay():
    model = chain()
    report = tfl.fuse_(model, lambda name, module: name != "2")
    assert operators(model, *X) == ["linear_relu"]
    assert [(s.path, s.reason) for s in report.skipped] == [("2", "filter_fn says no")]
    assert len(tfl.fuse_(model).fused) == 1, "a later call may have the rest"
    assert operators(model, *X) == ["linear_relu", "mlp"]


def test_a_layer_in_a_loop_may_be_refused():
    for refused in (0, 1, 2):
        model = Loop()
        report = tfl.fuse_(model, lambda name, module, n=refused: name != f"layers.{n}")
        assert [s.path for s in report.skipped] == [f"layers.{refused}"]
        assert operators(model, *X) == ["linear_relu"] * 2
        other = copy.deepcopy(model)
        other.layers[refused] = nn.Linear(6, 6)  # the name was refused
        assert operators(other, *X) == ["linear_relu"] * 2
        tfl.fuse_(model)
        assert operators(model, *X) == ["linear_relu"] * 3


def frozen():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    yield torch.jit.script(model)
    yield torch.jit.trace(model, torch.randn(2, 6))
    yield torch.fx.symbolic_trace(model)
    yield torch.export.export(model, (torch.randn(2, 6),)).module()


def test_models_that_are_fixed_already_are_refused():
    for model in frozen():
        with pytest.raises(TypeError, match="fuse_: expected a model before it is scripted"):
            tfl.fuse_(model)
        report = tfl.fuse_(nn.Sequential(model, nn.Linear(6, 6), nn.ReLU()))
        assert len(report.fused) == 1 and [s.path for s in report.skipped] == ["0"]


def test_other_arguments_are_refused():
    for wrong in (torch.export.export(chain(), tuple(X)), [nn.Linear(2, 2)], nn.Linear):
        for function in (tfl.fuse_, tfl.unfuse_, tfl.is_fused):
            message = rf"{function.__name__}: expected an nn.Module, got"
            with pytest.raises(TypeError, match=message):
                function(wrong)
    with pytest.raises(TypeError, match="filter_fn must be a function, got str"):
        tfl.fuse_(chain(), "0")
    with pytest.raises(ValueError, match=r"fuse_: memory must be .*got 'less'"):
        tfl.fuse_(chain(), memory="less")
    with pytest.raises(TypeError, match=r"call torch_fused_linear\.fuse_\(model\), with an under"):
        tfl.fuse(chain())
