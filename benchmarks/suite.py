"""The command line and the loop of a suite that is run by itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.results import write

Row = dict[str, Any]


def parser(doc: str, seconds: float) -> argparse.ArgumentParser:
    """The options that every such suite has; `seconds` is the default of its rounds."""
    made = argparse.ArgumentParser(description=doc.split("\n")[0])
    add = made.add_argument
    add("--json", type=Path, help="a file for the numbers")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--tiny", action="store_true", help="does it run?")
    add("--seconds", type=float, default=seconds, help=f"of rounds for a row; default: {seconds}")
    add("--limit", type=float, help="begin no row after so many seconds; default: none")
    return made


def run(
    rows: Callable[[argparse.Namespace, torch.device], Iterable[Row]],
    in_words: Callable[[Row], str],
    given: argparse.Namespace,
    arguments: list[str],
) -> list[Row]:
    """Prints and writes each row as it comes, so that an interrupted run loses none."""
    device = torch.device(given.device)
    header = machine.begin(device, arguments)
    found = []
    for row in rows(given, device):
        found.append(row)
        print(in_words(row), flush=True)
        if given.json:
            write(given.json, header, found)
    return found
