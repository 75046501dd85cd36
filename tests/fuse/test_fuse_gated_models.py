"""fuse_ on language models and others with gated layers, from tiny configurations."""

import copy

import pytest
import torch
from fused_models import gated, results
from helpers import one_thread  # noqa: F401
from model_families import SMALL, hugging_face
from stacks import assert_same

import torch_fused_linear as tfl

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
# Name of the model, what else its configuration is given, and what is found.
MODELS = {
    **{name: ({}, [SILU]) for name in ("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3")},
    **{name: ({}, [TANH]) for name in ("Gemma", "Gemma2")},
    "Gemma3Text": ({}, [TANH]),
    **{name: ({}, [SILU]) for name in ("Phi3", "Glm", "Glm4")},  # gate and up in one layer
    **{name: ({}, [SILU]) for name in ("Olmo", "Olmo2", "StableLm", "Granite", "Cohere")},
    **{name: ({}, [SILU]) for name in ("SmolLM3", "Helium", "Exaone4")},
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


def model_of(name):
    options, found = MODELS[name]
    inputs = {"pixel_values": torch.randn(1, 3, 8, 8, dtype=torch.float64)}
    if "image_size" not in options:
        inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if "T5" in name else {})
    common = {} if "T5" in name else SIZES
    model = hugging_face(f"{name}Model", f"{name}Config", **{**common, **options})
    torch.manual_seed(0)
    made = model().double()
    made.config._experts_implementation = "eager"
    return made, inputs, found


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name):
    fused, inputs, found = model_of(name)
    plain = copy.deepcopy(fused)
    report = tfl.fuse_(fused)
    assert gated(report) == found, report
    assert_same(results(fused, inputs), results(plain, inputs))
    assert not tfl.fuse_(fused).fused
