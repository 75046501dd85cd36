"""Makes every table of the docs, and README's chart, of the results beside this and tests' records.

    python -m benchmarks.pages            rewrite them
    python -m benchmarks.pages --check    change nothing; exit with 1 if one is out of date

The pages mark the place of each table, `<!-- results: NAME: begin -->` and `... end -->`. Their
prose has no numbers of its own, so that nothing on them is older than what they are made of.
Nothing but Python is needed, neither torch nor the built library.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from . import records, tables
from .chart import readme_chart
from .results import Result, by_machine

ROOT = Path(__file__).resolve().parents[2]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
RECORDS = ROOT / "tests" / "certify" / "records"
CHART, MACHINE = Path("figures", "models.svg"), "NVIDIA H200"
MARKS = re.compile(r"(<!-- results: ([^:]+): begin -->\n).*?(<!-- results: \2: end -->)", re.DOTALL)


class Read(dict):
    """A result that knows whether a table has read its numbers."""

    was_read = False

    def __getitem__(self, key):
        self.was_read |= key == "numbers"
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.was_read |= key == "numbers"
        return super().get(key, default)


def render(name: str, machines: dict[str, list[Result]]) -> str:
    """The table of every machine that has measured something for it."""
    parts = []
    for results in machines.values():
        results = [Read(result) for result in results]
        lines = tables.TABLES[name](results)
        if name == tables.EVERYTHING:
            parts += ["\n".join(lines)] if lines else []
        elif len(lines) > 2:  # more than its head
            headers = [result["header"] for result in results if result.was_read]
            header = max(headers, key=lambda header: header["date"])
            where = f"{header['machine']}, torch {header['torch']}, {header['date'][:10]}:"
            parts.append("\n".join([where, "", *lines]))
    return "\n\n".join(parts) or "Not measured yet."


def made(machines: dict[str, list[Result]], kept: Path) -> dict[str, str]:
    """Each table by the name of its place."""
    loaded = records.load(kept)
    sections = {name: "\n".join(make(loaded)) for name, make in records.SECTIONS.items()}
    return {name: render(name, machines) for name in tables.TABLES} | {
        name: text or "Not yet." for name, text in sections.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--records", type=Path, default=RECORDS)
    given = parser.parse_args(arguments)
    machines = by_machine(sorted(given.results.glob("*.json")))
    texts = made(machines, given.records)
    pages = sorted(given.docs.glob("*.md"))
    places = sorted(match[2] for page in pages for match in MARKS.finditer(page.read_text()))
    if places != sorted(texts):
        what = f"places for {places}, tables for {sorted(texts)}"
        print(f"benchmarks.pages: {what}", file=sys.stderr)
        return 2
    wanted = {}
    for page in pages:
        text = page.read_text()
        wanted[page] = MARKS.sub(lambda m: f"{m[1]}\n{texts[m[2]]}\n\n{m[3]}", text)
    wanted[given.docs / CHART] = readme_chart(machines.get(MACHINE, []))
    old = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in old:
        if given.check:
            print(f"{path} is out of date; run python -m benchmarks.pages")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
    return int(bool(old) and given.check)


if __name__ == "__main__":
    sys.exit(main())
