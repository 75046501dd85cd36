"""Makes the other tables of docs/performance.md and those of further pages, and a figure.

    python benchmarks/make_performance.py            rewrite the tables, draw the figure anew
    python benchmarks/make_performance.py --check    exit with 1 if a table is out of date

The pages mark the place of each table, `<!-- results: NAME: begin -->` and `... end -->`. Their
prose has no numbers of its own, so that nothing on them is older than the results beside this file.
The tables need nothing but Python; the figure needs matplotlib.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from make_table import Result, by_machine, rewrite
from result_tables import MODES, TABLES, find, times, values

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = (
    *("performance.md", "memory.md", "cpu.md", "distributed.md"),
    *("hopper.md", "gated.md", "plans.md"),
)
FIGURE = DOCS / "figures" / "when_fusing_helps.png"


class Read(dict):
    """A result that knows whether a table has read its numbers."""

    was_read = False

    def __getitem__(self, key):
        self.was_read |= key == "numbers"
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.was_read |= key == "numbers"
        return super().get(key, default)


def latest_header(results: Sequence[Result]) -> dict:
    return max((result["header"] for result in results), key=lambda header: header["date"])


def render(name: str, paths: Sequence[Path]) -> str:
    """The table of every machine that has measured something for it."""
    parts = []
    for results in by_machine(paths).values():
        results = [Read(result) for result in results]
        lines = TABLES[name](results)
        if len(lines) > 2:  # more than its head
            header = latest_header([result for result in results if result.was_read])
            where = f"{header['machine']}, torch {header['torch']}, {header['date'][:10]}:"
            parts.append("\n".join([where, "", *lines]))
    return "\n\n".join(parts) or "Not measured yet."


MARKS = re.compile(r"(<!-- results: ([^:]+): begin -->\n).*?(<!-- results: \2: end -->)", re.DOTALL)


def replaced(text: str, paths: Sequence[Path]) -> str:
    """The page with every table made anew."""
    return MARKS.sub(lambda match: f"{match[1]}\n{render(match[2], paths)}\n\n{match[3]}", text)


def misplaced(pages: Sequence[Path]) -> str | None:
    """Whether each table has its place, once."""
    places = [match[2] for page in pages for match in MARKS.finditer(page.read_text())]
    if sorted(places) != sorted(TABLES):
        return f"places for {places}, tables for {list(TABLES)}"
    return None


def points(results: Sequence[Result], aside: float) -> tuple[list, list, list]:
    """Inner sizes, eager's time over ours, and how far the quartiles reach down and up."""
    at, heights, down, up = [], [], [], []
    for result in results:
        ours, eager = result["numbers"]["ours"], result["numbers"]["eager"]
        middle = eager["median"] / ours["median"]
        at.append(aside * result["case"]["sizes"][0])
        heights.append(middle)
        down.append(middle - eager["q1"] / ours["q3"])
        up.append(eager["q3"] / ours["q1"] - middle)
    return at, heights, [down, up]


def draw(path: Path, paths: Sequence[Path]) -> None:
    """The speed-up over the inner size, a line for each number of tokens."""
    from matplotlib.figure import Figure

    machines = by_machine(paths).items()
    name, results = next((n, r) for n, r in machines if find(r, suite="layer"))
    header = latest_header(results)
    layers = find(results, suite="layer", activation="relu", dtype="bf16")
    figure = Figure(figsize=(10, 4), dpi=130, layout="constrained")
    figure.suptitle(f"One layer with ReLU in bf16: {name}, torch {header['torch']}")
    for axes, mode in zip(figure.subplots(1, 2, sharey=True), MODES):
        colours = ("#e69f00", "#009e73", "#0072b2")
        # A little beside each other, so that no point hides another.
        for tokens, colour, aside in zip(values(layers, "tokens"), colours, (0.93, 1, 1.07)):
            some = [r for r in find(layers, mode=mode, tokens=tokens) if times(r["numbers"])]
            some.sort(key=lambda r: r["case"]["sizes"])
            # A layer of few outputs is a case of its own, and no point of the line.
            few = [r for r in some if r["case"]["sizes"][1] < 64]
            wide = [r for r in some if r not in few]
            style = {"color": colour, "marker": "o", "capsize": 2, "elinewidth": 0.8}
            axes.errorbar(*points(wide, aside), **style, label=f"T = {tokens}")
            if few:
                axes.errorbar(*points(few, aside), **style, markerfacecolor="white", linestyle="")
        axes.axhline(1, color="#222222", linewidth=0.9)
        axes.set(title=mode, xscale="log", xlabel="I, the inputs of the layer", ylim=(0.4, 3))
        axes.set_xticks([64, 256, 1024, 4096], ["64", "256", "1024", "4096"], minor=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.axes[0].set_ylabel("times as fast as eager")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args(arguments)
    paths, pages = sorted(given.results.glob("*.json")), [given.docs / page for page in PAGES]
    if wrong := misplaced(pages):
        print(f"make_performance: {wrong}", file=sys.stderr)
        return 2
    status = 0
    for page in pages:
        change = partial(replaced, paths=paths)
        status = max(status, rewrite(page, change, given.check, "make_performance"))
    if status == 0 and not given.check:
        draw(given.figure, paths)
    return status


if __name__ == "__main__":
    sys.exit(main())
