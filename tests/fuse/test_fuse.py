"""fuse_ and unfuse_: what changes in a model, what does not, and what becomes of it later."""

import copy
import gc
import io
import weakref

import pytest
import torch
from fused_models import Snapshot, assert_fuses, results
from helpers import one_thread  # noqa: F401
from stacks import assert_same
from torch import nn
from torch.nn.utils import parametrizations

import torch_fused_linear as tfl
from torch_fused_linear.fuse.plain import MARK

X = [torch.randn(4, 6)]


def chain():
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 8), nn.GELU(), nn.Linear(8, 3))


def types(model):
    return [type(m).__name__ for m in model.children()]


class Net(nn.Module):
    """As people write them: one activation for all layers."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 7)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(7, 8)
        self.fc3 = nn.Linear(8, 3)

    def forward(self, x):
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        return self.fc3(x)


# maker, blocks, gradients handed over
MODELS = {
    "chain": (chain, 1, 2),
    "no next linear": (lambda: nn.Sequential(nn.Linear(6, 7), nn.GELU("tanh")), 1, 0),
    "no bias": (
        lambda: nn.Sequential(nn.Linear(6, 7, bias=False), nn.ReLU(), nn.Linear(7, 3)),
        1,
        1,
    ),
    "in place": (lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(inplace=True)), 1, 0),
    "nested": (
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Identity()) for _ in "abc"),
            nn.Sequential(nn.Linear(6, 3)),
        ),
        1,
        3,
    ),
    "two apart": (
        lambda: nn.Sequential(
            nn.Linear(6, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, 3), nn.GELU()
        ),
        2,
        0,
    ),
    "dropout after": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Dropout(0.5), nn.Linear(7, 3)),
        1,
        1,  # in eval mode, which comes last
    ),
    "dropout of 0 between": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.0), nn.GELU(), nn.Linear(7, 3)),
        1,
        1,
    ),
    # relu(c·z) = c·relu(z) for c >= 0
    "dropout between, ReLU": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.ReLU(), nn.Linear(7, 3)),
        1,
        1,
    ),
    "one activation": (Net, 1, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_function_its_gradients_and_the_way_back(name, device):
    make, blocks, handed_over = MODELS[name]
    assert_fuses(lambda: make().to(device), [X[0].to(device)], blocks, handed_over)


def test_layers_get_a_mark_and_nothing_else_changes():
    for model in (chain(), Net()):
        before, names, owner = Snapshot.of(model), list(vars(model)), type(model)
        children = list(model.children())
        report = tfl.fuse_(model)
        assert [type(m) for m in children] == [type(m) for m in model.children()]
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
    assert len(said.fused) == 2 and said == tfl.fuse_(model)


def test_a_part_that_is_unfused_leaves_the_rest():
    model = nn.Sequential(chain(), nn.Linear(3, 6), chain())
    tfl.fuse_(model)
    tfl.unfuse_(model[0])
    assert not tfl.is_fused(model[0]) and tfl.is_fused(model[2])
    with tfl.explain() as calls:
        model(*X)
    assert len(calls.calls) == 3


def test_a_shared_activation_and_a_shared_layer():
    act, linear = nn.GELU(), nn.Linear(6, 6)
    model = nn.Sequential(linear, act, nn.LayerNorm(6), act, linear).double()
    plain, x = copy.deepcopy(model), [X[0].double()]
    assert tfl.fuse_(model).fused[0].layers == ("0",)
    assert_same(results(model, x), results(plain, x))


def test_a_watched_layer_beside_one_that_is_not():
    model, plain = Net().double(), Net().double()
    plain.load_state_dict(model.state_dict())
    seen = []
    model.fc2.register_forward_hook(lambda *args: seen.append(float(args[2].detach().min())))
    report = tfl.fuse_(model)
    assert [b.layers for b in report.fused] == [("fc1",)]
    assert [(s.path, s.reason) for s in report.skipped] == [("fc2", "has forward hooks")]
    assert report.skipped[0].place.partition(":")[0] == __file__
    x = [X[0].double()]
    assert_same(results(model, x), results(plain, x))
    assert len(seen) == 1 and seen[0] < 0, "what comes before the activation"


def test_a_container_that_is_registered_twice_is_one_place():
    block = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    model = nn.Sequential(block, nn.LayerNorm(6), block).double()
    x, plain = [torch.randn(2, 6).double()], copy.deepcopy(model)
    assert len(tfl.fuse_(model).fused) == 1
    assert_same(results(model, x), results(plain, x))


def test_a_model_with_nothing_to_fuse_is_left_as_it_is():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Conv1d(1, 1, 1), nn.ReLU())
    before = Snapshot.of(model)
    assert not tfl.fuse_(model).fused
    before.assert_equals(Snapshot.of(model))
    tfl.unfuse_(model)
    before.assert_equals(Snapshot.of(model))


def test_unfuse_leaves_layers_that_fuse_did_not_make():
    model = nn.Sequential(tfl.FusedLinearReLU(6, 6), nn.Linear(6, 6), nn.ReLU())
    tfl.fuse_(model)
    tfl.unfuse_(model)
    assert types(model) == ["FusedLinearReLU", "Linear", "ReLU"]


def test_a_model_in_eval_mode_stays_in_it():
    for model in (chain().eval(), nn.TransformerEncoderLayer(4, 2, 8).eval()):
        assert tfl.fuse_(model).fused
        assert not any(m.training for m in model.modules())


def test_modes_and_conversions_reach_everything():
    model, activation = chain(), nn.ReLU()
    model[1] = activation
    tfl.fuse_(model)
    model.eval()
    assert not any(m.training for m in model.modules())
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert model.to(dtype)(X[0].to(dtype)).dtype == dtype
    assert model.to("meta")(X[0].double().to("meta")).shape == (4, 3)
    tfl.unfuse_(model)
    assert model[1] is activation and not activation.training


def test_a_model_on_the_meta_device_is_fused_and_filled_later():
    with torch.device("meta"):
        model = chain()
    assert tfl.fuse_(model).fused
    plain = chain()
    model.load_state_dict(plain.state_dict(), assign=True)
    torch.testing.assert_close(model(*X), plain(*X))


def test_a_whole_model_in_a_file():
    model = chain()
    tfl.fuse_(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    assert_same(results(again, X), results(model, X))
    assert type(again) is nn.Sequential and tfl.is_fused(again)


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


def test_parametrisations_come_and_go():
    model = chain().double()
    tfl.fuse_(model)
    plain, x = copy.deepcopy(model), [X[0].double()]
    tfl.unfuse_(plain)
    for m in (model, plain):
        torch.manual_seed(0)
        parametrizations.weight_norm(m[2])
    assert_same(results(model, x), results(plain, x))
    tfl.unfuse_(model)
    tfl.fuse_(model)
    for m in (model, plain):
        nn.utils.parametrize.remove_parametrizations(m[2], "weight")
    tfl.unfuse_(model)
    assert repr(model) == repr(plain) and type(model) is nn.Sequential
    assert_same(results(model, x), results(plain, x))


def test_a_parametrised_owner():
    """torch makes a class of it, before or after."""

    def make():
        model = Net().double()
        model.scale = nn.Parameter(torch.ones(3).double())
        return model

    class Twice(nn.Module):
        def forward(self, x):
            return 2 * x

    model = make()
    tfl.fuse_(model)
    want = results(model, [X[0].double()])
    nn.utils.parametrize.register_parametrization(model, "scale", Twice())
    with tfl.explain() as calls:
        assert_same([model(X[0].double())], want[:1])
    assert len(calls.calls) == 3
    tfl.unfuse_(model)
    with tfl.explain() as calls:
        assert_same([model(X[0].double())], want[:1])
    assert not calls.calls and float(model.scale.detach()[0]) == 2
    model = make()
    nn.utils.parametrize.register_parametrization(model, "scale", Twice())
    assert len(tfl.fuse_(model).fused) == 1


def test_a_fused_model_is_compiled_scripted_traced_and_exported():
    encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    for model, inputs in ((chain(), X), (Net(), X), (encoder, [torch.randn(2, 3, 6)])):
        want = results(model, inputs)
        tfl.fuse_(model)
        for changed in (
            torch.compile(model, backend="aot_eager", fullgraph=True),
            torch.jit.script(model),
            torch.jit.trace(model, tuple(inputs)),
        ):
            assert_same(results(changed, inputs), want)
        exported = torch.export.export(model, tuple(inputs)).module()
        assert_same([exported(*inputs)], want[:1])
        torch._dynamo.reset()
