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


def product_first(m, x):
    return m.down(m.act(m.gate(x)) * m.up(x))


def up_first(m, x):
    up = m.up(x)
    return m.down(up * m.act(m.gate(x)))


def chunked(m, x):
    gate, up = m.both(x).chunk(2, -1)
    return m.down(m.act(gate) * up)


def chunked_up_first(m, x):
    up, gate = torch.chunk(m.both(x), 2, dim=2)
    return m.down(up * m.act(gate))


def ours_inside(m, x):
    return m.down(tfl.linear_silu(x, m.gate.weight, m.gate.bias) * m.up(x))


def layer_alone(m, x):
    return (m.act(m.gate(x)) * m.up(x)).tanh()


def used_twice(m, x):
    hidden = m.act(m.gate(x)) * m.up(x)
    return m.down(hidden) + hidden.sum()


def gate_read_elsewhere(m, x):
    gate = m.gate(x)
    return m.down(m.act(gate) * m.up(x)) + gate.sum()


def other_input(m, x):
    return m.down(m.act(m.gate(x)) * m.up(x + 1))


def three_chunks(m, x):
    first, second, _ = m.both(x).chunk(3, -1)
    return m.act(first) * second


def chunks_of_rows(m, x):
    first, second = m.both(torch.cat([x, x])).chunk(2)
    return m.act(first) * second


def same_half(m, x):
    first, second = m.both(x).chunk(2, -1)
    return m.act(first) * first + second


# What is replaced in each: in the last ones no gated layer.
FORMS = {
    product_first: {"gated_mlp": 1},
    up_first: {"gated_mlp": 1},
    chunked: {"gated_mlp": 1},
    chunked_up_first: {"gated_mlp": 1},
    ours_inside: {"gated_mlp": 1},
    layer_alone: {"linear_glu": 1},
    used_twice: {"linear_glu": 1},
    gate_read_elsewhere: {},
    other_input: {"linear_silu": 1},
    three_chunks: {},
    chunks_of_rows: {},
    same_half: {},
}


def check(model, **options):
    fusion.check(model, [torch.randn(2, 3, 6, requires_grad=True)], "aot_eager", **options)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("bias", [True, False])
def test_forms(bias, form):
    check(Block(form, bias=bias), **FORMS[form])


@pytest.mark.parametrize("name", ACTS)
def test_activations(name):
    check(Block(product_first, ACTS[name]), gated_mlp=1)
    check(Block(chunked, ACTS[name]), gated_mlp=1)


def test_dynamic_tokens():
    check(Block(chunked), gated_mlp=1, dynamic=True)


def test_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 32,
        "pad_token_id": 0,
    }
    tokens = torch.arange(8).reshape(2, 4)
    for name in ("Llama", "Phi3", "Gemma", "Olmo2"):
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}Model")(config).eval()
        backend = tfl.compile_backend("aot_eager")
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend)
        want, got = (m(tokens).last_hidden_state for m in (model, compiled))
        torch.testing.assert_close(got, want)
        assert backend.replaced["gated_mlp"] == 1, name
