"""The layers: drop-in children of nn.Linear."""

import copy
import io
import pickle

import pytest
import torch
from helpers import device_param, policy
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import torch_fused_linear as tfl

KINDS = {
    "linear": (tfl.FusedLinear, {}, nn.Identity),
    "relu": (tfl.FusedLinearReLU, {}, nn.ReLU),
    "gelu_tanh": (tfl.FusedLinearGELU, {"approximate": "tanh"}, lambda: nn.GELU("tanh")),
    "gelu_erf": (tfl.FusedLinearGELU, {"approximate": "none"}, nn.GELU),
    "silu": (tfl.FusedLinearSiLU, {}, nn.SiLU),
}
kind_param = pytest.mark.parametrize("kind", KINDS)


def make(kind, *args, **kwargs):
    cls, options, _ = KINDS[kind]
    return cls(*args, **options, **kwargs)


def plain_twin(kind, layer):
    """nn.Linear and the activation, over the same parameters."""
    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    linear.weight, linear.bias = layer.weight, layer.bias
    return nn.Sequential(linear, KINDS[kind][2]())


def assert_same_layer(kind, layer, x=None):
    x = torch.randn(3, layer.in_features, dtype=layer.weight.dtype) if x is None else x
    torch.testing.assert_close(layer(x), plain_twin(kind, layer)(x))


@kind_param
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_and_initialisation_are_those_of_nn_linear(bias, kind):
    torch.manual_seed(7)
    layer = make(kind, 20, 30, bias=bias)
    after = torch.rand(1)
    torch.manual_seed(7)
    linear = nn.Linear(20, 30, bias=bias)
    assert isinstance(layer, nn.Linear)
    assert torch.equal(torch.rand(1), after), "as many random numbers are drawn"
    assert [n for n, _ in layer.named_parameters()] == [n for n, _ in linear.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), linear.parameters()))
    assert (layer.bias is None) == (not bias)
    torch.manual_seed(7)
    layer.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), linear.parameters()))


@device_param
@kind_param
def test_forward_and_gradients(kind, device):
    layer = make(kind, 12, 9).to(device)
    twin = plain_twin(kind, copy.deepcopy(layer)).to(device)
    x = torch.randn(2, 5, 12, device=device)
    layer(x).square().sum().backward()
    twin(x).square().sum().backward()
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@kind_param
def test_default_forms(kind):
    assert tfl.FusedLinearGELU(4, 5).approximate == "tanh"
    layer = make(kind, 4, 5, device="cpu", dtype=torch.float64)
    assert layer.weight.dtype == layer.bias.dtype == torch.float64
    assert_same_layer(kind, layer)
    assert make(kind, 4, 5, device="meta").weight.device.type == "meta"
    assert_same_layer(kind, make(kind, 4, 5, False))  # bias as the third positional argument


def test_unknown_approximate_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"approximate.*'tanh'.*'none'.*got 'erf'"):
        tfl.FusedLinearGELU(4, 5, approximate="erf")


@kind_param
@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_goes_both_ways_strictly(bias, kind):
    layer, linear = make(kind, 6, 4, bias=bias), nn.Linear(6, 4, bias=bias)
    assert list(layer.state_dict()) == list(linear.state_dict())
    assert layer.load_state_dict(linear.state_dict(), strict=True).missing_keys == []
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), linear.parameters()))
    fresh = nn.Linear(6, 4, bias=bias)
    fresh.load_state_dict(layer.state_dict(), strict=True)
    # through a file too, and into the unfused form
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    make(kind, 6, 4, bias=bias).load_state_dict(torch.load(buffer), strict=True)
    assert_same_layer(kind, layer)


@kind_param
@pytest.mark.parametrize("bias", [True, False])
def test_from_linear_and_to_unfused_share_parameters(bias, kind):
    cls, options, activation = KINDS[kind]
    linear = nn.Linear(6, 4, bias=bias).double().eval()
    linear.weight.requires_grad_(False)
    layer = cls.from_linear(linear, **options)
    assert type(layer) is cls
    assert layer.weight is linear.weight and layer.bias is linear.bias
    assert (layer.in_features, layer.out_features) == (6, 4)
    assert not layer.training and not layer.weight.requires_grad
    assert_same_layer(kind, layer)
    back = layer.to_unfused()
    inner = back if kind == "linear" else back[0]
    assert type(inner) is nn.Linear
    assert inner.weight is linear.weight and inner.bias is linear.bias
    assert (inner.in_features, inner.out_features) == (6, 4)
    assert not any(m.training for m in back.modules())
    if kind != "linear":
        assert type(back) is nn.Sequential and len(back) == 2
        assert repr(back[1]) == repr(activation())
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(back(x), layer(x))
    again = cls.from_linear(inner, **options)
    assert again.weight is linear.weight


