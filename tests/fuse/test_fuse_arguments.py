"""What fuse_ is given: its filter, and what it refuses."""

import pytest
import torch
from fused_models import Snapshot
from helpers import one_thread  # noqa: F401
from torch import nn

import torch_fused_linear as tfl

X = [torch.randn(4, 6)]


def chain():
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 8), nn.GELU(), nn.Linear(8, 3))


# --- filter_fn ----------------------------------------------------------------------------------


def test_filter_fn_is_asked_for_every_layer_that_is_to_change():
    asked = []
    model = nn.Sequential(chain(), nn.Linear(3, 3), nn.Tanh())
    tfl.fuse_(model, lambda name, module: asked.append((name, module)) or True)
    assert [name for name, _ in asked] == ["0.0", "0.2", "0.4"]
    assert all(model.get_submodule(name) is module for name, module in asked)


def test_what_filter_fn_refuses_stays():
    model = chain()
    report = tfl.fuse_(model, lambda name, module: name != "2")
    assert [type(m).__name__ for m in model] == [
        "FusedLinearReLU",
        "FusedActivation",
        "Linear",
        "GELU",
        "Linear",
    ]
    assert [(s.path, s.reason) for s in report.skipped] == [("2", "filter_fn says no")]
    assert len(tfl.fuse_(model).fused) == 1, "a later call may have the rest"
    assert [type(m).__name__ for m in model][2:4] == ["FusedLinearGELU", "FusedActivation"]


def test_a_filter_that_accepts_nothing_is_an_error():
    model = chain()
    before = Snapshot.of(model)
    with pytest.raises(ValueError, match=r"refused all 2 that could be fused: 0, 2"):
        tfl.fuse_(model, lambda name, module: name.startswith("encoder"))
    before.assert_equals(Snapshot.of(model))
    # the second time its layers are fused already, which is no error
    tfl.fuse_(model, lambda name, module: name == "0")
    assert not tfl.fuse_(model, lambda name, module: name == "0").fused


# --- wrong use ----------------------------------------------------------------------------------


def frozen():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    compiled = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    compiled.compile(backend="eager")
    return {
        "scripted": torch.jit.script(model),
        "traced": torch.jit.trace(model, torch.randn(2, 6)),
        "fx": torch.fx.symbolic_trace(model),
        "exported": torch.export.export(model, (torch.randn(2, 6),)).module(),
        "compiled": torch.compile(model, backend="eager"),
        "compiled in place": compiled,
    }


def test_models_that_are_fixed_already_are_refused():
    for model in frozen().values():
        with pytest.raises(TypeError, match="fuse_: expected a model before it is scripted"):
            tfl.fuse_(model)
        report = tfl.fuse_(nn.Sequential(model, nn.Linear(6, 6), nn.ReLU()))
        assert len(report.fused) == 1 and [s.path for s in report.skipped] == ["0"]


def test_other_arguments_are_refused():
    exported = torch.export.export(chain(), tuple(X))
    for wrong in (exported, [nn.Linear(2, 2)], nn.Linear):
        with pytest.raises(TypeError, match=r"fuse_: expected an nn.Module, got"):
            tfl.fuse_(wrong)
        with pytest.raises(TypeError, match=r"unfuse_: expected an nn.Module, got"):
            tfl.unfuse_(wrong)
    with pytest.raises(TypeError, match=r"filter_fn\(name, module\) -> bool or None, got str"):
        tfl.fuse_(chain(), "0")
