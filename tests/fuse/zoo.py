"""The models of timm and transformers, small, without downloads, with inputs that they take.

A model is named ``timm/NAME`` or ``transformers/MODEL_TYPE``. Whatever cannot be built or run as it
is raises, and the caller records the reason.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

MOST_PARAMETERS = 300_000_000
# Words in names of small variants, the smallest first.
SMALL = [
    *("test_", "atto", "femto", "zepto", "nano", "pico", "micro", "xxtiny", "xxs", "xtiny", "xs"),
    *("tiny", "mini", "_t", "_s", "small", "_050", "_b0", "_m0", "_s0", "_s1", "_l1", "18", "26"),
    *("14", "_5m", "_d1", "_9_", "_f0"),
]


def timm_names() -> list[str]:
    """For each of timm's modules, the variant with the smallest name and one of another family."""
    import timm

    def size(name: str) -> tuple[int, int, str]:
        rank = next((i for i, word in enumerate(SMALL) if word in name), len(SMALL))
        return rank, len(name), name

    chosen = []
    for module in timm.list_modules():
        names = sorted(timm.list_models(module=module), key=size)
        others = [n for n in names if n.split("_")[0] != names[0].split("_")[0]]
        chosen += [f"timm/{n}" for n in [*names[:1], *(others[:1] or names[1:2])]]
    return list(dict.fromkeys(chosen))


def transformers_names() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return [f"transformers/{name}" for name in sorted(CONFIG_MAPPING_NAMES)]


def names() -> list[str]:
    return transformers_names() + timm_names()


def load(name: str, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and keyword arguments for its forward; changes: of transformers' configuration.

    Raises:
        Exception: whatever the first way to build it, or else to run it, raised.
    """
    library, name = name.split("/", 1)
    ways = timm_ways(name) if library == "timm" else transformers_ways(name, changes)
    building: list[Exception] = []
    running: list[Exception] = []
    for make in ways:
        try:
            torch.manual_seed(0)
            model, candidates = make()
        except Exception as e:
            building.append(e)
            continue
        for inputs in candidates:
            try:
                with torch.no_grad():
                    model.eval()(**inputs)
                return model, inputs
            except Exception as e:
                running.append(e)
    nothing = LookupError("no class of this library takes this configuration alone")
    raise [*running, *building, nothing][0]


# timm --------------------------------------------------------------------------------------------


def timm_ways(name: str) -> Iterator[Callable]:
    import timm

    def make(**options):
        model = timm.create_model(name, pretrained=False, num_classes=10, **options)
        own = model.default_cfg.get("input_size") or (3, 224, 224)
        sizes = [options["img_size"]] if "img_size" in options else [64, 128, own[-1]]
        key = next(iter(inspect.signature(model.forward).parameters))
        return model, [{key: torch.randn(2, own[0], size, size)} for size in sizes]

    for options in ({"img_size": 64, "depth": 2}, {"depth": 2}, {"img_size": 64}, {}):
        yield lambda options=options: make(**options)


# transformers ------------------------------------------------------------------------------------

VOCABULARY = 256
LAYERS = re.compile(
    r"(^|_)(num_(hidden_|decoder_|encoder_|block_|)?(layers|blocks)|n_layers?|layers|depth)$"
    r"|(encoder|decoder)_layers$|_layers$|_depth$"
)
SIZES = {
    64: "hidden_size d_model n_embd dim embed_dim hidden_dim encoder_hidden_size output_dim "
    "decoder_hidden_size embedding_size word_embed_proj_dim projection_dim emb_dim embedding_dim "
    "d_embed text_hidden_size out_hidden_size encoder_embed_dim text_embed_dim n_embed "
    "text_dim lstm_hidden_dim encoder_hidden_dim vision_width hidden_size_per_layer_input",
    96: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner mlp_dim d_inner "
    "moe_intermediate_size shared_expert_intermediate_size feed_forward_size ffn_hidden_size "
    "encoder_intermediate_dim moe_shared_expert_intermediate_size shared_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_key_value_heads n_head_kv",
    32: "qk_head_dim",
    16: "head_dim d_kv d_head attention_head_size kv_channels global_head_dim rotary_dim "
    "q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank index_head_dim",
    8: "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_key_heads "
    "linear_num_value_heads",
    2: "num_experts_per_tok moe_topk top_k moe_k n_group",
    1: "topk_group",
}
DERIVED = ("transformers_version", "architectures", "stage_names", "out_features", "out_indices")
SIZE_OF = {name: size for size, text in SIZES.items() for name in text.split()}


def tuple_or_value(value):
    return tuple(value) if isinstance(value, list) else value


def shrunk(values: dict, gentle: bool) -> dict:
    """A configuration's values, small: few layers, small vocabulary and, unless gentle, narrow."""
    depths = {v for k, v in values.items() if isinstance(v, int) and LAYERS.search(k) and v > 2}
    if "depths" in values:  # one number for each stage; lists of other things are as long
        depths = set()
    small = {}
    for key, value in values.items():
        if key in DERIVED:
            continue
        if isinstance(value, dict) and not key.startswith(("id2", "label2", "rope")):
            value = shrunk(value, gentle)
        elif isinstance(value, bool) or value is None:
            pass
        elif isinstance(value, int) and LAYERS.search(key):
            value = min(value, 2) if depths else value
        elif key == "depths" and isinstance(value, (list, tuple)):
            value = [1 for _ in value]
        elif isinstance(value, list) and len(value) in depths:
            value = (list(dict.fromkeys(map(tuple_or_value, value))) + value)[:2]
        elif isinstance(value, int) and ("vocab_size" in key and "type" not in key):
            value = min(value, VOCABULARY)
        elif isinstance(value, int) and re.search(r"token_(id|index)$", key):
            value = value % VOCABULARY
        elif isinstance(value, list) and re.search(r"token_id$|_indexes$|_indices$", key):
            value = sorted({v % (VOCABULARY if "token" in key else 2) for v in value})
        elif isinstance(value, int) and key in SIZE_OF and not gentle:
            value = min(value, SIZE_OF[key])
        elif isinstance(value, int) and key == "image_size" and value > 256:
            value = 64
        small[key] = value
    return small


def model_classes(config_class: type) -> list[type]:
    """The classes of models with this configuration, the base model first."""
    from transformers import AutoModel, PreTrainedModel

    if (found := AutoModel._model_mapping.get(config_class, None)) is not None:
        return list(found) if isinstance(found, (list, tuple)) else [found]
    package = config_class.__module__.rpartition(".")[0]
    folder = Path(sys.modules[config_class.__module__].__file__).parent
    members: list[type] = []
    for file in sorted(folder.glob("modeling_*.py")):
        members += vars(importlib.import_module(f"{package}.{file.stem}")).values()
    return [
        c
        for c in members
        if isinstance(c, type)
        and issubclass(c, PreTrainedModel)
        and c.__module__.startswith(package)
        and c.config_class is config_class
        and not c.__name__.endswith("PreTrainedModel")
    ]


def transformers_ways(model_type: str, changes: dict) -> Iterator[Callable]:
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    logging.set_verbosity_error()
    config_class = CONFIG_MAPPING[model_type]

    def make(model_class, gentle):
        values = shrunk(config_class(**changes).to_dict(), gentle)
        values.pop("model_type", None)
        config = config_class.from_dict(values)
        config.use_pretrained_backbone = False
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"{size:.2g} parameters after shrinking its configuration")
        torch.manual_seed(0)
        model = model_class(config)
        return model, list(inputs_of(model, config))

    for gentle in (False, True):
        for model_class in model_classes(config_class)[:2]:
            yield lambda c=model_class, g=gentle: make(c, g)


