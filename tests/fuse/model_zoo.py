"""Compares every model of the zoo before and after fuse_, and writes a record of all.

    python tests/fuse/model_zoo.py --out tests/fuse/model_zoo.json [--resume] [--only WORD]

Models run in processes of some dozen, so that a crash costs one model. ``make test-models`` calls
it. The exit status is 1 where a fused model gave something else than the plain one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import selectors
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
CHUNK, SECONDS = 25, 240  # models a process, time for one


def work(names: list[str]) -> None:
    """In the process of its own: one line of JSON for each model."""
    import warnings

    import torch
    import zoo_check

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no record
    for name in names:
        print(json.dumps({"begun": name}), file=out, flush=True)
        print(json.dumps(zoo_check.check(name)), file=out, flush=True)


def records(names: list[str]):
    """The record of each model; one that crashes or takes too long is recorded as that."""
    while names:
        command = [sys.executable, str(HERE / "model_zoo.py"), "--work", *names[:CHUNK]]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        waiting, buffer, done = selectors.DefaultSelector(), b"", 0
        waiting.register(worker.stdout, selectors.EVENT_READ)
        end = "crashed"
        while done < len(names[:CHUNK]):
            if not waiting.select(SECONDS):
                end = f"took more than {SECONDS} s"
                break
            if not (data := os.read(worker.stdout.fileno(), 65536)):
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for record in map(json.loads, lines):
                if "begun" not in record:
                    done += 1
                    yield record
        worker.kill()
        worker.wait()
        if done < len(names[:CHUNK]):
            yield {"name": names[done], "skipped": end, "seconds": SECONDS}
            done += 1
        names = names[done:]


def wrong(record: dict) -> bool:
    """A comparison that was made and failed."""
    if record.get("skipped", "").startswith("crashed"):
        return True
    step = record.get("step", True)
    failed = [record.get(key, True) is not True for key in ("forward", "unfused")]
    return any(failed) or (step is not True and not step.startswith(("plain", "not asked")))


def counts(found: list[dict]) -> dict[str, int]:
    compared = [r for r in found if "forward" in r]
    return {
        "models": len(found),
        "skipped": sum("skipped" in r for r in found),
        "forward equal": sum(r["forward"] is True for r in compared),
        "step equal": sum(r["step"] is True for r in compared),
        "with blocks fused": sum(r["blocks"] > 0 for r in compared),
        "blocks fused": sum(r["blocks"] for r in compared),
        "wrong": sum(map(wrong, found)),
    }


def fuse_hash() -> str:
    """Of the code that the record speaks for."""
    files = sorted((HERE.parents[1] / "torch_fused_linear" / "fuse").rglob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]


def write(path: Path, found: dict[str, dict], known: int) -> None:
    libraries = ("torch", "timm", "transformers")
    head = {
        "fuse": fuse_hash(),
        "known models": known,
        "versions": {name: importlib.metadata.version(name) for name in libraries},
        "counts": {
            library: counts([r for n, r in found.items() if n.startswith(library)])
            for library in ("timm", "transformers")
        },
        "seconds": round(sum(r["seconds"] for r in found.values())),
    }
    lines = ",\n".join(json.dumps(found[name]) for name in sorted(found))
    text = json.dumps(head, indent=1)[:-2] + f',\n "models": [\n{lines}\n]\n}}\n'
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "model_zoo.json")
    parser.add_argument(
        "--resume", action="store_true", help="keep what is there of this very fuse_"
    )
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    import zoo

    found: dict[str, dict] = {}
    if options.resume and options.out.exists():
        record = json.loads(options.out.read_text())
        if record["fuse"] == fuse_hash():
            found = {r["name"]: r for r in record["models"]}
    known = zoo.names()
    names = [n for n in known if options.only in n and n not in found]
    for record in records(names):
        found[record["name"]] = record
        write(options.out, found, len(known))
        print(f"{len(found)}: {record}", flush=True)
    bad = [r for r in found.values() if wrong(r)]
    print(*bad, sep="\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
