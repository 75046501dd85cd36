"""fuse_ on blocks of real models: the same outputs and gradients, as many blocks as there are."""

import copy

import pytest
import torch
import zoo
from fused_models import assert_contract_in, assert_fuses, gated, results
from helpers import one_thread  # noqa: F401
from model_families import FAMILIES, SMALL, TOKENS, encoder, hugging_face
from stacks import assert_same
from torch import nn

import torch_fused_linear as tfl

# Models of the zoo: their blocks, each of which hands its gradient over.
ZOO = {"distilbert": 2, "vit": 2, "opt": 2, "gpt2": 2, "phi": 2, "whisper": 4, "t5": 4}


def family_of(name):
    if name in FAMILIES:
        return FAMILIES[name]
    pytest.importorskip("transformers", reason="the blocks are those of transformers")
    model, inputs = zoo.load(f"transformers/{name}")
    return lambda: model.train(), inputs, ZOO[name], ZOO[name]


@pytest.mark.parametrize("family", [*FAMILIES, *ZOO])
def test_outputs_and_gradients(family):
    assert_fuses(*family_of(family))


@pytest.mark.parametrize("family", ["BERT", "gpt2", "opt", "timm Mlp", "encoder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_in_narrow_types_are_not_above_eagers(family, dtype):
    assert_contract_in(dtype, *family_of(family)[:2])


KINDS = {
    **dict.fromkeys(("gelu", "gelu_python"), "linear_gelu (erf)"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "linear_gelu (tanh)"),
    **{"gelu_accurate": "linear_gelu (tanh)", "relu": "linear_relu", "silu": "linear_silu"},
    "relu2": "linear_relu2",
}


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_activation_is_kept(name):
    make = hugging_face("PhiModel", "PhiConfig", **SMALL, hidden_act=name)
    model = assert_fuses(make, TOKENS, 2, 2)
    tfl.unfuse_(model)
    assert tfl.fuse_(model).fused[0].after[0] == KINDS[name]


@pytest.mark.parametrize("name", ["quick_gelu", "gelu_10", "mish", "relu6", "tanh"])
def test_other_activations_are_refused_by_name(name):
    model = hugging_face("PhiModel", "PhiConfig", **SMALL, hidden_act=name)()
    text = repr(model)
    report = tfl.fuse_(model)
    assert not report.fused and repr(model) == text
    assert [s.path for s in report.skipped] == ["layers.0.mlp.fc1", "layers.1.mlp.fc1"]
    activation = type(model.layers[0].mlp.activation_fn).__name__
    assert all(activation in s.reason for s in report.skipped)


def test_gradient_checkpointing_still_works():
    make, inputs, blocks, _ = FAMILIES["BERT"]
    model = make().double()
    want = results(model, inputs)
    model.gradient_checkpointing_enable()
    assert len(tfl.fuse_(model).fused) == blocks
    with tfl.explain() as calls:
        assert_same(results(model, inputs), want)
    assert calls.handed_over == 2, calls


def test_save_pretrained_writes_the_plain_model(tmp_path):
    model = hugging_face("BertModel", "BertConfig", **SMALL)().eval()
    want = model(**TOKENS)[0]
    assert tfl.fuse_(model).fused
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert not tfl.is_fused(loaded)
    torch.testing.assert_close(loaded(**TOKENS)[0], want)


def test_a_stack_of_encoder_layers_keeps_its_fast_path():
    layer = encoder()()
    tfl.fuse_(layer)
    stack = nn.TransformerEncoder(layer, 2).double().eval()
    plain = copy.deepcopy(stack)
    tfl.unfuse_(plain)
    x, mask = torch.randn(2, 5, 8).double(), torch.arange(5).expand(2, 5) > 3
    with torch.no_grad(), tfl.explain() as calls:
        got = stack(x, src_key_padding_mask=mask)
    assert not calls.calls, "torch's own kernel ran"
    with torch.no_grad():
        assert torch.equal(got, plain(x, src_key_padding_mask=mask))


# --- gated ----------------------------------------------------------------------------------------

SIZES = {
    **{k: v for k, v in SMALL.items() if not k.endswith("prob")},
    **{"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 4},
}
T5 = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"}
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
IMAGES = {"image_size": 8, "patch_size": 4}
MODERN = {"cls_token_id": 1, "sep_token_id": 1, "attention_dropout": 0.0, "mlp_dropout": 0.0}
SILU, TANH, ERF = (f"gated_mlp ({act})" for act in ("SiLU", "GELU (tanh)", "GELU (erf)"))
GLU = "linear_glu (GELU (tanh))"
ALIKE = "Llama Mistral Ministral Qwen2 Qwen3 Olmo Olmo2 StableLm Granite Cohere SmolLM3 Helium"
# Name of the model, what else its configuration is given, and what is found.
GATED = {
    **{name: ({}, [SILU]) for name in ALIKE.split()},
    **{name: ({}, [TANH]) for name in ("Gemma", "Gemma2", "Gemma3Text")},
    **{name: ({}, [SILU]) for name in ("Phi3", "Glm", "Glm4")},  # gate and up in one layer
    "Exaone4": ({}, [SILU]),
    "ModernBert": (MODERN, [ERF]),
    "T5": (T5, [GLU] * 2),
    "MT5": (T5, [GLU] * 2),
    "LongT5": (T5, [TANH] * 2),
    "Qwen2Moe": ({**MOE, "shared_expert_intermediate_size": 12}, [SILU]),  # the shared expert
    "Glm4Moe": ({**MOE, **ROUTED}, [SILU]),  # the layers before those with experts
    "Dinov2": ({**IMAGES, "use_swiglu_ffn": True}, [SILU]),
    "PixtralVision": (IMAGES, [ERF]),
}
IDS = torch.arange(3, 9).reshape(2, 3)
X = torch.randn(2, 3, 6, dtype=torch.float64)


def model_of(name):
    options, found = GATED[name]
    inputs = {"pixel_values": torch.randn(1, 3, 8, 8, dtype=torch.float64)}
    if "image_size" not in options:
        inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if "T5" in name else {})
    common = {} if "T5" in name else SIZES
    model = hugging_face(f"{name}Model", f"{name}Config", **{**common, **options})
    torch.manual_seed(0)
    made = model().double()
    made.config._experts_implementation = "eager"
    return made, inputs, found


@pytest.mark.parametrize("name", GATED)
def test_gated_models_of_transformers(name):
    fused, inputs, found = model_of(name)
    plain = copy.deepcopy(fused)
    report = tfl.fuse_(fused)
    assert gated(report) == found, report
    assert_same(results(fused, inputs), results(plain, inputs))
    assert not tfl.fuse_(fused).fused


def timm_block(name, **options):
    layers = pytest.importorskip("timm").layers
    return lambda: getattr(layers, name)(6, 8, bias=True, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SwiGLU", {}),
        ("SwiGLUPacked", {}),
        ("GluMlp", {"act_layer": nn.SiLU}),  # which has gate last
        ("GluMlp", {"act_layer": nn.GELU, "gate_last": False}),
        ("SwiGLU", {"norm_layer": nn.LayerNorm}),
    ],
)
def test_gated_blocks_of_timm(name, options):
    make = timm_block(name, **options)
    assert_fuses(make, [X], 1, 0)
    has_norm = "norm_layer" in options
    assert gated(tfl.fuse_(make()))[0].startswith("linear_glu" if has_norm else "gated_mlp")


def test_a_convolution_or_sigmoid_in_timms_block_is_left_alone():
    for options, x in (({}, X), ({"use_conv": True, "act_layer": nn.SiLU}, X.reshape(1, 6, 2, 3))):
        fused = timm_block("GluMlp", **options)().double()
        plain = copy.deepcopy(fused)
        assert not gated(tfl.fuse_(fused))
        assert_same(results(fused, [x]), results(plain, [x]))
