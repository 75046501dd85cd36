"""Compares every model of the zoo before and after fuse_, and writes a record of all.

    python tests/fuse/model_zoo.py --out tests/fuse/model_zoo.json [--resume] [--only WORD]

Each model runs in a process of its own, so that a crash costs one model. ``make test-models`` calls
it. The exit status is 1 where a fused model gave something else than the plain one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[1])]

import torch  # noqa: E402
import zoo  # noqa: E402
import zoo_check  # noqa: E402

SECONDS = 240  # for one model


def work(name: str, record: Connection) -> None:
    """In the process of its own."""
    out = os.open(os.devnull, os.O_WRONLY)
    os.dup2(out, 1)  # what libraries print is no record
    os.dup2(out, 2)
    record.send(zoo_check.check(name))


def record_of(name: str) -> dict:
    """The record of a model; of one that crashes or takes too long it says that."""
    context = multiprocessing.get_context("fork")  # what is imported need not be again
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=work, args=(name, theirs))
    worker.start()
    theirs.close()
    try:
        if ours.poll(SECONDS):
            return ours.recv()
        end = f"took more than {SECONDS} s"
    except EOFError:
        end = "crashed"
    finally:
        worker.kill()
        worker.join()
    return {"name": name, "skipped": end, "seconds": SECONDS}


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
    """Hashes the code that the record is about."""
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
    add = parser.add_argument
    add("--out", type=Path, default=HERE / "model_zoo.json")
    add("--resume", action="store_true", help="keep what is there of this very fuse_")
    add("--only", default="", help="models whose name contains this")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, dict] = {}
    if options.resume and options.out.exists():
        record = json.loads(options.out.read_text())
        if record["fuse"] == fuse_hash():
            found = {r["name"]: r for r in record["models"]}
    known = zoo.names()
    for name in [n for n in known if options.only in n and n not in found]:
        found[name] = record = record_of(name)
        write(options.out, found, len(known))
        print(f"{len(found)}: {record}", flush=True)
    bad = [r for r in found.values() if wrong(r)]
    print(*bad, sep="\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
