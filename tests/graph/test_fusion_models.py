"""The pass in the models people have: one graph, no recompiles, the same outputs and gradients."""

import pytest
import torch
from helpers import one_thread  # noqa: F401
from torch import nn

import torch_fused_linear as tfl

LENGTHS = (6, 3, 4, 5, 7, 8, 9, 11, 16, 23)


class Hidden(nn.Module):
    """A Hugging Face model that takes and gives tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(inputs_embeds=x).last_hidden_state


def bert():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    return Hidden(transformers.BertModel(config, add_pooling_layer=False)), {"mlp": 2}


def gpt2():
    """Conv1D, whose weights stand the other way, and tanh GELU written out."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, use_cache=False)
    return Hidden(transformers.GPT2Model(config)), {"mlp": 2}


def opt():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.OPTConfig(
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
        dropout=0.0,
    )
    return Hidden(transformers.OPTModel(config)), {"mlp": 1}


def vit():
    models = pytest.importorskip("torchvision.models", reason="needs torchvision")
    model = models.VisionTransformer(
        image_size=8, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
    )
    return model, {"mlp": 2}


def timm_block():
    blocks = pytest.importorskip("timm.models.vision_transformer", reason="needs timm")
    return blocks.Block(16, num_heads=2), {"mlp": 1}


def encoder_layer():
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), {"mlp": 1}


def step(call, model, x):
    """[output, gradients of x and of every parameter]."""
    leaf = x.clone().requires_grad_()
    torch._dynamo.mark_dynamic(leaf, 0 if x.dim() == 4 else 1)
    y = call(leaf)
    grads = torch.autograd.grad(y.square().mean(), [leaf, *model.parameters()], allow_unused=True)
    return [y.detach(), *grads]


@pytest.mark.parametrize("make", [bert, gpt2, opt, vit, timm_block, encoder_layer])
def test_one_graph_for_ten_lengths(make):
    torch._dynamo.reset()
    model, blocks = make()
    # In eval mode nn.TransformerEncoderLayer is one operator of torch's; in training some versions
    # of OPT throw dice for which layers to leave out, which breaks the graph.
    model.train(make is not opt)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    backend = tfl.compile_backend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for i, n in enumerate(LENGTHS):
        x = torch.randn(n, 3, 8, 8) if make is vit else torch.randn(2, n, 16)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = step(compiled, model, x)
        for a, b in zip(got, step(model, model, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert backend.replaced == blocks
