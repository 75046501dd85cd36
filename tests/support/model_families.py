"""Small random models of the families that fuse_ is held to, with what is to be found in each."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

IDS = torch.arange(10).reshape(2, 5)
SMALL = {
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 31,
}
CHUNKED = {**SMALL, "chunk_size_feed_forward": 1}


def transformers():
    return pytest.importorskip("transformers", reason="the blocks are those of transformers")


def hugging_face(model, config, **options):
    """A model by the names of its class and its configuration's."""

    def make():
        library = transformers()
        return getattr(library, model)(getattr(library, config)(**options)).train()

    return make


def timm_mlp(**options):
    def make():
        timm = pytest.importorskip("timm", reason="the block is timm's")
        return timm.layers.Mlp(6, 10, **options)

    return make


def torchvision_mlp():
    transformer = pytest.importorskip(
        "torchvision.models.vision_transformer", reason="the block is torchvision's"
    )
    return transformer.MLPBlock(6, 10, dropout=0.0)


def torchvision_chain():
    ops = pytest.importorskip("torchvision.ops", reason="the block is torchvision's")
    return ops.MLP(6, [9, 8, 7], inplace=True)


def encoder(**options):
    return lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, **options)


def decoder(**options):
    return lambda: nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True, **options)


ROWS = [torch.randn(2, 5, 6)]
TOKENS = {"input_ids": IDS}
WIDE = [torch.randn(2, 5, 8)]
# maker, inputs, blocks, backward steps of two layers: none where the second layer is in another
# module, as BERT's
FAMILIES = {
    "timm Mlp": (timm_mlp(), ROWS, 1, 1),
    "timm Mlp without bias": (timm_mlp(bias=False), ROWS, 1, 1),
    "timm Mlp ReLU": (timm_mlp(act_layer=nn.ReLU), ROWS, 1, 1),
    "torchvision MLPBlock": (torchvision_mlp, ROWS, 1, 1),
    "torchvision MLP": (torchvision_chain, ROWS, 1, 2),
    # with the transform before the vocabulary
    "BERT": (hugging_face("BertForMaskedLM", "BertConfig", **SMALL), TOKENS, 3, 0),
    "BERT in chunks": (hugging_face("BertModel", "BertConfig", **CHUNKED), TOKENS, 2, 0),
    # with the head, which calls gelu as a function
    "RoBERTa": (hugging_face("RobertaForMaskedLM", "RobertaConfig", **SMALL), TOKENS, 3, 0),
    "encoder": (encoder(), WIDE, 1, 1),
    "encoder, norm first, erf": (encoder(activation="gelu", norm_first=True), WIDE, 1, 1),
    "encoder, module": (encoder(activation=nn.GELU()), WIDE, 1, 1),
    "encoder, without bias": (encoder(activation=F.gelu, bias=False), WIDE, 1, 1),
    "decoder": (decoder(), WIDE * 2, 1, 1),
    "decoder, erf": (decoder(activation="gelu"), WIDE * 2, 1, 1),
}
