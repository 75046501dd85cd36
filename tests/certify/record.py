"""Records of parts: what was tried, how often, where, on which tree, and what failed.

A part is tried unit by unit, and what the units give is added up. The record is written as a whole
every few seconds, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path

import gpu_record
import torch

import torch_fused_linear as tfl
from benchmarks import machine
from certify.parts import Found, Part, Trial
from torch_fused_linear import doctor

FOLDER = Path(__file__).parent / "records"
SECONDS_BETWEEN_SAVES = 5.0
FAILURES_KEPT = 50


def add(total: Found, more: Found) -> None:
    """Numbers are summed, lists are joined; "worst" keeps the larger number."""
    for key, value in more.items():
        if isinstance(value, dict):
            add(total.setdefault(key, {}), value)
        elif isinstance(value, list):
            total.setdefault(key, []).extend(value)
        elif key.startswith("worst"):
            total[key] = max(total.get(key, value), value)
        elif isinstance(value, str):
            total[key] = value
        else:
            total[key] = total.get(key, 0) + value


def machine_kind(device: str) -> str:
    """A word for the name of the file: cpu, h200."""
    if device == "cpu":
        return "cpu"
    return torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "_")


def machine_name(device: str) -> str:
    return machine.processor() if device == "cpu" else torch.cuda.get_device_name()


def write(path: Path, record: dict) -> None:
    """At once: who reads finds the old record or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


def new(part: Part, device: str, asked: dict) -> dict:
    return {
        "part": part.name,
        "about": part.about,
        "unit": part.unit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine_name(device),
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


class Pointer:
    """The unit that is being tried, for whoever finds the process dead."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_suffix(".at.tmp")

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(self.path, os.O_CREAT | os.O_RDWR)

    def at(self, unit: int) -> None:
        os.pwrite(self.file, b"%20d" % unit, 0)

    def read(self) -> int | None:
        return int(self.path.read_text()) if self.path.exists() else None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def work(path: Path, trial: Trial, record: dict, share: tuple[int, int] = (0, 1)) -> None:
    """Tries what the record lacks; leaves a record of all, however it ends.

    Of several processes that share the units, (i, n) takes each n-th, beginning with the i-th.
    """
    seed, count = record["asked"]["seed"], record["asked"]["count"]
    units = range(share[0], count, share[1])
    pointer, before, began = Pointer(path), record["seconds"], time.monotonic()
    saved = began
    pointer.open()

    def save() -> None:
        record["seconds"] = round(before + time.monotonic() - began, 1)
        write(path, record)

    save()
    try:
        for unit in units[record["done"] :]:
            pointer.at(unit)
            if str(unit) not in {**record["crashed"], **record["torch_crashed"]}:
                found = trial.one(seed, unit)
                failures = found.pop("failures", [])
                record["failed"] += bool(failures)
                for text in failures[: FAILURES_KEPT - len(record["failures"])]:
                    record["failures"].append({"unit": unit, "what": text})
                add(record["found"], found)
            record["done"] += 1
            if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                save()
                saved = time.monotonic()
        record["finished"] = True
    finally:
        record["verdict"] = trial.verdict(record["found"])
        save()
    pointer.remove()


def merge(shares: list[dict], trial: Trial) -> dict:
    """One record of what several processes have found."""
    summed = ("done", "failed", "failures", "crashed", "torch_crashed", "found")
    whole = {key: value for key, value in shares[0].items() if key not in summed}
    for share in shares:
        add(whole, {key: share[key] for key in summed})
    del whole["failures"][FAILURES_KEPT:]
    whole["finished"] = all(share["finished"] for share in shares)
    whole["seconds"] = max(share["seconds"] for share in shares)
    whole["asked"] = {key: n for key, n in whole["asked"].items() if key != "share"}
    whole["verdict"] = trial.verdict(whole["found"])
    return whole


def bad(record: dict) -> bool:
    return bool(record["failed"] or record["crashed"] or record["verdict"])


def lines(record: dict) -> list[str]:
    """What a reader of the terminal wants to know."""
    head = f"{record['part']}: {record['done']} {record['unit']} in {record['seconds']:.0f} s"
    found = [f"{head}, {record['failed']} failed, {len(record['crashed'])} crashed"]
    found += [f"  {unit}: the process ended by {how}" for unit, how in record["crashed"].items()]
    for unit, how in record["torch_crashed"].items():
        found.append(f"  {unit}: plain torch ended the process by {how}")
    found += [f"  {f['unit']}: {f['what']}" for f in record["failures"]]
    return [*found, *(f"  {text}" for text in record["verdict"])]
