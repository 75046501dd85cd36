"""What fuse_ is given: its filter, and what it refuses."""

import copy

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
    assert operators(model) == ["linear_relu"]
    assert [(s.path, s.reason) for s in report.skipped] == [("2", "filter_fn says no")]
    assert len(tfl.fuse_(model).fused) == 1, "a later call may have the rest"
    assert operators(model) == ["linear_relu", "linear_gelu", "linear"]


def operators(model, x=X[0]):
    with torch.no_grad(), tfl.explain() as calls:
        model(x)
    return [call.operator for call in calls.calls]


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def test_a_layer_in_a_loop_may_be_refused():
    for refused in (0, 1, 2):
        model = Loop()
        report = tfl.fuse_(model, lambda name, module, n=refused: name != f"layers.{n}")
        assert [s.path for s in report.skipped] == [f"layers.{refused}"]
        assert operators(model) == ["linear_relu"] * 2
        other = copy.deepcopy(model)
        other.layers[refused] = nn.Linear(6, 6)  # the name was refused
        assert operators(other) == ["linear_relu"] * 2
        torch.compile(model, backend="eager", fullgraph=True)(*X)
        tfl.fuse_(model)
        assert operators(model) == ["linear_relu"] * 3


def test_a_filter_that_accepts_nothing_is_reported():
    model = chain()
    before = Snapshot.of(model)
    report = tfl.fuse_(model, lambda name, module: name.startswith("encoder"))
    assert not report.fused and {s.reason for s in report.skipped} == {"filter_fn says no"}
    before.assert_equals(Snapshot.of(model))


# --- wrong use ----------------------------------------------------------------------------------


def frozen():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    return {
        "scripted": torch.jit.script(model),
        "traced": torch.jit.trace(model, torch.randn(2, 6)),
        "fx": torch.fx.symbolic_trace(model),
        "exported": torch.export.export(model, (torch.randn(2, 6),)).module(),
    }


def test_models_that_are_fixed_already_are_refused():
    for model in frozen().values():
        with pytest.raises(TypeError, match="fuse_: expected a model before it is scripted"):
            tfl.fuse_(model)
        report = tfl.fuse_(nn.Sequential(model, nn.Linear(6, 6), nn.ReLU()))
        assert len(report.fused) == 1 and [s.path for s in report.skipped] == ["0"]


def test_compiled_models_are_compiled_again():
    for is_inside in (False, True):
        model, x, seen = Loop(), X[0], []

        def count(graph, inputs, seen=seen):
            seen.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
            return graph.forward

        want = model(x)
        if is_inside:
            compiled = model
            model.compile(backend=count)
        else:
            compiled = torch.compile(model, backend=count)
        for change in (lambda m: m, tfl.fuse_, tfl.unfuse_):
            change(compiled)
            torch.testing.assert_close(compiled(x), want)
        assert seen[1] == ["fused.linear_relu"] * 3 and len(seen[0]) == 6
        torch._dynamo.reset()


def test_other_arguments_are_refused():
    exported = torch.export.export(chain(), tuple(X))
    for wrong in (exported, [nn.Linear(2, 2)], nn.Linear):
        with pytest.raises(TypeError, match=r"fuse_: expected an nn.Module, got"):
            tfl.fuse_(wrong)
        with pytest.raises(TypeError, match=r"unfuse_: expected an nn.Module, got"):
            tfl.unfuse_(wrong)
    with pytest.raises(TypeError, match=r"filter_fn\(name, module\) -> bool or None, got str"):
        tfl.fuse_(chain(), "0")
