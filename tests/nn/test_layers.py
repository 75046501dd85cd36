"""The layers: drop-in children of torch's, each beside the modules that it stands for."""

import copy
import io
import pickle

import pytest
import torch
from layers import CHAIN, CONV, GATED, LAYERS, LINEAR, runs_as_one, step
from numerics import assert_same
from operators import LAST
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import torch_fused_linear as tfl

layer_param = pytest.mark.parametrize("row", LAYERS, ids=repr)
lone_param = pytest.mark.parametrize("row", [*LINEAR, *CONV], ids=repr)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
MEMORY = [row for row in LAYERS if row not in CONV and "none" not in row.label]


# --- parameters, state ---------------------------------------------------------------------------


@layer_param
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_and_initialisation_are_torchs(bias, row):
    options = {} if "bias" in row.options else {"bias": bias}
    made = []
    for make in (row.make, row.plain):
        torch.manual_seed(7)
        made.append((make(**options), torch.rand(1)))
    (layer, after), (plain, want) = made
    assert torch.equal(after, want), "as many random numbers are drawn"
    assert len(list(layer.parameters())) == len(list(plain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), plain.parameters()))
    torch.manual_seed(7)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), plain.parameters()))
    if row in LINEAR or row in CONV:
        assert isinstance(layer, nn.Linear if row in LINEAR else nn.Conv2d)
        assert (layer.bias is None) == (not options.get("bias", row.options.get("bias", True)))


@layer_param
def test_dtypes_and_devices_of_the_constructor(row, device):
    layer = row.make(device=device, dtype=torch.float64)
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    assert {p.device.type for p in layer.parameters()} == {device.type}
    assert {p.device.type for p in row.make(device="meta").parameters()} == {"meta"}


@layer_param
def test_state_dict_goes_both_ways_strictly(row):
    """Also through a file, and into the scripted layer."""
    layer, plain = row.make(), row.plain()
    names = [n.removeprefix("0.") if row in LINEAR + CONV else n for n in plain.state_dict()]
    assert list(layer.state_dict()) == names
    state = dict(zip(names, plain.state_dict().values()))
    assert layer.load_state_dict(state, strict=True).missing_keys == []
    plain.load_state_dict(dict(zip(plain.state_dict(), layer.state_dict().values())), strict=True)
    torch.save(layer.state_dict(), buffer := io.BytesIO())
    buffer.seek(0)
    other = row.make()
    other.load_state_dict(torch.load(buffer), strict=True)
    x = row.input()
    scripted = torch.jit.script(layer)
    assert list(scripted.state_dict()) == names
    assert_same([layer(x), other(x), scripted(x)], [plain(x)] * 3)


@layer_param
def test_repr_tells_everything(row):
    text, words = repr(row.make()), row.options.get("approximate")
    assert text.startswith(row.cls.__name__)
    if row in LINEAR:
        text = repr(row.make(bias=False))
        assert "in_features=6, out_features=4, bias=False" in text
        assert words is None or f"approximate={words!r}" in text
    if row in CONV:
        assert text == repr(row.plain()[0]).replace("Conv2d", "FusedConv2dReLU")
    if row in CHAIN:
        assert text == repr(row.plain()).replace("Sequential", "FusedMLP")
    if row in GATED:
        assert f"activation={row.options['activation']!r}" in text


# --- what they compute ---------------------------------------------------------------------------


@layer_param
def test_forward_and_gradients(row, device):
    layer = row.make(dtype=torch.float64).to(device)
    twin, x = row.twin(copy.deepcopy(layer)), row.input(torch.float64, device)
    assert_same(step(layer, x), step(twin, x))
    for other in (x[0], torch.stack([x, -x]) if row not in CONV else x.to(memory_format=LAST)):
        assert_same([layer(other)], [twin(other)])
    assert runs_as_one(layer, x) == (row in GATED or row in CHAIN)
    with tfl.set_policy("eager"):
        assert_same(step(layer, x), step(twin, x))
    doubled = {name: 2 * p for name, p in layer.named_parameters()}
    got = torch.func.functional_call(layer, doubled, (x,))
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    assert_same([got], [twin(x)])


@layer_param
def test_copies_and_pickles(row):
    layer, x = row.make(), row.input()
    torch.save(layer, buffer := io.BytesIO())
    buffer.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for other in (*copies, torch.load(buffer, weights_only=False)):
        assert type(other) is type(layer) and repr(other) == repr(layer)
        assert torch.equal(other(x), layer(x))
        assert runs_as_one(other, x) == runs_as_one(layer, x)
        next(other.parameters()).data.add_(1)
        assert not torch.equal(other(x), layer(x)), "they share parameters"


@layer_param
def test_conversions(row):
    layer = row.make()
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float32):
        other, x = copy.deepcopy(layer).to(dtype), row.input(dtype)
        assert other(x).dtype == dtype
        assert_same([other(x)], [row.twin(other)(x)])
    y = layer(row.input())
    assert layer.to("meta")(row.input(device="meta")).shape == y.shape
    if row in CONV:
        last = row.make().to(memory_format=LAST)
        assert last(row.input()).is_contiguous(memory_format=LAST)


@layer_param
def test_hooks_on_the_layer_run(row):
    layer, seen = row.make(), []
    layer.register_forward_pre_hook(lambda m, args: seen.append("before"))
    layer.register_forward_hook(lambda m, args, y: seen.append("after"))
    layer.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    y = layer(row.input().requires_grad_())
    g = torch.randn_like(y)
    y.backward(g)
    assert seen[:2] == ["before", "after"]
    assert torch.equal(seen[2], g), "the hook sees dL/dy"
    assert runs_as_one(layer, row.input()) == (row in GATED or row in CHAIN)


