"""`python -m torch_fused_linear.gain`: what fusing would bring a model, in one command."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from torch_fused_linear import gain
from torch_fused_linear._command_line import (
    EXIT_BAD_USAGE,
    EXIT_INTERRUPTED,
    OneLineParser,
    chosen_device,
    positive,
)
from torch_fused_linear.timing import in_one_line

from .named import model_and_inputs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES |= {"fp64": torch.float64}


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = OneLineParser(
        prog="python -m torch_fused_linear.gain",
        description="Say what fusing would bring a model: what is fused, the share of the time in "
        "it, times beside eager's, memory, and a verdict. Nothing is downloaded.",
        epilog="examples:\n"
        "  python -m torch_fused_linear.gain timm:vit_base_patch16_224 --batch 32 --dtype bf16\n"
        "  python -m torch_fused_linear.gain hf:gpt2 --input 8x1024 --dtype bf16 --compile --step\n"
        "  python -m torch_fused_linear.gain hf:llama,num_hidden_layers=4 --dtype bf16\n"
        "  python -m torch_fused_linear.gain mine.models:build --input 32x197x768 --why",
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "model",
        help="package.module:function or file.py:function, which returns a model, or a model and "
        "its inputs; timm:NAME; hf:TYPE; options of a configuration follow as ,key=value",
    )
    add(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE",
        help="32x197x768 of random numbers, or 8x1024:50257 of whole numbers below 50257; once "
        "for each input",
    )
    add("--batch", type=positive(int), default=1, help="of named models; default: 1")
    add("--dtype", choices=DTYPES, default="fp32", help="of the parameters; default: fp32")
    add("--autocast", action="store_true", help="parameters in fp32, --dtype by torch.autocast")
    add("--device", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    add("--step", action="store_true", help="also a training step, without an optimizer")
    add("--compile", action="store_true", help="also torch.compile, and that with our pass")
    add("--seconds", type=positive(float), default=5.0, help="to time each mode; default: 5")
    add("--why", action="store_true", help="list what is fused, and what is not and why")
    add("--picture", type=Path, help="draw bars into this file (.png, .svg)")
    add("--json", type=Path, help="write all numbers into this file")
    given = parser.parse_args(arguments)
    try:
        given.device = chosen_device(given.device)
    except ValueError as error:
        parser.error(str(error))
    return given


def run(given: Namespace) -> None:
    dtype = DTYPES[given.dtype]
    model, args, kwargs = model_and_inputs(given.model, given.input, given.batch)
    parameters = torch.float32 if given.autocast else dtype
    model = model.to(given.device, parameters)

    def placed(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(given.device, parameters if value.is_floating_point() else None)

    args, kwargs = tree_map(placed, (args, kwargs))
    with contextlib.ExitStack() as around:
        if given.autocast:
            around.enter_context(torch.autocast(given.device.type, dtype))
        found = gain(
            model,
            *args,
            kwargs=kwargs,
            step=given.step,
            compile=given.compile,
            seconds=given.seconds,
        )
    if given.why:
        print(f"{found.report}\n")
    print(found)
    if given.json:
        given.json.write_text(json.dumps(found.as_dict(), indent=1) + "\n")
    if given.picture:
        found.save_picture(given.picture)


def main(arguments: Sequence[str] | None = None) -> int:
    # The profiler of a torch for GPUs complains where there is none.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    try:
        run(parse(arguments))
    except (ImportError, AttributeError, ValueError, TypeError, OSError) as error:
        print(f"gain: {in_one_line(error)}", file=sys.stderr)
        return EXIT_BAD_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
