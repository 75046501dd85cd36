"""Runs the whole suite on a GPU and leaves the evidence in tests/gpu_record.json.

`make gpu-test` calls it. The gate of speed (gpu_gate.py) follows; `--bench-json FILE` keeps its
numbers. Further arguments go to pytest; what they were is in the record.
"""

import argparse
import collections
import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "gpu_record.json"
FOLDERS = ("csrc", "torch_fused_linear", "tests")
# What building and running leave behind; git ignores the same.
LEFT_BEHIND = {
    "__pycache__",
    ".pytest_cache",
    ".hypothesis",
    "include",
    "lib",
    RECORD.name,
    "records",  # of tests/certify
}


def tree_files():
    """The files that the record speaks for, relative to the root, committed or not."""
    paths = (p.relative_to(ROOT) for folder in FOLDERS for p in (ROOT / folder).rglob("*"))
    return sorted(
        path.as_posix()
        for path in paths
        if (ROOT / path).is_file()
        and not LEFT_BEHIND.intersection(path.parts)
        and path.suffix not in (".so", ".tmp")
    )


def tree_hash():
    digest = hashlib.sha256()
    for path in tree_files():
        digest.update(
            f"{path}\0{hashlib.sha256((ROOT / path).read_bytes()).hexdigest()}\n".encode()
        )
    return digest.hexdigest()


def summary(report, exit_code):
    """Counts, failures and reasons for skipping, from pytest's JUnit report."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    two_gpus = counts.copy()  # of those that need two
    failed_tests, skip_reasons = [], collections.Counter()
    # A crash of the interpreter leaves no report, or half of one.
    try:
        cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    except (OSError, xml.etree.ElementTree.ParseError):
        cases = []
        failed_tests.append(f"pytest wrote no report; it ended with {exit_code}")
    for case in cases:
        skipped, outcome = case.find("skipped"), "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
            failed_tests.append(f"{case.get('classname')}::{case.get('name')}")
        elif skipped is not None:
            outcome = "skipped"
            skip_reasons[skipped.get("message")] += 1
        counts[outcome] += 1
        two_gpus[outcome] += case.get("classname").endswith("test_two_gpus")
    found = {"failed_tests": failed_tests, "skip_reasons": dict(skip_reasons)}
    return {**counts, "two_gpus": two_gpus, **found}


def write(path, record, indent=2):
    """At once: who reads finds the old record or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=indent, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


def speed(json):
    import gpu_gate

    try:
        return gpu_gate.run(Path(json) if json else None)
    except Exception as failure:  # no verdict is no pass; the tests' outcome is kept all the same
        return {"measured": 0, "worst_ratios": {}, "below": [f"no verdict: {failure}"]}


def main(arguments):
    import torch

    if not torch.cuda.is_available():
        return "gpu_record: no CUDA device here, so there is nothing to record; use `make test`."

    import torch_fused_linear  # noqa: F401  (a library that does not load is no record either)
    from torch_fused_linear import _library, doctor

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--bench-json")
    options, arguments = parser.parse_known_args(arguments)
    began, date = time.monotonic(), datetime.datetime.now(datetime.timezone.utc)
    tree = tree_hash()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # In a process of its own: a GPU fault can take the interpreter with it.
        exit_code = subprocess.run(
            [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments], cwd=ROOT
        ).returncode
        outcome = summary(report, exit_code)
    record = {
        "date": date.isoformat(timespec="seconds"),
        **doctor.versions(),
        "library": _library.build_info(),
        "tree_hash": tree,
        "arguments": arguments,
        "exit_code": exit_code,
        **outcome,
        "speed": {"measured": 0, "worst_ratios": {}, "below": ["not yet measured"]},
        "seconds": round(time.monotonic() - began, 1),
    }
    if tree_hash() != tree:
        return "gpu_record: the tree changed during the run, so no record is written."
    write(RECORD, record)  # what the tests have shown is not lost if the gate is broken off
    verdict = record["speed"] = speed(options.bench_json)
    record["seconds"] = round(time.monotonic() - began, 1)
    write(RECORD, record)
    print(f"gpu_record: {RECORD.relative_to(ROOT)} written")
    for label in verdict["below"]:
        print(f"gpu_record: slower than eager by more than 2 %: {label}")
    return exit_code or int(bool(verdict["below"]))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # a script's own folder comes first there, not the root
    sys.exit(main(sys.argv[1:]))