@lone_param
def test_parametrised_and_pruned_weights(row):
    """weight is computed on each access: the layer must read it there, and train what is under."""
    x = row.input()
    layer = parametrizations.weight_norm(row.make())
    assert parametrize.is_parametrized(layer)
    twin = row.twin(row.make())
    holder = twin if isinstance(twin, nn.Linear) else twin[0]
    holder.weight, holder.bias = nn.Parameter(layer.weight.detach().clone()), layer.bias
    torch.testing.assert_close(layer(x), twin(x))
    layer(x).sum().backward()
    for p in layer.parametrizations.weight.parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0
    pruned = prune.l1_unstructured(row.make(), "weight", amount=0.5)
    holder.weight, holder.bias = nn.Parameter(pruned.weight.detach().clone()), pruned.bias
    torch.testing.assert_close(pruned(x), twin(x))
    assert (pruned.weight == 0).sum() == pruned.weight.numel() // 2


@lone_param
def test_parameters_assigned_later_are_used(row):
    """Nothing of the parameters is cached: LoRA, EMA and weight swaps assign them, and a backbone
    is dilated after the fact."""
    layer, x = row.make(), row.input()
    layer(x)
    layer.weight, layer.bias = nn.Parameter(torch.randn_like(layer.weight)), None
    twin = row.twin(layer)
    torch.testing.assert_close(layer(x), twin(x))
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(layer(x), twin(x))
    if row in CONV and row.label == "conv strided":
        layer.stride = twin[0].stride = (1, 1)
        for layer.padding, layer.dilation in (((2, 2), (2, 2)), ("same", 2), ("same", (2,))):
            twin[0].padding, twin[0].dilation = layer.padding, layer.dilation
            torch.testing.assert_close(layer(x), twin(x))
        for padding, says in (("SAME", r"(?i)invalid padding"), ((1, 1, 1), "padding")):
            for module in (layer, twin[0]):
                module.padding = padding
                with pytest.raises(RuntimeError, match=says):
                    module(x)


@pytest.mark.parametrize("row", MEMORY, ids=repr)
def test_memory_is_a_choice_that_copies_keep(row):
    layer, x = row.make(memory="low"), row.input()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.memory == "low" and repr(other).count("memory='low'") == 1
        assert torch.equal(torch.jit.script(other)(x), layer(x))
    default = row.make()
    assert default.memory == "default" and "memory" not in repr(default)
    assert_same([default(x)], [row.twin(default)(x)])
    with pytest.raises(ValueError, match=rf"{row.cls.__name__}: memory must be .*got 'less'"):
        row.make(memory="less")


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: tfl.FusedLinearGELU(4, 5, approximate="erf"), r"'tanh'.*'none'.*got 'erf'"),
        (lambda: tfl.FusedMLP(4), "FusedMLP: expected in_features and sizes, got 4 alone"),
        (lambda: tfl.FusedMLP(4, 6, 3, activation="swish"), "activation must be.*got 'swish'"),
        (lambda: tfl.FusedMLP(4, 3, activation="none"), "activation must be.*got 'none'"),
        (lambda: tfl.FusedGatedMLP(4, 6, activation="swish"), "activation must be 'relu'.*'swish'"),
    ],
)
def test_wrong_arguments_of_constructors(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_defaults_and_positions():
    assert tfl.FusedLinearGELU(4, 5).approximate == "tanh"
    assert tfl.FusedLinearGELU.from_linear(nn.Linear(3, 3)).approximate == "tanh"
    assert tfl.FusedLinearReLU(4, 5, False).bias is None
    with pytest.raises(RuntimeError, match=r"mlp, layer 0: expected.*got"):
        tfl.FusedMLP(4, 3)(torch.randn(2, 5))
    model, x = tfl.FusedMLP(4, 6, 3), torch.randn(5, 4)
    head = model[:2]
    assert isinstance(head, nn.Sequential) and head[0] is model[0]
    torch.testing.assert_close(head(x), F.relu(F.linear(x, model[0].weight, model[0].bias)))


@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up_of_one_weight_are_loaded(bias):
    block, given = (tfl.FusedGatedMLP(4, 6, bias=bias) for _ in "ab")
    model, state = nn.Sequential(block), {}
    for suffix in ["weight", "bias"] if bias else ["weight"]:
        gate, up, down = (getattr(layer, suffix) for layer in given.children())
        state[f"0.gate_up_proj.{suffix}"] = torch.cat([gate, up])
        state[f"0.down_proj.{suffix}"] = down
    before = dict(state)
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert state.keys() == before.keys(), "what was given stays as it is"
    for p, q in zip(block.parameters(), given.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [1.5, "same", None])
def test_strides_that_are_no_number_or_pair_raise(name, value):
    message = rf"conv2d_relu: {name} must be an int or two of them, got {value!r}"
    with pytest.raises(TypeError, match=message):
        tfl.conv2d_relu(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2), **{name: value})


def test_the_function_of_a_convolution_takes_numbers_and_pairs():
    x, w, b = torch.randn(2, 4, 9, 8), torch.randn(6, 2, 3, 3), torch.randn(6)
    for options in ({}, {"stride": 2}, {"stride": (2, 1), "padding": [1, 0], "dilation": 2}):
        want = F.relu(F.conv2d(x, w, b, groups=2, **options))
        torch.testing.assert_close(tfl.conv2d_relu(x, w, b, groups=2, **options), want)
