"""Models by name, with inputs to run them on: timm's, transformers', and a function of the user's.

Weights are random, from configurations; nothing is downloaded.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\d+))?")
TOKENS = 128


def tensor_of(text: str) -> Tensor:
    """Random numbers of a shape as text: ``32x197x768``, or whole numbers below N: ``8x1024:N``."""
    match = SHAPE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"--input {text}: expected a shape such as 32x197x768, or 8x1024:50257 for whole "
            "numbers below 50257"
        )
    sizes = [int(size) for size in match[1].split("x")]
    return torch.randint(int(match[2]), sizes) if match[2] else torch.randn(sizes)


def model_and_inputs(
    name: str, shapes: Sequence[str], batch: int
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model that `name` means, and what to call it with, by position and by keyword."""
    kind, _, rest = name.partition(":")
    rest, *options = rest.split(",")
    if kind == "timm":
        model, args, kwargs = of_timm(rest, settings(options), batch)
    elif kind == "hf":
        model, args, kwargs = of_transformers(rest, settings(options), batch, shapes)
        shapes = ()
    else:
        model, args, kwargs = of_function(kind, rest)
    if shapes:
        args = tuple(tensor_of(shape) for shape in shapes)
    if not args and not kwargs:
        raise ValueError(
            f"{name}: expected --input SHAPE, or a function that returns model, inputs"
        )
    return model, args, kwargs


def settings(options: Sequence[str]) -> dict[str, Any]:
    """``key=value`` of a configuration; a value that is no number, None or the like is text."""
    found = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"expected key=value after the model's name, got {option!r}")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    return found


def of_timm(name: str, options: dict[str, Any], batch: int):
    import timm

    try:
        model = timm.create_model(name, pretrained=False, **options)
    except RuntimeError as error:
        raise ValueError(f"timm:{name}: {error}") from error
    return model, (torch.randn(batch, *model.pretrained_cfg["input_size"]),), {}


def of_transformers(kind: str, options: dict[str, Any], batch: int, shapes: Sequence[str]):
    """A model of the type `kind` (gpt2, bert, llama, vit ...), with its language head if any."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **options)
    config.use_cache = False
    model = None
    for head in ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel"):
        auto = getattr(transformers, head)
        if type(config) in auto._model_mapping:
            model = auto.from_config(config)
            break
    if model is None:
        raise ValueError(f"hf:{kind}: transformers has no model of this type without a download")
    argument = model.main_input_name
    if argument == "input_ids":
        vocabulary = config.get_text_config().vocab_size
        sizes = [shape.partition(":")[0] for shape in shapes] or [f"{batch}x{TOKENS}"]
        inputs = tensor_of(f"{sizes[0]}:{vocabulary}")
    elif shapes or argument != "pixel_values":
        if not shapes:
            raise ValueError(f"hf:{kind}: expected --input, the shape of its {argument}")
        inputs = tensor_of(shapes[0])
    else:
        inputs = torch.randn(batch, config.num_channels, config.image_size, config.image_size)
    return model, (), {argument: inputs}


def of_function(module: str, function: str):
    """What the user's function returns: a model, or a model and its inputs."""
    if not function:
        raise ValueError(
            f"{module}: expected package.module:function, timm:NAME or hf:TYPE; a function returns "
            "a model, or a model and its inputs"
        )
    if module.endswith(".py"):
        path = Path(module)
        sys.path.insert(0, str(path.parent.resolve()))
        module = path.stem
    made = getattr(importlib.import_module(module), function)()
    model, *inputs = made if isinstance(made, tuple) else (made,)
    if len(inputs) == 1 and isinstance(inputs[0], tuple):
        inputs = list(inputs[0])
    if not isinstance(model, nn.Module):
        raise ValueError(f"{module}:{function}: expected an nn.Module, got {type(model).__name__}")
    return model, tuple(inputs), {}
