"""from_linear, from_conv, from_sequential: what they take, what they refuse by name, where to."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import torch_fused_linear as tfl

LAYERS = [
    (tfl.FusedLinear.from_linear, "FusedLinear.from_linear", nn.Linear),
    (tfl.FusedLinearReLU.from_linear, "FusedLinearReLU.from_linear", nn.Linear),
    (tfl.FusedLinearGELU.from_linear, "FusedLinearGELU.from_linear", nn.Linear),
    (tfl.FusedConv2dReLU.from_conv, "FusedConv2dReLU.from_conv", nn.Conv2d),
]
NAMES = [name for _, name, _ in LAYERS]
layer_param = pytest.mark.parametrize("take, name, cls", LAYERS, ids=NAMES)


def make(cls):
    return cls(3, 4) if issubclass(cls, nn.Linear) else cls(3, 4, 2)


def nothing(*args):
    return None


def subclassed(cls):
    class LoRA(cls):
        def forward(self, x):
            return super().forward(x) + 1

    return make(LoRA)


def parametrised(cls):
    layer = make(cls)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def lazy(cls):
    return nn.LazyLinear(4) if cls is nn.Linear else nn.LazyConv2d(4, 2)


def pruned(cls):
    layer = make(cls)
    prune.l1_unstructured(layer, "weight", 0.5)
    for hook in list(layer._forward_pre_hooks):  # as after a save that kept the parameters only
        del layer._forward_pre_hooks[hook]
    return layer


def with_buffer(cls):
    layer = make(cls)
    layer.register_buffer("scale", torch.ones(1))
    return layer


def with_child(cls):
    layer = make(cls)
    layer.adapter = nn.Identity()
    return layer


def with_forward(cls):
    layer = make(cls)
    layer.forward = nothing
    return layer


def compiled(cls):
    layer = make(cls)
    layer.compile()
    return layer


def registered(method):
    def hooked(cls):
        layer = make(cls)
        getattr(layer, method)(nothing)
        return layer

    return hooked


REFUSED = {
    "subclass": (subclassed, "LoRA, a subclass"),
    "parametrisation": (parametrised, "with a parametrisation of weight"),
    "lazy": (lazy, "with lazy parameters"),
    "pruned": (pruned, "with the parameters bias, weight_orig"),
    "buffer": (with_buffer, "with more in it: scale"),
    "child": (with_child, "with more in it: adapter"),
    "forward": (with_forward, "with a forward of its own"),
    "compiled": (compiled, "that was compiled"),
    "forward hook": (registered("register_forward_hook"), "with forward hooks"),
    "forward pre-hook": (registered("register_forward_pre_hook"), "with forward pre hooks"),
    "backward hook": (registered("register_full_backward_hook"), "with backward hooks"),
    "backward pre-hook": (
        registered("register_full_backward_pre_hook"),
        "with backward pre hooks",
    ),
    "hook on saving": (registered("register_state_dict_post_hook"), "with state dict hooks"),
    "hook before loading": (
        registered("register_load_state_dict_pre_hook"),
        "with load state dict pre hooks",
    ),
}


@layer_param
@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_lost_is_named(kind, take, name, cls):
    prepare, words = REFUSED[kind]
    with pytest.raises(TypeError) as error:
        take(prepare(cls))
    message = str(error.value)
    assert message.startswith(f"{name}: expected exactly an nn.{cls.__name__} with nothing added")
    assert "got" in message and words in message


GIVEN_BACK = [
    *(
        (lambda kind=kind: kind(3, 4), method)
        for kind in (tfl.FusedLinear, tfl.FusedLinearReLU, tfl.FusedLinearGELU, tfl.FusedLinearSiLU)
        for method in ("to_linear", "to_unfused")
    ),
    (lambda: tfl.FusedConv2dReLU(3, 4, 2), "to_conv"),
    (lambda: tfl.FusedConv2dReLU(3, 4, 2), "to_unfused"),
]


@pytest.mark.parametrize("make_layer, method", GIVEN_BACK)
@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind not in ("lazy", "subclass")])
def test_what_would_be_lost_on_the_way_back_is_named(kind, make_layer, method):
    layer = make_layer()
    assert isinstance(getattr(layer, method)(), nn.Module)
    prepare, words = REFUSED[kind]

    class Made(type(layer)):  # whose constructor takes nothing, as `make` has it for torch's
        def __new__(cls, *args):
            return layer

    with pytest.raises(TypeError) as error:
        getattr(prepare(Made), method)()
    message = str(error.value)
    assert f"expected exactly a {type(make_layer()).__name__} with nothing added" in message
    assert "got" in message and words in message


def test_a_subclass_and_a_chain_are_not_given_back():
    class Scaled(tfl.FusedLinearReLU):
        def forward(self, x):
            return super().forward(x) * 2

    with pytest.raises(TypeError, match=r"exactly a FusedLinearReLU .* got Scaled, a subclass"):
        Scaled(3, 4).to_unfused()
    chain = tfl.FusedMLP(3, 4, 5)
    chain.register_forward_hook(nothing)
    with pytest.raises(TypeError, match=r"exactly a FusedMLP .* got FusedMLP with forward hooks"):
        chain.to_sequential()


@layer_param
@pytest.mark.parametrize("thing", [None, 3, nn.Identity(), torch.zeros(3, 3)], ids=repr)
def test_no_layer_at_all(thing, take, name, cls):
    with pytest.raises(TypeError, match=f"{name}: expected .*, got {type(thing).__name__}$"):
        take(thing)


def test_a_layer_whose_activation_would_be_lost():
    assert type(tfl.FusedLinear.from_linear(tfl.FusedLinear(3, 4))) is tfl.FusedLinear
    with pytest.raises(TypeError, match="got FusedLinearReLU, a subclass"):
        tfl.FusedLinearGELU.from_linear(tfl.FusedLinearReLU(3, 4))


@layer_param
def test_dtype_and_device_are_obeyed(take, name, cls):
    layer = make(cls).eval()
    layer.bias.requires_grad_(False)
    taken = take(layer, dtype=torch.bfloat16)
    assert taken.weight.dtype == taken.bias.dtype == torch.bfloat16
    assert torch.equal(taken.weight, layer.weight.bfloat16())
    assert taken.weight.requires_grad and not taken.bias.requires_grad and not taken.training
    assert layer.weight.dtype == torch.float32, "the layer itself was converted"
    assert take(layer, device="meta").weight.is_meta and not layer.weight.is_meta


@layer_param
def test_parameters_that_fit_already_are_shared(take, name, cls):
    layer = make(cls)
    layer.bias = nn.Parameter(layer.bias.detach().double())
    for options in ({}, {"dtype": torch.float32}, {"device": "cpu"}):
        taken = take(layer, **options)
        assert taken.weight is layer.weight
        assert (taken.bias is layer.bias) == ("dtype" not in options)


@pytest.mark.cuda
def test_the_device_of_another(cuda):
    taken = tfl.FusedLinearReLU.from_linear(nn.Linear(3, 4), device=cuda, dtype=torch.float16)
    assert taken.weight.is_cuda and taken.bias.dtype == torch.float16


def chain(cls=nn.Sequential):
    return cls(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_a_chain_with_more_than_its_modules():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    hooked, own = chain(), chain()
    hooked.register_forward_hook(nothing)
    own.scale = nn.Parameter(torch.ones(1))
    refused = [
        (chain(Residual), "Residual, a subclass"),
        (hooked, "with forward hooks"),
        (own, "with the parameters scale"),
        (nn.ModuleList([nn.Linear(3, 4)]), "got ModuleList"),
    ]
    for sequential, words in refused:
        with pytest.raises(TypeError, match=r"FusedMLP\.from_sequential: expected .*got") as error:
            tfl.FusedMLP.from_sequential(sequential)
        assert words in str(error.value)
    again = tfl.FusedMLP.from_sequential(tfl.FusedMLP.from_sequential(chain()))
    assert type(again) is tfl.FusedMLP
