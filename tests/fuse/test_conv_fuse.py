"""What fuse_ does with convolutions, and what it leaves alone."""

import copy

import pytest
import torch
from fused_models import results
from helpers import one_thread  # noqa: F401
from stacks import assert_same
from torch import nn
from torch.nn.utils import parametrizations

import torch_fused_linear as tfl


class Digits(nn.Module):
    """As people write them: a forward that is read, and one activation for all."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, stride=2, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4 * 3 * 3, 5)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        return self.fc(torch.flatten(x, 1))


def sequential(*between, activation=None, conv=None):
    conv = conv or nn.Conv2d(1, 4, 3)
    return nn.Sequential(conv, *between, activation or nn.ReLU(), nn.Flatten())


MODELS = {
    "sequential": (sequential, 1),
    "dropout between": (lambda: sequential(nn.Dropout(0.0)), 1),
    "a forward that is read": (Digits, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_fuse_and_unfuse(name, tmp_path):
    maker, count = MODELS[name]
    model = maker()
    plain, x = copy.deepcopy(model), [torch.randn(2, 1, 8, 8)]
    report = tfl.fuse_(model)
    assert len(report.fused) == count and not report.skipped, report
    assert report.fused[0].before[:2] == ("Conv2d", "BiasAdd")
    assert report.fused[0].after == ("conv2d_relu",)
    report.save_picture(tmp_path / "blocks.svg")
    with tfl.explain() as calls:
        model(*x)
    assert [c.operator for c in calls.calls].count("conv2d_relu") == count
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_same(results(model, x), results(plain, x))
    scripted = torch.jit.script(model)
    assert len(tfl.fuse_script_(scripted).fused) == count
    torch.testing.assert_close(scripted(*x), plain(*x))
    assert str(scripted.inlined_graph).count("fused::conv2d_relu") == count
    assert tfl.fuse_(model).skipped[0].reason == "already fused"
    tfl.unfuse_(model)
    assert repr(model) == repr(plain)
    assert_same(results(model, x), results(plain, x))


class Lora(nn.Conv2d):
    pass


class Seen(Digits):
    """What comes before the ReLU is used by somebody else too."""

    def forward(self, x):
        z = self.conv1(x)
        return self.relu(z) + z


REFUSED = {
    "batch norm": (lambda: sequential(nn.BatchNorm2d(4)), "normalisation stands between"),
    "GELU": (
        lambda: sequential(activation=nn.GELU()),
        "GELU: a convolution can be",
    ),
    "SiLU": (
        lambda: sequential(activation=nn.SiLU()),
        "SiLU: a convolution can be",
    ),
    "child": (lambda: sequential(conv=Lora(1, 4, 3)), "Lora is not exactly nn.Conv2d"),
    "complex": (lambda: sequential(conv=nn.Conv2d(1, 4, 3, dtype=torch.cfloat)), "complex64"),
    "weight_norm": (
        lambda: sequential(conv=parametrizations.weight_norm(nn.Conv2d(1, 4, 3))),
        "parametrisation",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_left_alone_with_a_reason(name):
    maker, reason = REFUSED[name]
    model = maker()
    before = repr(model)
    report = tfl.fuse_(model)
    assert not report.fused and len(report.skipped) == 1, report
    assert reason in report.skipped[0].reason and report.skipped[0].path == "0"
    assert repr(model) == before


def test_a_preactivation_that_is_used_elsewhere_stays():
    model = Seen()
    assert not tfl.fuse_(model).fused


class Branching(nn.Module):
    """What the activation reads is read by another as well."""

    def __init__(self, norm=False):
        super().__init__()
        self.conv, self.relu = nn.Conv2d(1, 4, 3), nn.ReLU()
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()

    def forward(self, x):
        y = self.norm(self.conv(x))
        return y + self.relu(y)


def test_a_block_that_is_none_has_its_reason():
    (skipped,) = tfl.fuse_(nn.ModuleDict({"block": Branching()})).skipped
    assert skipped.path == "block" and "straight to 'relu' and nowhere else" in skipped.reason
    report = tfl.fuse_(Branching(norm=True))
    assert not report.fused and not report.skipped, "a normalised convolution is seldom meant to"
