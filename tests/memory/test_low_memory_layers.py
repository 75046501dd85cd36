"""The layers, and fuse_, that ask for low memory."""

import copy
import io
import pickle

import pytest
import torch
from helpers import kept_bytes, one_thread, saved_bytes  # noqa: F401
from low_memory import network
from torch import nn

import torch_fused_linear as tfl


def test_layers_keep_less(device):
    sizes = (128, 256, 384, 128)
    low, default = (network(m, torch.float32, device, sizes) for m in ("low", "default"))
    x = torch.randn(64, 128, device=device)
    hidden = [256, 384, 256]  # of the GELUs; the last one's in the chain
    relu, extra = 384, 384 // 32
    assert kept_bytes(lambda: default(x)) == 64 * 4 * (2 * sum(hidden) + relu)
    # its output is kept by the chain after it, so that the bits of ReLU are no gain here
    assert kept_bytes(lambda: low(x)) == 64 * 4 * (sum(hidden) + relu + extra)


def test_constructors_and_copies():
    for cls, options in (
        (tfl.FusedLinearReLU, {}),
        (tfl.FusedLinearGELU, {"approximate": "none"}),
    ):
        layer = cls(6, 8, memory="low", **options)
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        taken_over = cls.from_linear(nn.Linear(6, 8), memory="low", **options)
        copies = [
            copy.deepcopy(layer),
            pickle.loads(pickle.dumps(layer)),
            torch.load(buffer, weights_only=False),
            taken_over,
        ]
        for other in copies:
            assert other.memory == "low" and repr(other).endswith("memory='low')")
        default = cls(6, 8, **options)
        assert default.memory == "default" and "memory" not in repr(default)
        assert list(layer.state_dict()) == ["weight", "bias"]
        with pytest.raises(ValueError, match=rf"{cls.__name__}: memory must be .*got 'less'"):
            cls(6, 8, memory="less")


def test_a_chain_of_layers():
    chain = tfl.FusedMLP(6, 8, 4, activation="gelu_tanh", memory="low")
    again = tfl.FusedMLP.from_sequential(chain.to_sequential(), memory="low")
    for mlp in (chain, again, copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert mlp.memory == "low" and "memory='low'" in repr(mlp)
    x = torch.randn(5, 6)
    assert saved_bytes(lambda: chain(x), list(chain.parameters())) == 4 * 5 * (6 + 8)
    assert "memory" not in repr(tfl.FusedMLP(6, 8, 4))
    for make in (
        lambda m: tfl.FusedMLP(6, 4, memory=m),
        lambda m: chain.from_sequential(chain, memory=m),
    ):
        with pytest.raises(ValueError, match=r"FusedMLP.*memory must be .*got 'less'"):
            make("less")


class Block(nn.Module):
    """The feed-forward block of a transformer, and ReLU with dropout after it."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)
        self.fc3, self.relu, self.drop = nn.Linear(128, 256), nn.ReLU(), nn.Dropout(0.5)
        self.fc4, self.relu2, self.fc5 = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128)

    def forward(self, x):
        x = self.fc2(self.act(self.fc1(x)))
        x = self.drop(self.relu(self.fc3(x)))
        return self.fc5(self.relu2(self.fc4(x)))


def test_fuse_takes_low_memory_where_it_pays():
    """GELU with a fused layer straight after it, ReLU without one."""
    model = Block()
    before = repr(model)
    tfl.fuse_(model, memory="low")
    x = torch.randn(64, 128)
    kept = kept_bytes(lambda: model(x))
    tfl.unfuse_(model)
    assert repr(model) == before
    tfl.fuse_(model)
    saved = kept_bytes(lambda: model(x)) - kept
    assert saved == 64 * (256 * 4 + 256 * 4 - 256 // 8)
    with pytest.raises(ValueError, match=r"fuse_: memory must be .*got 'less'"):
        tfl.fuse_(Block(), memory="less")


class Subclass(nn.Linear):
    """Left alone by fuse_, as layers of LoRA are."""


@pytest.mark.parametrize(
    "after, pays",
    [
        (nn.Identity(), True),
        (nn.Dropout(0.5), True),
        (nn.Sigmoid(), True),
        (nn.Sequential(nn.Dropout(0.5), nn.LayerNorm(256)), True),
        (nn.LayerNorm(256), False),
        (nn.BatchNorm1d(256), False),
        (Subclass(256, 128), False),
        (nn.Sequential(nn.Dropout(0.0), Subclass(256, 128)), False),
    ],
    ids=str,
)
def test_fuse_never_keeps_more_than_eager(after, pays):
    """ReLU's output is kept by a normalisation or a linear layer after it, bits or no bits."""
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), after)
    x = torch.randn(64, 128)
    kept_by_eager = kept_bytes(lambda: model(x))
    tfl.fuse_(model, memory="low")
    kept = kept_bytes(lambda: model(x))
    assert kept < kept_by_eager if pays else kept == kept_by_eager
