"""from_linear, to_linear and their like: what they share, what they refuse by name, where to."""

import pytest
import torch
from layers import CHAIN, CONV, LINEAR, MODULES, sequential, step
from numerics import assert_same
from torch import nn
from torch.nn.utils import parametrize, prune

import torch_fused_linear as tfl

LAYERS = [*LINEAR, *CONV[:1]]
layer_param = pytest.mark.parametrize("row", LAYERS, ids=repr)


def take_of(row):
    return row.cls.from_linear if row in LINEAR else row.cls.from_conv


def torchs(row):
    return nn.Linear if row in LINEAR else nn.Conv2d


def make(cls):
    return cls(3, 4) if issubclass(cls, nn.Linear) else cls(3, 4, 2)


# --- shared both ways ----------------------------------------------------------------------------


@pytest.mark.parametrize("row", [*LINEAR, *CONV], ids=repr)
def test_parameters_are_shared_there_and_back(row):
    plain = row.plain().double().eval()
    inner = plain if isinstance(plain, nn.Linear) else plain[0]
    inner.weight.requires_grad_(False)
    options = {k: v for k, v in row.options.items() if k == "approximate"}
    layer = take_of(row)(inner, **options)
    assert type(layer) is row.cls and not layer.training and not layer.weight.requires_grad
    assert layer.weight is inner.weight and layer.bias is inner.bias
    x = row.input(torch.float64)
    assert_same([layer(x)], [plain(x)])
    unfused = layer.to_unfused()
    assert repr(unfused) == repr(plain) and not any(m.training for m in unfused.modules())
    again = unfused if isinstance(unfused, nn.Linear) else unfused[0]
    assert again.weight is inner.weight and again.bias is inner.bias
    assert_same([unfused(x)], [plain(x)])
    assert take_of(row)(again, **options).weight is inner.weight


@pytest.mark.parametrize("row", CHAIN, ids=repr)
def test_modules_of_chains_are_shared(row):
    plain = row.plain().eval()
    model = tfl.FusedMLP.from_sequential(plain, memory="low")
    if len(plain) > 1:  # one layer has no activation to tell
        assert model.activation == row.options["activation"]
    assert not model.training and model.memory == "low"
    assert all(a is b for a, b in zip(model, plain, strict=True))
    back = model.to_sequential()
    assert type(back) is nn.Sequential and not back.training
    assert all(a is b for a, b in zip(back, plain, strict=True))
    assert_same(step(model, row.input()), step(plain, row.input()))
    assert model.train().to_sequential().training
    assert type(tfl.FusedMLP.from_sequential(model)) is tfl.FusedMLP


@pytest.mark.parametrize("activation", MODULES)
def test_modules_of_a_gated_block_are_shared(activation):
    layers = nn.Linear(4, 6, bias=False), nn.Linear(4, 6), nn.Linear(6, 3)
    block = tfl.FusedGatedMLP.from_modules(
        *[layer.eval() for layer in layers], activation=activation, memory="low"
    )
    assert tuple(block.children()) == layers and not block.training and block.memory == "low"
    gate, up, down = layers
    x = torch.randn(5, 4)
    assert_same([block(x)], [down(MODULES[activation]()(gate(x)) * up(x))])


@layer_param
def test_dtype_and_device_are_obeyed(row):
    layer, take = make(torchs(row)).eval(), take_of(row)
    layer.bias.requires_grad_(False)
    taken = take(layer, dtype=torch.bfloat16)
    assert taken.weight.dtype == taken.bias.dtype == torch.bfloat16
    assert torch.equal(taken.weight, layer.weight.bfloat16())
    assert taken.weight.requires_grad and not taken.bias.requires_grad and not taken.training
    assert layer.weight.dtype == torch.float32, "the layer itself was converted"
    assert take(layer, device="meta").weight.is_meta and not layer.weight.is_meta
    layer.bias = nn.Parameter(layer.bias.detach().double())  # what fits already is shared
    for options in ({}, {"dtype": torch.float32}, {"device": "cpu"}):
        taken = take(layer, **options)
        assert taken.weight is layer.weight
        assert (taken.bias is layer.bias) == ("dtype" not in options)


