"""Trains a GPT of 30 million parameters in bf16, in FP8 by torchao and by ours, with several seeds.

    python -m benchmarks.float8_training --json FILE --svg FILE     on a GPU, 100 seconds
    python -m benchmarks.float8_training --tiny                     on a CPU, too: does it run?

The model, the text's treatment and the training are examples/float8_training.py's; the text is the
Python sources of torch and of the standard library, as bytes. For a seed all arms start from the
same weights and read the same batches. Blocks are compiled in every arm, on a GPU. The seeds go
outermost, so that arms have equally many runs, and the numbers are written after each; `--limit`
begins no seed that would not end in time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, where not installed

import torch

from benchmarks import machine
from benchmarks.pages.chart import COLOURS, text
from benchmarks.results import result, write
from examples.float8_training import GPT, Course, available, gpt, sources, spread, train
from torch_fused_linear.timing import Number

Runs = dict[str, list[dict[str, Any]]]
WIDTH, LAYERS = 640, 6
TINY_WIDTH, TINY_LAYERS = 32, 1

# ------------------------------------------------------------------------------------ the picture


def smooth(losses: list[float], over: int) -> list[float]:
    """Means over the last few steps."""
    return [statistics.fmean(losses[max(0, k - over + 1) : k + 1]) for k in range(len(losses))]


def picture(runs: Runs) -> str:
    """Losses of all runs, an arm in a colour, as an SVG: the same numbers give the same bytes."""
    wide, high, left, top, right, bottom = 700, 380, 60, 60, 20, 50
    steps = max((len(r["losses"]) for results in runs.values() for r in results), default=2)
    curves = {
        arm: [smooth(r["losses"], max(1, steps // 50)) for r in results]
        for arm, results in runs.items()
    }
    every = [loss for of_arm in curves.values() for curve in of_arm for loss in curve]
    low, most = min(every, default=0.0), max(every, default=1.0)

    def x_of(step: float) -> float:
        return left + step / max(1, steps - 1) * (wide - left - right)

    def y_of(loss: float) -> float:
        return high - bottom - (loss - low) / max(1e-9, most - low) * (high - top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#222222">',
        "<title>Training loss in bf16 and in FP8</title>",
        f'<rect width="{wide}" height="{high}" fill="#ffffff"/>',
        text(16, 24, "Loss of a GPT in bf16 and in FP8, every run", 'font-size="16"'),
    ]
    for k in range(5):
        loss, step = low + k / 4 * (most - low), k / 4 * (steps - 1)
        y, x = y_of(loss), x_of(step)
        line = f'<line x1="{left}" x2="{wide - right}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'{line} stroke="#dddddd"/>')
        parts.append(text(left - 8, y + 5, f"{loss:.2f}", 'text-anchor="end"'))
        parts.append(text(x, high - bottom + 20, f"{step:.0f}", 'text-anchor="middle"'))
    parts.append(text((left + wide) / 2, high - 10, "step", 'text-anchor="middle"'))
    for k, (arm, of_arm) in enumerate(curves.items()):
        colour = COLOURS[k]
        x = wide - right - 110 * (len(curves) - k)
        parts.append(f'<rect x="{x}" y="36" width="13" height="13" fill="{colour}"/>')
        parts.append(text(x + 20, 47, f"{arm} ({len(of_arm)})"))
        for curve in of_arm:
            points = " ".join(f"{x_of(i):.1f},{y_of(v):.1f}" for i, v in enumerate(curve))
            line = f'<polyline points="{points}" fill="none" stroke="{colour}"'
            parts.append(f'{line} stroke-width="1.2" stroke-opacity="0.7"/>')
    return "\n".join([*parts, "</svg>", ""])


# ------------------------------------------------------------------------------------ the numbers


def summary(runs: Runs) -> list[str]:
    """Returns a line for each arm: its losses after training, beside bf16's and their spread."""
    lines = []
    finals = {arm: [r["validation"] for r in results] for arm, results in runs.items() if results}
    for arm, values in finals.items():
        speed = statistics.median(r["speed"] for r in runs[arm])
        line = f"{arm:>8}: {len(values)} runs, loss {statistics.fmean(values):.4f} "
        line += f"± {spread(values):.4f}, {speed:,.0f} tokens per second"
        if arm != "bf16" and finals.get("bf16"):
            beside = finals["bf16"]
            apart = statistics.fmean(values) - statistics.fmean(beside)
            pairs = [a - b for a, b in zip(values, beside, strict=False)]
            line += f"; {apart:+.4f} from bf16, whose spread is {spread(beside):.4f}"
            line += f"; seed by seed {statistics.fmean(pairs):+.4f} ± {spread(pairs):.4f}"
        lines.append(line)
    return lines


