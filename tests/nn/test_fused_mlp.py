"""FusedMLP: the nn.Sequential that it is, and when its children run one by one."""

import copy
import io
import itertools
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import one_thread, policy  # noqa: F401
from mlp_models import assert_equal_models, gradients, runs_as_one
from torch import nn

from torch_fused_linear import FusedMLP

LAYERS = {
    "relu": nn.ReLU,
    "gelu_tanh": partial(nn.GELU, "tanh"),
    "gelu_erf": nn.GELU,
    "silu": nn.SiLU,
}
activation_param = pytest.mark.parametrize("activation", LAYERS)


def sequential(*sizes, activation="relu", bias=True, **options):
    modules = []
    for size_in, size_out in itertools.pairwise(sizes):
        modules.append(nn.Linear(size_in, size_out, bias=bias, **options))
        modules.append(LAYERS[activation]())
    return nn.Sequential(*modules[:-1])


@activation_param
def test_constructor(activation, device):
    for sizes in ((4, 3), (4, 6, 3), (4, 6, 5, 6, 3)):
        for bias in (True, False):
            options = {"device": device, "dtype": torch.float64}
            model = FusedMLP(*sizes, activation=activation, bias=bias, **options)
            twin = sequential(*sizes, activation=activation, bias=bias, **options)
            assert [type(m) for m in model] == [type(m) for m in twin]
            assert isinstance(model, nn.Sequential) and len(model) == 2 * len(sizes) - 3
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert (p.shape, p.dtype, p.device) == (q.shape, q.dtype, q.device)
            twin.load_state_dict(model.state_dict())
            x = torch.randn(2, 3, 4, **options)
            assert runs_as_one(model, x)
            assert_equal_models(model, twin, x)


def test_initialisation_is_that_of_linear():
    torch.manual_seed(5)
    model = FusedMLP(4, 6, 3)
    torch.manual_seed(5)
    for p, q in zip(model.parameters(), sequential(4, 6, 3).parameters(), strict=True):
        assert torch.equal(p, q)


@activation_param
def test_state_dict_loads_both_ways(activation):
    model, twin = FusedMLP(4, 6, 3, activation=activation), sequential(4, 6, 3)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(model.state_dict()) == list(twin.state_dict())
    model.load_state_dict(twin.state_dict(), strict=True)
    assert torch.equal(model[0].weight, twin[0].weight)
    with torch.no_grad():
        model[2].bias.add_(1)
    twin.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model[2].bias, twin[2].bias)


@activation_param
def test_from_and_to_sequential_share_the_objects(activation):
    twin = sequential(4, 6, 5, 3, activation=activation).eval()
    model = FusedMLP.from_sequential(twin)
    assert model.activation == activation and not model.training
    assert all(a is b for a, b in zip(model, twin, strict=True))
    back = model.to_sequential()
    assert type(back) is nn.Sequential and not back.training
    assert all(a is b for a, b in zip(back, twin, strict=True))
    assert_equal_models(model, twin, torch.randn(5, 4))
    assert model.train().to_sequential().training


def test_from_sequential_refuses_what_it_is_not():
    class Own(nn.ReLU):
        def forward(self, x):
            return x

    linear = nn.Linear(4, 4)
    bad = [
        [],
        [nn.ReLU()],
        [linear, nn.ReLU()],
        [linear, linear],
        [linear, nn.Tanh(), linear],
        [linear, Own(), linear],
        [linear, nn.ReLU(), linear, nn.GELU(), linear],
        [linear, nn.GELU("tanh"), linear, nn.GELU(), linear],
        [linear, nn.ReLU(), nn.ReLU(), linear],
        [linear, nn.ReLU(), nn.Dropout(0.5), linear],
    ]
    for modules in bad:
        with pytest.raises(ValueError, match=r"FusedMLP.from_sequential: expected") as error:
            FusedMLP.from_sequential(nn.Sequential(*modules))
        for module in modules:
            assert type(module).__name__ in str(error.value)


def test_from_sequential_of_subclasses_computes_what_they_compute():
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    twin = nn.Sequential(Twice(4, 6), nn.ReLU(), nn.Linear(6, 3))
    assert_equal_models(FusedMLP.from_sequential(twin), twin, torch.randn(5, 4))
    lone = FusedMLP.from_sequential(nn.Sequential(nn.Linear(4, 3)))
    assert_equal_models(lone, nn.Sequential(*lone), torch.randn(5, 4))


def test_wrong_constructor_arguments():
    with pytest.raises(ValueError, match=r"FusedMLP: expected the sizes.*got none"):
        FusedMLP(4)
    with pytest.raises(ValueError, match=r"FusedMLP: activation must be.*got 'swish'"):
        FusedMLP(4, 6, 3, activation="swish")
    with pytest.raises(ValueError, match=r"FusedMLP: activation must be.*got 'none'"):
        FusedMLP(4, 3, activation="none")
    with pytest.raises(RuntimeError, match=r"mlp, layer 0: expected.*got"):
        FusedMLP(4, 3)(torch.randn(2, 5))


# --- copies, dtypes, policies -------------------------------------------------------------------


@activation_param
def test_copies(activation):
    model, x = FusedMLP(4, 6, 3, activation=activation), torch.randn(5, 4)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    for other in copies:
        assert type(other) is FusedMLP and other.activation == activation
        assert other[0].weight is not model[0].weight
        assert runs_as_one(other, x)
        assert_equal_models(other, model, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, device):
    model = FusedMLP(4, 6, 3, device=device).to(dtype)
    x = torch.randn(5, 4, device=device, dtype=dtype)
    assert model(x).dtype == dtype and runs_as_one(model, x)
    torch.testing.assert_close(model(x), model.to_sequential()(x), rtol=2e-2, atol=2e-2)
    assert model.half()[0].weight.dtype == torch.float16


@activation_param
def test_policies_agree(activation, device):
    model = FusedMLP(4, 130, 7, 3, activation=activation, device=device, dtype=torch.float64)
    x = torch.randn(9, 4, device=device, dtype=torch.float64)
    with policy("eager"):
        want = gradients(model, x)
    for name in ("auto", "cublaslt"):
        with policy(name):
            for a, b in zip(gradients(model, x), want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_repr_and_slices():
    model = FusedMLP(4, 6, 3, activation="gelu_tanh")
    assert repr(model).startswith("FusedMLP(\n  (0): Linear(in_features=4, out_features=6")
    assert "(1): GELU(approximate='tanh')" in repr(model)
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert isinstance(model[0], nn.Linear) and len(list(model.children())) == 3


def test_slices_are_sequentials_of_the_same_modules():
    model, x = FusedMLP(4, 6, 3), torch.randn(5, 4)
    head = model[:2]
    assert isinstance(head, nn.Sequential) and head[0] is model[0]
    torch.testing.assert_close(head(x), F.relu(F.linear(x, model[0].weight, model[0].bias)))


def test_trains():
    torch.manual_seed(2)
    model, x = FusedMLP(4, 32, 32, 1, activation="gelu_erf"), torch.randn(64, 4)
    target = x.prod(1, keepdim=True)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(model(x), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
