"""The pass in the models people have: one graph, no recompiles, the same outputs and gradients."""

import pytest
import torch
from fusion import results
from model_families import SMALL, hugging_face
from torch import nn

import torch_fused_linear as tfl

LENGTHS = (6, 3, 4, 16, 23)


class Hidden(nn.Module):
    """A Hugging Face model that takes and gives tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(inputs_embeds=x).last_hidden_state


def hidden(family, **options):
    return lambda: Hidden(hugging_face(f"{family}Model", f"{family}Config", **options)())


def vit():
    models = pytest.importorskip("torchvision.models", reason="needs torchvision")
    return models.VisionTransformer(
        image_size=8, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
    )


def timm_block():
    blocks = pytest.importorskip("timm.models.vision_transformer", reason="needs timm")
    return blocks.Block(16, num_heads=2)


def encoder_layer():
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


OPT = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "dropout": 0.0}
OPT |= {"num_hidden_layers": 1, "num_attention_heads": 2, "use_cache": False}
GATED = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
GATED |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32, "pad_token_id": 0}
GATED |= {"use_cache": False}
MODELS = {
    "BERT": (hidden("Bert", **{**SMALL, "hidden_size": 16}), {"mlp": 2}),
    # Conv1D, whose weights stand the other way, and tanh GELU written out
    "GPT-2": (hidden("GPT2", n_embd=16, n_layer=2, n_head=2, use_cache=False), {"mlp": 2}),
    "OPT": (hidden("OPT", **OPT), {"mlp": 1}),
    "ViT": (vit, {"mlp": 2}),
    "timm": (timm_block, {"mlp": 1}),
    "encoder layer": (encoder_layer, {"mlp": 1}),
    **{
        family: (hidden(family, **GATED), {"gated_mlp": 1})
        for family in ("Llama", "Phi3", "Gemma", "Olmo2")
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_one_graph_for_every_length(name):
    make, replaced = MODELS[name]
    model = make()
    # In eval mode nn.TransformerEncoderLayer is one operator of torch's; in training some versions
    # of OPT throw dice for which layers to leave out, which breaks the graph.
    model.train(name != "OPT")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    backend = tfl.compile_backend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for i, n in enumerate(LENGTHS):
        x = torch.randn((n, 3, 8, 8) if name == "ViT" else (2, n, 16), requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0 if name == "ViT" else 1)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = results(compiled, [x])
        torch.testing.assert_close(got, results(model, [x]), rtol=1e-4, atol=1e-4)
    assert backend.replaced == replaced
