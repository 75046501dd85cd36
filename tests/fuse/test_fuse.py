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


def test_layers_change_their_class_and_activations_their_place():
    model = chain()
    layers = list(model)
    report = tfl.fuse_(model)
    assert types(model) == [
        "FusedLinearReLU",
        "FusedActivation",
        "FusedLinearGELU",
        "FusedActivation",
        "FusedLinear",
    ]
    assert model[2].approximate == "none"
    assert all(isinstance(model[i], nn.Linear) and model[i] is layers[i] for i in (0, 2, 4))
    assert repr(model[1]) == "FusedActivation(ReLU(), applied by '0')"
    (block,) = report.fused
    assert (block.path, block.layers, report.skipped) == ("", ("0", "2", "4"), [])


def test_a_shared_activation_is_replaced_where_it_is_fused():
    act = nn.GELU()
    model = nn.Sequential(nn.Linear(6, 6), act, nn.Linear(6, 6), nn.LayerNorm(6), act)
    tfl.fuse_(model)
    assert types(model)[1] == "FusedActivation" and model[4] is act
    tfl.unfuse_(model)
    assert model[1] is act


def test_one_activation_for_several_layers_goes_from_all_of_them_or_from_none():
    class Two(Net):
        def forward(self, x):
            x = self.relu(self.fc1(x))
            return self.relu(self.fc2(x))

    model = Two()
    assert len(tfl.fuse_(model).fused[0].layers) == 2
    assert model.relu.linears == ("fc1", "fc2")
    model = Two()
    model.fc2.register_forward_hook(print)
    report = tfl.fuse_(model)
    assert not report.fused
    assert {s.path: s.reason for s in report.skipped} == {
        "fc1": "shares its activation with fc2",
        "fc2": "has forward hooks",
    }


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
    again[0] = nn.Linear(6, 7)
    with pytest.raises(RuntimeError, match="unfuse_"):
        again(*X)


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


def test_exchanging_a_fused_layer_is_an_error_and_never_a_lost_activation():
    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x) + 1

    for exchange in (lambda old: nn.Linear(6, 7), Lora):
        model = chain()
        tfl.fuse_(model)
        model[0] = exchange(model[0])
        with pytest.raises(RuntimeError, match=r"expected '0' of Sequential .* ReLU\(\)"):
            model(*X)
        tfl.unfuse_(model)
        model(*X)
        assert type(model[1]) is nn.ReLU


def test_unfuse_changes_nothing_where_something_stands_in_the_way():
    model = chain()
    tfl.fuse_(model)
    parametrizations.weight_norm(model[2])
    before = Snapshot.of(model)
    with pytest.raises(RuntimeError, match="ParametrizedFusedLinearGELU"):
        tfl.unfuse_(model)
    before.assert_equals(Snapshot.of(model))
    nn.utils.parametrize.remove_parametrizations(model[2], "weight")
    tfl.unfuse_(model)
    assert types(model) == types(chain())


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