def setting(config, name: str, default):
    """A value of a configuration, or of one inside it."""
    for part in (config, *vars(config).values()):
        if type(part).__name__.endswith("Config") and getattr(part, name, None) is not None:
            return getattr(part, name)
    return default


def inputs_of(model: nn.Module, config) -> Iterator[dict[str, torch.Tensor]]:
    """Keyword arguments that the model may take, the simplest first."""
    size = setting(config, "image_size", 64)
    height, width = (size, size) if isinstance(size, int) else list(size)[-2:]
    channels = setting(config, "num_channels", 3)
    channels = channels if isinstance(channels, int) else 3
    mels = setting(config, "num_mel_bins", 80)
    frames = 2 * setting(config, "max_source_positions", 64)
    frames = frames if isinstance(frames, int) and frames < 4000 else 128
    patch = setting(config, "patch_size", 14)
    patch = patch if isinstance(patch, int) else patch[0]
    patches = channels * setting(config, "temporal_patch_size", 1) * patch**2
    grid = torch.tensor([[1, 4, 4]])
    ids = torch.arange(10, 26).reshape(2, 8) % VOCABULARY
    images = torch.randn(2, channels, height, width)
    waves = torch.randn(2, 4000)
    known = {
        "input_ids": [ids],
        "pixel_values": [images, torch.randn(2, channels, 224, 224), torch.randn(16, patches)],
        "input_values": [waves, waves[:, None], torch.randn(2, frames, mels)],
        "input_features": [torch.randn(2, mels, frames), torch.randn(2, frames, mels)],
        "decoder_input_ids": [ids],
        "inputs_embeds": [torch.randn(2, 8, setting(config, "hidden_size", 64))],
        "hidden_states": [
            torch.randn(2, 8, setting(config, "hidden_size", 64)),
            torch.randn(16, patches),
        ],
        "grid_thw": [grid],
        "pixel_values_videos": [images[:, None].repeat(1, 4, 1, 1, 1)],
        "bbox": [torch.ones(2, 8, 4, dtype=torch.long)],
        "spectrogram": [torch.randn(2, frames, mels)],
        "past_values": [torch.randn(2, setting(config, "context_length", 64))],
    }
    arguments = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    required = [n for n, p in arguments.items() if p.default is p.empty and n in known]
    groups = [[main], required, [main, "decoder_input_ids"], ["input_ids", "pixel_values"]]
    groups += [["input_ids", "bbox"], ["input_ids", "input_features"], ["hidden_states"]]
    groups += [[n] for n in known]
    seen = []
    for group in groups:
        group = sorted({n for n in group if n in arguments and n in known})
        if not group or group in seen:
            continue
        seen.append(group)
        for i in range(max(len(known[n]) for n in group)):
            yield {n: known[n][min(i, len(known[n]) - 1)] for n in group}