@pytest.mark.cuda
def test_the_device_of_another(cuda):
    taken = tfl.FusedLinearReLU.from_linear(nn.Linear(3, 4), device=cuda, dtype=torch.float16)
    assert taken.weight.is_cuda and taken.bias.dtype == torch.float16


# --- refused -------------------------------------------------------------------------------------


def nothing(*args):
    return None


def subclassed(cls):
    class LoRA(cls):
        def forward(self, x):
            return super().forward(x) + 1

    return make(LoRA)


def lazy(cls):
    return nn.LazyLinear(4) if cls is nn.Linear else nn.LazyConv2d(4, 2)


def prune_for_good(layer):
    prune.l1_unstructured(layer, "weight", 0.5)
    for hook in list(layer._forward_pre_hooks):  # as after a save that kept the parameters only
        del layer._forward_pre_hooks[hook]


def parametrised(layer):
    parametrize.register_parametrization(layer, "weight", nn.Identity())


CHANGED = {
    "with a parametrisation of weight": parametrised,
    "which has a weight of its own": prune_for_good,
    "with more in it: scale": lambda m: m.register_buffer("scale", torch.ones(1)),
    "with more in it: adapter": lambda m: m.add_module("adapter", nn.Identity()),
    "which has a forward of its own": lambda m: setattr(m, "forward", nothing),
    "which was compiled": lambda m: m.compile(),
    "which has forward hooks": lambda m: m.register_forward_hook(nothing),
    "which has forward pre hooks": lambda m: m.register_forward_pre_hook(nothing),
    "which has backward hooks": lambda m: m.register_full_backward_hook(nothing),
    "which has backward pre hooks": lambda m: m.register_full_backward_pre_hook(nothing),
    "which has state dict hooks": lambda m: m.register_state_dict_post_hook(nothing),
    "which has state dict pre hooks": lambda m: m.register_state_dict_pre_hook(nothing),
    "which has load state dict pre hooks": lambda m: m.register_load_state_dict_pre_hook(nothing),
    "which has load state dict post hooks": lambda m: m.register_load_state_dict_post_hook(nothing),
}
MADE = {"LoRA, a subclass": subclassed, "with lazy parameters": lazy}


@layer_param
@pytest.mark.parametrize("words", [*MADE, *CHANGED])
def test_from_linear_names_the_state_it_would_lose(words, row):
    layer = MADE.get(words, make)(torchs(row))
    CHANGED.get(words, nothing)(layer)
    name = f"{row.cls.__name__}.{take_of(row).__name__}"
    expected = f"expected exactly an nn.{torchs(row).__name__} with nothing added"
    with pytest.raises(TypeError, match=f"^{name}: {expected}.* got .*{words}"):
        take_of(row)(layer)


@layer_param
@pytest.mark.parametrize("words", CHANGED)
def test_to_unfused_names_the_state_it_would_lose(words, row):
    for method in ("to_linear" if row in LINEAR else "to_conv", "to_unfused"):
        layer = make(row.cls)
        assert isinstance(getattr(layer, method)(), nn.Module)
        CHANGED[words](layer)
        expected = f"expected exactly a {row.cls.__name__} with nothing added"
        with pytest.raises(TypeError, match=f"{expected}.* got .*{words}"):
            getattr(layer, method)()


@layer_param
@pytest.mark.parametrize("thing", [None, 3, nn.Identity(), torch.zeros(3, 3)], ids=repr)
def test_no_layer_at_all(thing, row):
    take = take_of(row)
    name = f"{row.cls.__name__}.{take.__name__}"
    with pytest.raises(TypeError, match=f"{name}: expected .*, got {type(thing).__name__}$"):
        take(thing)


