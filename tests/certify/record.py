"""Records of parts: what was tried, how often, where, on which tree, and what failed.

A part is tried unit by unit, and what the units give is added up. The record is written as a whole
every few seconds, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import gpu_record
import torch

import torch_fused_linear as tfl
from benchmarks import machine
from certify.parts import Found, Part
from torch_fused_linear import doctor

FOLDER = Path(__file__).parent / "records"
SECONDS_BETWEEN_SAVES = 5.0
FAILURES_KEPT = 50

Verdict = Callable[[Found], list[str]]


def add(total: Found, more: Found) -> None:
    """Numbers are summed, lists are joined."""
    for key, value in more.items():
        if isinstance(value, dict):
            add(total.setdefault(key, {}), value)
        elif isinstance(value, list):
            total.setdefault(key, []).extend(value)
        else:
            total[key] = total.get(key, 0) + value


def machine_kind(device: str) -> str:
    """A word for the name of the file: cpu, h200."""
    if device == "cpu":
        return "cpu"
    return torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "_")


def new(part: Part, device: str, asked: dict) -> dict:
    return {
        "part": part.name,
        "about": part.about,
        "unit": part.unit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.processor() if device == "cpu" else torch.cuda.get_device_name(),
        "device": device,
        **doctor.versions(),
        "package": tfl.__version__,
        "tree_hash": gpu_record.tree_hash(),
        "asked": asked,
        "finished": False,
        "done": 0,
        "seconds": 0.0,
        "failed": 0,
        "failures": [],
        "crashed": {},
        "torch_crashed": {},  # where plain torch ends the process as well
        "verdict": [],
        "found": {},
    }


def begin(path: Path, part: Part, device: str, asked: dict, anew: bool) -> dict:
    """The record to go on with: one of the same tree and the same question, or a new one."""
    fresh = new(part, device, asked)
    if anew or not path.exists():
        return fresh
    old = json.loads(path.read_text())
    same = ("part", "machine", "torch", "tree_hash")
    goes_on = {**old["asked"], "count": asked["count"]} == asked and old["done"] <= asked["count"]
    if not goes_on or any(old[key] != fresh[key] for key in same):
        return fresh
    return {**old, "asked": asked, "finished": False}


def take(record: dict, found: Found) -> None:
    """Adds what the next unit has given."""
    failures = found.pop("failures", [])
    record["failed"] += bool(failures)
    for text in failures[: FAILURES_KEPT - len(record["failures"])]:
        record["failures"].append({"unit": record["done"], "what": text})
    for key in ("crashed", "torch_crashed"):
        record[key] |= found.pop(key, {})
    add(record["found"], found)
    record["done"] += 1


def keep(path: Path, record: dict, results: Iterable[Found], verdict: Verdict) -> None:
    """Takes the results of the units that the record lacks; leaves it written, however it ends."""
    before, began = record["seconds"], time.monotonic()
    saved = began

    def save() -> None:
        record["seconds"] = round(before + time.monotonic() - began, 1)
        gpu_record.write(path, record, indent=1)

    try:
        for found in results:
            take(record, found)
            if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                save()
                saved = time.monotonic()
        record["finished"] = True
    finally:
        record["verdict"] = verdict(record["found"])
        save()


def bad(record: dict) -> bool:
    return bool(record["failed"] or record["crashed"] or record["verdict"])


def lines(record: dict) -> list[str]:
    """The record's summary for a terminal."""
    head = f"{record['part']}: {record['done']} {record['unit']} in {record['seconds']:.0f} s"
    found = [f"{head}, {record['failed']} failed, {len(record['crashed'])} crashed"]
    found += [f"  {unit}: the process ended by {how}" for unit, how in record["crashed"].items()]
    for unit, how in record["torch_crashed"].items():
        found.append(f"  {unit}: plain torch ended the process by {how}")
    found += [f"  {f['unit']}: {f['what']}" for f in record["failures"]]
    return [*found, *(f"  {text}" for text in record["verdict"])]