def as_results(runs: Runs) -> list[dict[str, Any]]:
    """A result for each seed: the losses after training by arm, and the course of each run."""
    seeds = sorted({run["seed"] for found in runs.values() for run in found})
    rows = []
    for seed in seeds:
        here = {arm: r for arm, found in runs.items() for r in found if r["seed"] == seed}
        losses = {arm: Number.once(run["validation"]) for arm, run in here.items()}
        row = result({"suite": "float8-training", "seed": seed}, "loss", losses)
        of_arms = {key: {arm: r[key] for arm, r in here.items()} for key in ("speed", "losses")}
        rows.append({**row, **of_arms})
    return rows


def save(given: argparse.Namespace, header: dict[str, Any], runs: Runs) -> None:
    if given.json:
        write(given.json, header, as_results(runs))
    if given.svg:
        given.svg.write_text(picture(runs))


def known(path: Path | None, training: dict[str, Any], arms: Iterable[str]) -> Runs:
    """Reads the runs of a file that was made of the same model, steps and texts, seeds that every
    arm has."""
    if path is None or not path.exists():
        return {}
    kept = json.loads(path.read_text())
    if kept["header"].get("training") != training:
        return {}
    rows = [row for row in kept["results"] if all(arm in row["numbers"] for arm in arms)]
    return {
        arm: [
            {
                "seed": row["case"]["seed"],
                "validation": row["numbers"][arm]["median"],
                "speed": row["speed"][arm],
                "losses": row["losses"][arm],
            }
            for row in rows
        ]
        for arm in arms
    }


# ------------------------------------------------------------------------------------ the command


def prepared(arm: str, course: Course, texts: tuple, width: int, layers: int) -> GPT:
    """The arm's model; a few steps have compiled it and made its plans."""
    model = gpt(arm, width, layers, course.context).to(course.device)
    if course.device == "cuda":
        for block in model.blocks:
            block.compile(dynamic=False)
    train(model, 0, texts, Course(6, course.batch, course.context, course.rate, course.device))
    return model


def main(arguments: list[str]) -> Runs:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--json", type=Path, help="a file for the numbers; goes on with those of an earlier run")
    add("--svg", type=Path, help="a file for the picture")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--tiny", action="store_true", help="does it run?")
    add("--seeds", type=int, default=5, help="runs of each arm; default: 5")
    add("--steps", type=int, default=300, help="of a run; default: 300")
    add("--limit", type=float, default=100, help="seconds for all; default: 100")
    given = parser.parse_args(arguments)
    begin = time.perf_counter()
    batch, context, most = (4, 16, 2**18) if given.tiny else (32, 512, 2**24)
    width, layers = (TINY_WIDTH, TINY_LAYERS) if given.tiny else (WIDTH, LAYERS)
    course = Course(given.steps, batch, context, 1e-3, given.device)
    folders = [Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib"))]
    texts = sources(folders[1:] if given.tiny else folders, most)
    header = machine.header(torch.device(given.device), arguments)
    models = {arm: prepared(arm, course, texts, width, layers) for arm in available()}
    size = sum(p.numel() for p in models["bf16"].parameters())
    header["training"] = {"parameters": size, "tokens": batch * context, "steps": given.steps}
    header["training"] |= {"bytes": [len(part) for part in texts]}
    print(f"{json.dumps(header['training'])}, ready after {time.perf_counter() - begin:.0f} s")

    runs: Runs = {arm: [] for arm in models} | known(given.json, header["training"], models)
    longest = 0.0
    for seed in range(min(map(len, runs.values())), given.seeds):
        if time.perf_counter() - begin + len(models) * longest > given.limit:
            print(f"stopped before seed {seed}: the time is up")
            break
        for arm, model in models.items():
            started = time.perf_counter()
            found = train(model, seed, texts, course)
            runs[arm].append({"seed": seed, **found})
            longest = max(longest, time.perf_counter() - started)
            save(given, header, runs)
            print(f"seed {seed} {arm:>8}: {found['validation']:.4f}", flush=True)
    print(*summary(runs), sep="\n")
    return runs


if __name__ == "__main__":
    main(sys.argv[1:])
