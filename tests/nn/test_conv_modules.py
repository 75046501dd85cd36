"""FusedConv2dReLU: a drop-in child of nn.Conv2d."""

import copy
import io
import pickle

import pytest
import torch
from convolutions import LAST
from helpers import device_param, one_thread  # noqa: F401
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import torch_fused_linear as tfl

OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "strided": {"stride": 2, "padding": 1},
    "pairs": {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)},
    "same": {"padding": "same"},
    "same, dilated": {"padding": "same", "dilation": (2, 1)},
    "valid": {"padding": "valid"},
    "groups": {"groups": 2, "padding": 1},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate": {"padding": (2, 1), "padding_mode": "replicate", "stride": 2},
    "circular, same": {"padding": "same", "padding_mode": "circular"},
}
options_param = pytest.mark.parametrize("name", OPTIONS)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def make(name, kernel=3, **kwargs):
    return tfl.FusedConv2dReLU(4, 6, kernel, **OPTIONS[name], **kwargs)


def plain_twin(layer):
    """nn.Conv2d, made from the arguments and not by to_conv, and ReLU over the same parameters."""
    conv = nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.groups,
        layer.bias is not None,
        layer.padding_mode,
    )
    conv.weight, conv.bias = layer.weight, layer.bias
    return nn.Sequential(conv, nn.ReLU())


@device_param
@options_param
@pytest.mark.parametrize("kernel", [3, 4, (1, 4)], ids=str)
def test_forward_and_gradients(kernel, name, device):
    layer = make(name, kernel, dtype=torch.float64).to(device)
    twin = plain_twin(copy.deepcopy(layer))
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64, device=device)
    for image in (x, x.to(memory_format=LAST), x[0]):
        torch.testing.assert_close(layer(image), twin(image))
    layer(x).square().sum().backward()
    twin(x).square().sum().backward()
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    scripted = torch.jit.script(layer)
    assert list(scripted.state_dict()) == list(layer.state_dict())
    torch.testing.assert_close(scripted(x), twin(x))


@options_param
def test_parameters_and_state_are_those_of_nn_conv2d(name):
    torch.manual_seed(7)
    layer = make(name)
    torch.manual_seed(7)
    conv = nn.Conv2d(4, 6, 3, **OPTIONS[name])
    assert isinstance(layer, nn.Conv2d)
    assert list(layer.state_dict()) == list(conv.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), conv.parameters()))
    conv.load_state_dict(make(name).state_dict(), strict=True)
    layer.load_state_dict(conv.state_dict(), strict=True)
    x = torch.randn(2, 4, 9, 8)
    torch.testing.assert_close(layer(x), F.relu(conv(x)))
    assert repr(layer) == repr(conv).replace("Conv2d", "FusedConv2dReLU")


@options_param
def test_from_conv_and_to_unfused_share_parameters(name):
    conv = nn.Conv2d(4, 6, (2, 3), **OPTIONS[name]).double().eval()
    conv.weight.requires_grad_(False)
    layer = tfl.FusedConv2dReLU.from_conv(conv)
    assert type(layer) is tfl.FusedConv2dReLU and not layer.training
    assert layer.weight is conv.weight and layer.bias is conv.bias
    back = layer.to_unfused()
    assert type(back) is nn.Sequential and type(back[0]) is nn.Conv2d and type(back[1]) is nn.ReLU
    assert back[0].weight is conv.weight and back[0].bias is conv.bias
    assert repr(back[0]) == repr(conv) and not any(m.training for m in back.modules())
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(back(x), layer(x))
    torch.testing.assert_close(layer(x), F.relu(conv(x)))


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("value", [1.5, "same", None])
def test_what_is_neither_a_number_nor_a_pair_is_refused(name, value):
    message = rf"conv2d_relu: {name} must be an int or two of them, got {value!r}"
    with pytest.raises(TypeError, match=message):
        tfl.conv2d_relu(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2), **{name: value})


@options_param
def test_copies_conversions_and_hooks(name):
    layer, x, seen = make(name), torch.randn(2, 4, 9, 8), []
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(other) is type(layer) and other.weight is not layer.weight
        assert torch.equal(other(x), layer(x)) and repr(other) == repr(layer)
    last = copy.deepcopy(layer).to(memory_format=LAST)
    assert last(x).is_contiguous(memory_format=LAST)
    torch.testing.assert_close(last(x), layer(x))
    assert copy.deepcopy(layer).bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert copy.deepcopy(layer).to("meta")(x.to("meta")).shape == layer(x).shape
    layer.register_forward_hook(lambda m, args, y: seen.append("after"))
    layer.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    y = layer(x.requires_grad_())
    g = torch.randn_like(y)
    y.backward(g)
    assert seen[0] == "after" and torch.equal(seen[1], g)


def test_what_is_assigned_later_counts():
    """Dilating a backbone after the fact, swapping weights, parametrisations."""
    layer, x = make("strided"), torch.randn(2, 4, 9, 8)
    layer.padding, layer.dilation, layer.stride = (2, 2), (2, 2), (1, 1)
    layer.weight, layer.bias = nn.Parameter(torch.randn(6, 4, 3, 3)), None
    torch.testing.assert_close(layer(x), plain_twin(layer)(x))
    normed = parametrizations.weight_norm(make("plain"))
    torch.testing.assert_close(normed(x), F.relu(F.conv2d(x, normed.weight, normed.bias)))
    normed(x).sum().backward()
    assert all(p.grad is not None for p in normed.parameters())


def test_function_takes_numbers_and_pairs():
    x, w, b = torch.randn(2, 4, 9, 8), torch.randn(6, 2, 3, 3), torch.randn(6)
    for options in ({}, {"stride": 2}, {"stride": (2, 1), "padding": [1, 0], "dilation": 2}):
        want = F.relu(F.conv2d(x, w, b, groups=2, **options))
        torch.testing.assert_close(tfl.conv2d_relu(x, w, b, groups=2, **options), want)
