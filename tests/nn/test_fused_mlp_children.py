"""FusedMLP whose children have been changed: they run one by one, and what they compute counts."""

import pytest
import torch
import torch.nn.functional as F
from helpers import one_thread  # noqa: F401
from mlp_models import assert_equal_models, runs_as_one
from torch import nn
from torch.nn.utils import parametrize

import torch_fused_linear as tfl
from torch_fused_linear import FusedMLP


def exchange_linear(model):
    model[0] = tfl.FusedLinear.from_linear(model[0])


def exchange_activation(model):
    model[1] = nn.Tanh()


def exchange_for_another_gelu(model):
    model[1] = nn.GELU("none")


def own_forward(model):
    model[0].forward = lambda x: F.linear(x, model[0].weight, model[0].bias) * 3


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


CHANGES = {
    "forward hook": lambda m: m[0].register_forward_hook(lambda *a: a[2] * 2),
    "forward pre-hook": lambda m: m[2].register_forward_pre_hook(lambda _, a: (a[0] * 2,)),
    "hook on the activation": lambda m: m[1].register_forward_hook(lambda *a: a[2] * 2),
    "backward hook": lambda m: m[0].register_full_backward_hook(lambda _, gi, go: (gi[0] * 2,)),
    "backward pre-hook": lambda m: m[2].register_full_backward_pre_hook(lambda _, go: (go[0] * 2,)),
    "parametrisation": lambda m: parametrize.register_parametrization(m[0], "weight", Doubled()),
    "weight norm": lambda m: nn.utils.parametrizations.weight_norm(m[2]),
    "another linear": exchange_linear,
    "another activation": exchange_activation,
    "another gelu": exchange_for_another_gelu,
    "a forward of its own": own_forward,
    "a module more": lambda m: m.append(nn.Dropout(0.0)),
    "a layer more": lambda m: m.extend([nn.Identity(), nn.Linear(3, 2)]),
    "a module less": lambda m: m.pop(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_children_run_one_by_one(change):
    torch.manual_seed(1)
    model = FusedMLP(4, 6, 3, activation="gelu_tanh")
    x = torch.randn(5, 4)
    assert runs_as_one(model, x)
    with torch.no_grad():
        before = model(x)
    CHANGES[change](model)
    assert not runs_as_one(model, x)
    assert_equal_models(model, nn.Sequential(*model), x)
    if change not in ("a module more", "another linear", "weight norm") and "back" not in change:
        with torch.no_grad():
            assert model(x).shape != before.shape or not torch.allclose(model(x), before), (
                "this change shows nothing"
            )


def test_one_again_when_the_hook_is_gone():
    model, x = FusedMLP(4, 6, 3), torch.randn(5, 4)
    handle = model[0].register_forward_hook(lambda *a: None)
    assert not runs_as_one(model, x)
    handle.remove()
    assert runs_as_one(model, x)


def test_more_layers_of_the_same_kind_run_as_one():
    model = FusedMLP(4, 6, 3)
    model.extend([nn.ReLU(), nn.Linear(3, 2)])
    x = torch.randn(5, 4)
    assert runs_as_one(model, x)
    assert_equal_models(model, nn.Sequential(*model), x)


def test_global_hooks_see_the_children():
    """torch's process-wide module hooks are called for every module that runs."""
    model, x, seen = FusedMLP(4, 6, 3), torch.randn(5, 4), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m)))
    try:
        model(x)
    finally:
        handle.remove()
    assert seen == [nn.Linear, nn.ReLU, nn.Linear, FusedMLP]


def test_hooks_on_the_whole_stay_with_one_operator():
    model, x, seen = FusedMLP(4, 6, 3), torch.randn(5, 4), []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    assert runs_as_one(model, x)
    model(x.requires_grad_()).sum().backward()
    assert seen == ["forward", "forward", "backward"]