def test_an_activation_that_would_be_lost_and_subclasses_of_ours():
    class Scaled(tfl.FusedLinearReLU):
        def forward(self, x):
            return super().forward(x) * 2

    assert type(tfl.FusedLinear.from_linear(tfl.FusedLinear(3, 4))) is tfl.FusedLinear
    with pytest.raises(TypeError, match="got FusedLinearReLU, a subclass"):
        tfl.FusedLinearGELU.from_linear(tfl.FusedLinearReLU(3, 4))
    with pytest.raises(TypeError, match=r"exactly a FusedLinearReLU .* got Scaled, a subclass"):
        Scaled(3, 4).to_unfused()


def test_chains_with_more_than_their_modules():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    hooked, own, ours = sequential(3, 4, 2), sequential(3, 4, 2), tfl.FusedMLP(3, 4, 5)
    hooked.register_forward_hook(nothing)
    own.scale = nn.Parameter(torch.ones(1))
    for chain, words in [
        (Residual(*sequential(3, 4, 2)), "Residual, a subclass"),
        (hooked, "which has forward hooks"),
        (own, "with the parameters scale"),
        (nn.ModuleList([nn.Linear(3, 4)]), "got ModuleList"),
    ]:
        with pytest.raises(TypeError, match=rf"FusedMLP\.from_sequential: expected .*{words}"):
            tfl.FusedMLP.from_sequential(chain)
    ours.register_forward_hook(nothing)
    with pytest.raises(TypeError, match=r"exactly a FusedMLP .* got FusedMLP, which has forward"):
        ours.to_sequential()
    with pytest.raises(ValueError, match=r"from_sequential: memory must be .*got 'less'"):
        tfl.FusedMLP.from_sequential(sequential(3, 4, 2), memory="less")


class Own(nn.ReLU):
    def forward(self, x):
        return x


SQUARE = nn.Linear(4, 4)


@pytest.mark.parametrize(
    "modules",
    [
        [],
        [nn.ReLU()],
        [SQUARE, nn.ReLU()],
        [SQUARE, SQUARE],
        [SQUARE, nn.Tanh(), SQUARE],
        [SQUARE, Own(), SQUARE],
        [SQUARE, nn.ReLU(), SQUARE, nn.GELU(), SQUARE],
        [SQUARE, nn.GELU("tanh"), SQUARE, nn.GELU(), SQUARE],
        [SQUARE, nn.ReLU(), nn.ReLU(), SQUARE],
        [SQUARE, nn.ReLU(), nn.Dropout(0.5), SQUARE],
    ],
    ids=lambda modules: " ".join(type(m).__name__ for m in modules),
)
def test_modules_that_are_no_chain_raise(modules):
    with pytest.raises(ValueError, match=r"FusedMLP.from_sequential: expected") as error:
        tfl.FusedMLP.from_sequential(nn.Sequential(*modules))
    assert all(type(module).__name__ in str(error.value) for module in modules)


def test_modules_that_are_no_gated_block_raise():
    gate, up, down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
    from_modules = tfl.FusedGatedMLP.from_modules
    with pytest.raises(ValueError, match=r"from_modules.*got \[6, 4\], \[5, 4\], \[3, 6\]"):
        from_modules(gate, nn.Linear(4, 5), down)
    with pytest.raises(ValueError, match="activation must be"):
        from_modules(gate, up, down, activation="tanh")
    with pytest.raises(ValueError, match=r"from_modules: memory must be .*got 'less'"):
        from_modules(gate, up, down, memory="less")
    with pytest.raises(TypeError, match=r"from_modules.*Conv1d"):
        from_modules(gate, nn.Conv1d(4, 6, 1), down)
    up.register_forward_hook(nothing)
    with pytest.raises(TypeError, match=r"from_modules.*forward hooks"):
        from_modules(gate, up, down)
