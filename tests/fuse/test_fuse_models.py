"""fuse_ on blocks of real models: the same outputs and gradients, as many blocks as there are."""

import copy
import json
from pathlib import Path

import pytest
import torch
import zoo
import zoo_check
from fused_models import assert_contract_in, assert_fuses, cast, gated, results
from model_families import FAMILIES, SMALL, TOKENS, encoder, hugging_face
from model_zoo import wrong
from stacks import assert_same
from torch import nn

import torch_fused_linear as tfl

# Models of the zoo: their blocks.
ZOO = {"distilbert": 2, "vit": 2, "opt": 2, "gpt2": 2, "phi": 2, "whisper": 4, "t5": 4}


def family_of(name):
    if name in FAMILIES:
        return FAMILIES[name]
    pytest.importorskip("transformers", reason="the blocks are those of transformers")
    model, inputs = zoo.load(f"transformers/{name}")
    joint = 0 if name == "t5" else ZOO[name]  # a cast stands between its layers
    return lambda: model.train(), inputs, ZOO[name], joint


@pytest.mark.parametrize("family", [*FAMILIES, *ZOO])
def test_outputs_and_gradients(family):
    assert_fuses(*family_of(family))


@pytest.mark.parametrize("family", ["BERT", "gpt2", "opt", "timm Mlp", "encoder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_in_narrow_types_are_not_above_eagers(family, dtype):
    assert_contract_in(dtype, *family_of(family)[:2])


KINDS = {
    **dict.fromkeys(("gelu", "gelu_python"), "mlp (GELU (erf))"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "mlp (GELU (tanh))"),
    **{"gelu_accurate": "mlp (GELU (tanh))", "relu": "mlp (ReLU)", "silu": "mlp (SiLU)"},
    "relu2": "mlp (ReLU²)",
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
    make, inputs, blocks, joint = family_of("gpt2")
    model = make().double()
    want = results(model, inputs)
    model.gradient_checkpointing_enable()
    assert len(tfl.fuse_(model).fused) == blocks
    with tfl.explain() as calls:
        assert_same(results(model, inputs), want)
    steps = [call.operator for call in calls.calls]
    assert steps.count("_linear_backward_across") == joint == 2, calls


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


SILU, TANH, ERF = (f"gated_mlp ({act})" for act in ("SiLU", "GELU (tanh)", "GELU (erf)"))
ALIKE = "llama mistral ministral qwen2 qwen3 olmo olmo2 stablelm granite cohere smollm3 helium"
# Models of the zoo, and what is found in each of their blocks.
GATED = {
    **dict.fromkeys([*ALIKE.split(), "exaone4"], SILU),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "longt5"), TANH),
    **dict.fromkeys(("phi3", "glm", "glm4"), SILU),  # gate and up in one layer
    **dict.fromkeys(("modernbert", "pixtral"), ERF),
    **dict.fromkeys(("t5", "mt5"), "linear_glu (GELU (tanh))"),
    "qwen2_moe": SILU,  # the shared expert
    "glm4_moe": SILU,  # the layers before those with experts
    "dinov2": SILU,
}
T5 = {"feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
CHANGES = {"t5": T5, "longt5": T5, "dinov2": {"use_swiglu_ffn": True}}
CHANGES["ministral"] = {"head_dim": 16}
X = torch.randn(2, 3, 6, dtype=torch.float64)


@pytest.mark.parametrize("name", GATED)
def test_gated_models_of_transformers(name):
    pytest.importorskip("transformers", reason="the blocks are those of transformers")
    fused, inputs = zoo.load(f"transformers/{name}", **CHANGES.get(name, {}))
    inputs = cast(inputs, torch.float64)
    fused.double().config._experts_implementation = "eager"
    plain = copy.deepcopy(fused)
    report = tfl.fuse_(fused)
    assert gated(report) == [GATED[name]] * (4 if "t5" in name else 2), report
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


# name: at least so many blocks
SAMPLE = dict.fromkeys(("timm/test_vit", "transformers/wav2vec2"), 1)
SAMPLE |= dict.fromkeys(("timm/resnetv2_18", "timm/swiftformer_xs", "timm/gmlp_ti16_224"), 0)
SAMPLE["transformers/clip"] = 0


@pytest.mark.parametrize("name", SAMPLE)
def test_a_model_is_the_same_before_and_after(name):
    pytest.importorskip(name.split("/")[0], reason="the model is theirs")
    record = zoo_check.check(name, steps=True)
    assert "skipped" not in record, record
    assert not wrong(record) and record["step"] is True, record
    assert record["blocks"] >= SAMPLE[name], record


def test_the_record_has_no_wrong_result():
    record = json.loads(Path(__file__).with_name("model_zoo.json").read_text())
    assert [r for r in record["models"] if wrong(r)] == []
    compared = [r for r in record["models"] if r.get("forward") is True]
    assert len(compared) >= 0.6 * len(record["models"])
    assert all(r["skipped"] for r in record["models"] if r not in compared)
