"""The pass of torch.compile: gated layers and blocks."""

import fusion
import pytest
import torch
import torch.nn.functional as F
from fusion import fresh_dynamo  # noqa: F401
from helpers import one_thread  # noqa: F401
from torch import nn

import torch_fused_linear as tfl

ACTS = {"silu": F.silu, "relu": torch.relu, "gelu_tanh": nn.GELU("tanh"), "gelu_erf": F.gelu}


class Block(nn.Module):
    def __init__(self, form, act=F.silu, bias=True):
        super().__init__()
        self.gate, self.up = nn.Linear(6, 8, bias), nn.Linear(6, 8, bias)
        self.both, self.down = nn.Linear(6, 16, bias), nn.Linear(8, 5, bias)
        self.form, self.act = form, act

    def forward(self, x):
        return self.form(self, x)


def used_twice(m, x):
    hidden = m.act(m.gate(x)) * m.up(x)
    return m.down(hidden) + hidden.sum()


def gate_read_elsewhere(m, x):
    gate = m.gate(x)
    return m.down(m.act(gate) * m.up(x)) + gate.sum()


def chunks(m, x, number=2, dim=-1):
    return m.both(x).chunk(number, dim)


def product_first(m, x):
    return m.down(m.act(m.gate(x)) * m.up(x))


def chunked(m, x):
    return (lambda gate, up: m.down(m.act(gate) * up))(*chunks(m, x))


# What is replaced in each: in the last ones no gated layer.
FORMS = {
    "product first": (product_first, {"gated_mlp": 1}),
    "up first": (
        lambda m, x: (lambda up: m.down(up * m.act(m.gate(x))))(m.up(x)),
        {"gated_mlp": 1},
    ),
    "chunked": (chunked, {"gated_mlp": 1}),
    "chunked, up first": (
        lambda m, x: (lambda up, gate: m.down(up * m.act(gate)))(*torch.chunk(m.both(x), 2, dim=2)),
        {"gated_mlp": 1},
    ),
    "ours inside": (
        lambda m, x: m.down(tfl.linear_silu(x, m.gate.weight, m.gate.bias) * m.up(x)),
        {"gated_mlp": 1},
    ),
    "a layer alone": (lambda m, x: (m.act(m.gate(x)) * m.up(x)).tanh(), {"linear_glu": 1}),
    "used twice": (used_twice, {"linear_glu": 1}),
    "a gate read elsewhere": (gate_read_elsewhere, {}),
    "another input": (lambda m, x: m.down(m.act(m.gate(x)) * m.up(x + 1)), {"linear_silu": 1}),
    "three chunks": (lambda m, x: (lambda a, b, _: m.act(a) * b)(*chunks(m, x, 3)), {}),
    "chunks of rows": (
        lambda m, x: (lambda a, b: m.act(a) * b)(*chunks(m, torch.cat([x, x]), dim=0)),
        {},
    ),
    "the same half": (lambda m, x: (lambda a, b: m.act(a) * a + b)(*chunks(m, x)), {}),
}


def check(model, **options):
    fusion.check(model, [torch.randn(2, 3, 6, requires_grad=True)], "aot_eager", **options)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_forms(bias, name):
    form, replaced = FORMS[name]
    check(Block(form, bias=bias), **replaced)


@pytest.mark.parametrize("name", ACTS)
def test_activations(name):
    check(Block(product_first, ACTS[name]), gated_mlp=1)
    check(Block(chunked, ACTS[name]), gated_mlp=1)


def test_dynamic_tokens():
    check(Block(chunked), gated_mlp=1, dynamic=True)