def test_from_linear_keeps_the_form_of_gelu_it_is_told():
    linear = nn.Linear(3, 3)
    assert tfl.FusedLinearGELU.from_linear(linear).approximate == "tanh"
    assert tfl.FusedLinearGELU.from_linear(linear, approximate="none").approximate == "none"


@kind_param
def test_repr_tells_everything(kind):
    text = repr(make(kind, 20, 30, bias=False))
    assert "in_features=20, out_features=30, bias=False" in text
    assert ("approximate='tanh'" in text) == (kind == "gelu_tanh")
    assert ("approximate='none'" in text) == (kind == "gelu_erf")
    assert text.startswith(KINDS[kind][0].__name__)


@kind_param
def test_deepcopy_and_pickle(kind):
    layer = make(kind, 6, 4)
    x = torch.randn(3, 6)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
    ]
    for other in copies:
        assert type(other) is type(layer) and other.weight is not layer.weight
        assert torch.equal(other(x), layer(x))
        assert repr(other) == repr(layer)
    (grown := copy.deepcopy(layer)).weight.data.add_(1)
    assert not torch.equal(grown(x), layer(x))


@kind_param
def test_conversions(kind):
    layer = make(kind, 6, 4)
    for convert, dtype in [
        (lambda m: m.double(), torch.float64),
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.to(torch.float32), torch.float32),
    ]:
        other = convert(copy.deepcopy(layer))
        x = torch.randn(3, 6, dtype=dtype)
        assert other(x).dtype == dtype
        tolerance = 8 * torch.finfo(dtype).eps
        want = plain_twin(kind, other)(x)
        torch.testing.assert_close(other(x), want, rtol=tolerance, atol=tolerance)
    assert layer.to("meta")(torch.randn(3, 6, device="meta")).shape == (3, 4)


@kind_param
def test_hooks_run(kind):
    layer, seen = make(kind, 6, 4), []
    layer.register_forward_pre_hook(lambda m, args: seen.append("before"))
    layer.register_forward_hook(lambda m, args, y: seen.append("after"))
    layer.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    g = torch.randn(3, 4)
    layer(torch.randn(3, 6, requires_grad=True)).backward(g)
    assert seen[:2] == ["before", "after"]
    assert torch.equal(seen[2], g), "the hook sees dL/dy"


@kind_param
def test_parametrised_and_pruned_weights(kind):
    """weight is computed on each access: the layer must read it there, and train what is under."""
    layer = parametrizations.weight_norm(make(kind, 6, 4))
    assert parametrize.is_parametrized(layer)
    x = torch.randn(3, 6)
    twin = plain_twin(kind, make(kind, 6, 4))
    twin[0].weight, twin[0].bias = nn.Parameter(layer.weight.detach().clone()), layer.bias
    torch.testing.assert_close(layer(x), twin(x))
    layer(x).sum().backward()
    for p in layer.parametrizations.weight.parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0
    pruned = prune.l1_unstructured(make(kind, 6, 4), "weight", amount=0.5)
    want = KINDS[kind][2]()(nn.functional.linear(x, pruned.weight, pruned.bias))
    torch.testing.assert_close(pruned(x), want)
    assert (pruned.weight == 0).sum() == 12


@kind_param
def test_replaced_parameters_are_used(kind):
    """Nothing of the parameters is cached: LoRA, EMA and weight swaps assign them."""
    layer = make(kind, 6, 4)
    layer(torch.randn(3, 6))
    layer.weight = nn.Parameter(torch.randn(4, 6))
    layer.bias = None
    assert_same_layer(kind, layer)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert_same_layer(kind, layer)
    with policy("eager"):
        assert_same_layer(kind, layer)


@kind_param
def test_scriptable_with_the_same_keys(kind):
    layer = make(kind, 6, 4, bias=kind != "relu")
    scripted = torch.jit.script(layer)
    assert list(scripted.state_dict()) == list(layer.state_dict())
    x = torch.randn(3, 6)
    torch.testing.assert_close(scripted(x), layer(x))


@device_param
def test_training_learns(device):
    """The layers together fit a small function, as their unfused form does, step by step."""
    torch.manual_seed(0)
    fused = nn.Sequential(
        tfl.FusedLinearReLU(8, 32), tfl.FusedLinearGELU(32, 16), tfl.FusedLinear(16, 1)
    ).to(device)
    plain = nn.Sequential(*(copy.deepcopy(layer).to_unfused() for layer in fused))
    x = torch.randn(64, 8, device=device)
    target = (x[:, :1] * x[:, 1:2]).tanh()

    def losses(model):
        optimizer, seen = torch.optim.Adam(model.parameters(), lr=1e-2), []
        for _ in range(60):
            loss = nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    ours, theirs = losses(fused), losses(plain)
    assert ours[-1] < 0.3 * ours[0]
    assert ours == pytest.approx(theirs, rel=5e-2)
