"""One line added to a model that people know: what it brings, and that nothing else changes.

The model below is ViT-B/16, the vision transformer with patches of 16 x 16 pixels, in plain
PyTorch. The line that is added is

    fuse_(model)

Then `gain`, which measures any model (`python -m torch_fused_linear.gain`), runs it in each way,
in turns: as it is, after that line, under `torch.compile`, and under `torch.compile` with
`compile_options()`. It says what part of the time lies in what can be fused, how long each way
takes, how much memory, and how far the results are apart.

On a GPU all of that is measured. A CPU runs PyTorch's own kernels either way, so there it shows
what can be fused and that the results are equal. The picture then has the numbers of an H200 that
come with the sources, and says so.

    python examples/demo.py
"""

from __future__ import annotations

import json
import os
import signal
from argparse import ArgumentDefaultsHelpFormatter as WithDefaults
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_linear import fuse_, gain
from torch_fused_linear._support.picture import draw_bars

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
# The benchmark's names for the contenders, in the order of the picture.
NAMES = {"eager": "eager", "compile": "torch.compile", "fused": "fuse_"}
NAMES |= {"compile+pass": "compile_options()", "fused-low": 'fuse_(memory="low")'}
PANELS = {
    ("models", "forward"): ("h200_models", "inference, ms"),
    ("models", "step"): ("h200_models", "training step, ms"),
    ("memory-models", "peak"): ("h200_memory_models", "training step, MiB at most"),
}


class Block(nn.Module):
    """Attention and a feed-forward part, each around a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = nn.GELU()

    def attend(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.projection(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """ViT-B/16: images of 224 x 224 pixels to 1000 classes."""

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 197, width) / 50)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def show_the_line(model: nn.Module, images: Tensor) -> float:
    """The line that is added, with the results before and after; -> how far they are apart."""
    with torch.no_grad():
        before = model(images)
        report = fuse_(model)
        apart = float((model(images) - before).norm() / before.norm())
    print(report)
    print(f"\nresults before and after differ by {apart:.1e} of their size")
    return apart


def shipped() -> tuple[str, dict]:
    """Where timm's ViT-B/16 was measured for the benchmark's results, and the panels with them."""
    panels = {}
    for (suite, mode), (file, title) in PANELS.items():
        content = json.loads((RESULTS / f"{file}.json").read_text())
        header = content["header"]
        for record in content["results"]:
            case = record["case"]
            wanted = {"suite": suite, "mode": mode, "model": "ViT-B/16", "activation": "gelu-erf"}
            if any(case.get(key) != value for key, value in wanted.items()):
                continue
            bars = {
                label: (number["median"], number["q1"], number["q3"])
                for name, label in NAMES.items()
                if (number := record["numbers"].get(name))
            }
            scale = 1e-3 if record["unit"] == "us" else 1
            panels[f"ViT-B/16, {case['sizes'][0]} images, {title}"] = bars, scale
    return f"{header['machine']}, torch {header['torch']}, bf16", panels


def main(arguments: list[str] | None = None) -> dict:
    """Runs the example; -> its numbers."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=WithDefaults)
    add = parser.add_argument
    add("--out", type=Path, default=Path("example_pictures"), help="folder for the pictures")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    depth = 12 if torch.cuda.is_available() else 4  # a CPU shows no more with all of them
    add("--depth", type=int, default=depth, help="blocks of the model")
    add("--seconds", type=float, default=2.0, help="to time inference, and a training step")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)

    # The profiler of a torch for GPUs complains where there is none.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    torch.manual_seed(0)
    on_gpu = given.device != "cpu"
    model = VisionTransformer(depth=given.depth).to(given.device)
    images = torch.randn(128 if on_gpu else 1, 3, 224, 224, device=given.device)
    if on_gpu:
        model, images = model.bfloat16(), images.bfloat16()

    apart = show_the_line(model, images)
    found = gain(model, images, step=True, compile=on_gpu, seconds=given.seconds)
    print(f"\n{found}")
    paths = [given.out / "demo_graph.png", given.out / "demo.png"]
    found.report.save_picture(paths[0])
    if on_gpu:
        found.save_picture(paths[1])
    else:
        where, panels = shipped()
        draw_bars(paths[1], f"Not measured here, but on {where}", panels)
        print(f"\nWhat {where} took is in {paths[1].name}; this machine was not asked for it.")
    print(*paths, sep="\n")
    return {"apart": apart, "gain": found}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    main()
