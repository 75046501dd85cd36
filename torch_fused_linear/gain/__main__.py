"""`python -m torch_fused_linear.gain`: what fusing would bring a model, in one command."""

import contextlib
import importlib
import json
import os
import re
import signal
import sys
from argparse import ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_fused_linear import gain
from torch_fused_linear._support import library
from torch_fused_linear._support.arguments import check_module
from torch_fused_linear._support.command_line import OneLineParser
from torch_fused_linear.timing import in_one_line

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel")
EXAMPLES = """examples:
  python -m torch_fused_linear.gain timm:vit_base_patch16_224 --input 32x3x224x224 --dtype bf16
  python -m torch_fused_linear.gain hf:gpt2 --input 8x1024 --dtype bf16 --compile --step
  python -m torch_fused_linear.gain mine.models:build --input 32x197x768 --why"""


def command_line() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m torch_fused_linear.gain",
        description="Say what fusing would bring a model: what is fused, the share of the time in "
        "it, times beside eager's, memory, and a verdict. Weights are random; nothing is "
        "downloaded.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", help="package.module:function, which returns a model; timm:NAME; hf:TYPE")
    numbers = "32x197x768 of random numbers, or 8x1024:50257 of whole numbers below 50257"
    once = f"{numbers}; once for each input"
    add("--input", action="append", type=shape, metavar="SHAPE", required=True, help=once)
    add("--dtype", choices=DTYPES, default="fp32", help="of the parameters; default: fp32")
    add("--device", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    add("--step", action="store_true", help="also a training step, without an optimizer")
    add("--compile", action="store_true", help="also torch.compile, and that with our pass")
    add("--linear", action="store_true", help="as fuse_(linear=True): single layers, too")
    add("--seconds", type=float, default=5.0, help="to time each mode; default: 5")
    add("--why", action="store_true", help="list what is fused, and what is not and why")
    add("--picture", type=Path, help="draw bars into this file (.png, .svg)")
    add("--json", type=Path, help="write all numbers into this file")
    return parser


def model_named(name: str) -> nn.Module:
    kind, _, rest = name.partition(":")
    if not kind or not rest:
        raise ValueError(f"{name}: expected package.module:function, timm:NAME or hf:TYPE")
    if kind == "timm":
        return importlib.import_module("timm").create_model(rest, pretrained=False)
    if kind != "hf":
        return getattr(importlib.import_module(kind), rest)()
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(rest)
    config.use_cache = False
    for head in HEADS:
        with contextlib.suppress(ValueError):  # a model of this type has no such head
            return getattr(transformers, head).from_config(config)
    raise ValueError(f"{name}: transformers has no model of this type without a download")


def shape(text: str) -> tuple[list[int], int]:
    """An argument type: sizes, and the limit of whole numbers, or 0."""
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*(:[1-9]\d*)?", text) is None:
        raise ArgumentTypeError(f"expected sizes, as 32x197x768 or 8x1024:50257, got {text}")
    sizes, _, limit = text.partition(":")
    return [int(size) for size in sizes.split("x")], int(limit or 0)


def input_of(sizes: list[int], limit: int, model: nn.Module) -> Tensor:
    """Random numbers; whole ones where they have a limit, or the model of transformers wants it."""
    if getattr(model, "main_input_name", "") == "input_ids":
        limit = limit or model.config.get_text_config().vocab_size
    return torch.randint(limit, sizes) if limit else torch.randn(sizes)


def main(arguments: Sequence[str] | None = None) -> int:
    # The profiler of a torch for GPUs complains where there is none.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    parser = command_line()
    given = parser.parse_args(arguments)
    for path in filter(None, (given.json, given.picture)):  # before anything is measured
        if not path.parent.is_dir() or path.is_dir():
            parser.error(f"{path}: expected a file in a folder that exists")
    try:
        library.require()
        device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model = model_named(given.model)
        check_module(given.model, model)
        model.to(device, DTYPES[given.dtype])
        inputs = [input_of(*each, model).to(device) for each in given.input]
        inputs = [x.to(DTYPES[given.dtype]) if x.is_floating_point() else x for x in inputs]
        options = {name: getattr(given, name) for name in ("step", "compile", "linear", "seconds")}
        found = gain(model, *inputs, **options)
        if given.why:
            print(f"{found.report}\n")
        print(found)
        if given.json:
            numbers = asdict(found) | {"verdict": found.verdict}
            given.json.write_text(json.dumps(numbers, indent=1) + "\n")
        if given.picture:
            found.save_picture(given.picture)
    except Exception as error:  # of the model as of the arguments
        parser.error(in_one_line(error))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    sys.exit(main())
