"""A chain and a gated block whose children were changed run them one by one, as they are now."""

import copy

import pytest
import torch
import torch.nn.functional as F
from layers import runs_as_one, step
from numerics import assert_same
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import torch_fused_linear as tfl


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def chain():
    torch.manual_seed(1)
    return tfl.FusedMLP(4, 6, 3, activation="gelu_tanh")


def block():
    torch.manual_seed(1)
    return tfl.FusedGatedMLP(4, 6)


CHANGES = {
    "forward hook": lambda m: m[0].register_forward_hook(lambda *a: a[2] * 2),
    "forward pre-hook": lambda m: m[2].register_forward_pre_hook(lambda _, a: (a[0] * 2,)),
    "hook on the activation": lambda m: m[1].register_forward_hook(lambda *a: a[2] * 2),
    "parametrisation": lambda m: parametrize.register_parametrization(m[0], "weight", Doubled()),
    "another activation": lambda m: setattr(m, "1", nn.Tanh()),
    "another gelu": lambda m: setattr(m, "1", nn.GELU("none")),
    "own forward": lambda m: setattr(m[0], "forward", lambda x: -F.linear(x, *m[0].parameters())),
    "own call": lambda m: setattr(m[0], "_call_impl", lambda x: -F.linear(x, *m[0].parameters())),
    "a layer more": lambda m: m.extend([nn.Identity(), nn.Linear(3, 2)]),
    "a module less": lambda m: m.pop(2),
}
UNSEEN = {  # in the output
    "backward hook": lambda m: m[0].register_full_backward_hook(lambda _, gi, go: (gi[0] * 2,)),
    "backward pre-hook": lambda m: m[2].register_full_backward_pre_hook(lambda _, go: (go[0] * 2,)),
    "weight norm": lambda m: parametrizations.weight_norm(m[2]),
    "another linear": lambda m: setattr(m, "0", tfl.FusedLinear.from_linear(m[0])),
    "a module more": lambda m: m.append(nn.Dropout(0.0)),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("change", [*CHANGES, *UNSEEN])
def test_a_changed_chain(change):
    model, x = chain(), torch.randn(5, 4)
    before, compiled = model(x).detach(), torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), before)
    assert runs_as_one(model, x)
    (CHANGES | UNSEEN)[change](model)
    assert not runs_as_one(model, x)
    assert_same(step(model, x), step(nn.Sequential(*model), x))
    after = model(x).detach()
    is_seen = after.shape != before.shape or not torch.allclose(after, before)
    assert is_seen == (change in CHANGES)
    if change == "own forward":
        torch.testing.assert_close(compiled(x), after)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.up_proj.register_forward_hook(lambda module, args, y: y * 2),
        lambda m: setattr(m, "gate_proj", nn.Sequential(m.gate_proj, nn.Tanh())),
        lambda m: parametrizations.weight_norm(m.down_proj),
        lambda m: setattr(m.up_proj, "forward", lambda x: m.gate_proj(x) * 3),
    ],
    ids=["hook", "another", "weight norm", "forward"],
)
def test_a_changed_block(change):
    model, x = block(), torch.randn(5, 4)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    assert runs_as_one(model, x)
    change(model)
    assert not runs_as_one(model, x)
    assert_same([model(x)], [model.down_proj(F.silu(model.gate_proj(x)) * model.up_proj(x))])
    if "forward" in vars(model.up_proj):
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("make", [chain, block])
def test_one_again_when_the_hook_is_gone(make):
    model, x = make(), torch.randn(5, 4)
    handle = next(model.children()).register_forward_hook(lambda *a: None)
    assert not runs_as_one(model, x)
    handle.remove()
    assert runs_as_one(model, x)


def test_more_layers_of_the_same_kind_run_as_one():
    model, x = chain(), torch.randn(5, 4)
    model.extend([nn.GELU("tanh"), nn.Linear(3, 2)])
    assert runs_as_one(model, x)
    assert_same(step(model, x), step(nn.Sequential(*model), x))


def test_global_hooks_see_the_children():
    """torch's process-wide module hooks are called for every module that runs."""
    model, x, seen = chain(), torch.randn(5, 4), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m)))
    try:
        model(x)
    finally:
        handle.remove()
    assert seen == [nn.Linear, nn.GELU, nn.Linear, tfl.FusedMLP]


def test_subclasses_in_a_chain_compute_what_they_compute():
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    twin = nn.Sequential(Twice(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.randn(5, 4)
    assert_same(step(tfl.FusedMLP.from_sequential(twin), x), step(copy.deepcopy(twin), x))
