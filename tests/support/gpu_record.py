"""Runs the whole suite on a GPU and leaves the evidence in tests/gpu_record.json.

`make gpu-test` calls it. The gate of speed (gpu_gate.py) follows; `--bench-json FILE` keeps its
numbers. Further arguments go to pytest; what they were is in the record. Outcomes are kept as they
come: a later run on the same tree does what is missing, and the last one writes the record. It
names each test that did not run with the reason, and each file of which no test ran.
"""

import argparse
import collections
import datetime
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "gpu_record.json"
OUTCOMES = ROOT / "build" / "gpu_outcomes.jsonl"
DESELECTED = "left out by the arguments"
MOST_NAMED = 20  # tests that are listed by name for one reason
FOLDERS = ("csrc", "torch_fused_linear", "tests")
# Files that building and running leave behind; git ignores the same.
LEFT_BEHIND = {
    "__pycache__",
    ".pytest_cache",
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
        content = hashlib.sha256((ROOT / path).read_bytes()).hexdigest()
        digest.update(f"{path}\0{content}\n".encode())
    return digest.hexdigest()


def pytest_collection_modifyitems(items):
    """An interrupted run goes on with what it lacks. Reports carry that a test uses two GPUs."""
    done = {test["test"] for test in outcomes(OUTCOMES)}
    items[:] = [item for item in items if item.nodeid not in done]
    for item in items:
        if item.get_closest_marker("two_gpus") or "two_gpus" in getattr(item, "fixturenames", ()):
            item.user_properties.append(("two_gpus", True))


def pytest_deselected(items):
    """Keeps what the run's arguments leave out; each worker of xdist's collects the same tests."""
    if os.environ.get("PYTEST_XDIST_WORKER") in (None, "gw0"):
        for item in items:
            append(OUTCOMES, {"deselected": item.nodeid})


def pytest_runtest_logreport(report):
    """Appends a test's outcome as soon as it is there, or the crash of the process it ran in."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that gave out the work hears of it too
    last = found.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "why": ""})
    if report.failed:
        last |= {"outcome": "failed", "why": report.longreprtext}
    elif report.skipped and last["outcome"] == "passed":
        last |= {"outcome": "skipped", "why": report.longrepr[-1].removeprefix("Skipped: ")}
    last["two_gpus"] = ("two_gpus", True) in map(tuple, report.user_properties)
    last["seconds"] = last.get("seconds", 0.0) + report.duration
    if report.when not in ("setup", "call"):
        append(OUTCOMES, found.pop(report.nodeid))


found = {}  # of tests that run


def append(path, line):
    with path.open("a") as file:
        file.write("\n" + json.dumps(line))  # what was cut off before stays a line of its own


def outcomes(path, tree=None, kind="test"):
    """The findings of earlier runs, only on `tree` if that is given. Or the runs themselves."""
    if not path.exists():
        return []
    head, *lines = path.read_text().split("\n")
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    return (
        [line for line in whole if kind in line] if tree in (None, json.loads(head)["tree"]) else []
    )


def compact(names):
    """A few tests by name; of many, how many each file has."""
    if len(names) <= MOST_NAMED:
        return sorted(names)
    files = collections.Counter(name.partition("::")[0] for name in names)
    return [f"{file}: {count}" for file, count in sorted(files.items())]


def test_files(root=ROOT):
    return {path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")}


def summary(tests, deselected=(), files=()):
    """Counts, failures, and what did not run: tests by their reasons, and whole files.

    ``deselected`` names the tests that the runs' arguments left out, ``files`` all files of tests.
    """
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    two_gpus = counts.copy()  # of those that need two
    for test in tests:
        counts[test["outcome"]] += 1
        two_gpus[test["outcome"]] += test["two_gpus"]
    not_run = collections.defaultdict(set)
    for test in tests:
        if test["outcome"] == "skipped":
            not_run[test["why"]].add(test["test"])
    left_out = {*deselected} - {test["test"] for test in tests}
    if left_out:
        not_run[DESELECTED] = left_out
    ran = {test["test"].partition("::")[0] for test in tests if test["outcome"] != "skipped"}
    return {
        **counts,
        "two_gpus": two_gpus,
        "failed_tests": [test["test"] for test in tests if test["outcome"] == "failed"],
        "not_run": {reason: compact(names) for reason, names in sorted(not_run.items())},
        "ran_nowhere": sorted({*files} - ran),
        "seconds": round(sum(test["seconds"] for test in tests), 1),
    }


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
    from torch_fused_linear import doctor
    from torch_fused_linear._support import library

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--bench-json")
    options, arguments = parser.parse_known_args(arguments)
    tree, plugin = tree_hash(), Path(__file__)
    before = outcomes(OUTCOMES, tree)
    if not before:
        OUTCOMES.parent.mkdir(exist_ok=True)
        OUTCOMES.write_text(json.dumps({"tree": tree}))
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    versions = doctor.versions()
    append(OUTCOMES, {"run": now, "devices": versions["devices"], "arguments": arguments})
    # In a process of its own: a GPU fault can take the interpreter with it.
    command = [sys.executable, "-m", "pytest", "-p", plugin.stem, *arguments]
    environment = os.environ | {"PYTHONPATH": str(plugin.parent)}
    exit_code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if exit_code == pytest.ExitCode.NO_TESTS_COLLECTED and before:
        exit_code = 0  # the run before had them all
    if exit_code not in (0, pytest.ExitCode.TESTS_FAILED):
        return f"gpu_record: pytest ended with {exit_code}; the same command goes on from there."
    record = {
        "date": now,
        **versions,
        "library": library.build_info(),
        "tree_hash": tree,
        "runs": outcomes(OUTCOMES, kind="run"),
        **summary(
            outcomes(OUTCOMES),
            [line["deselected"] for line in outcomes(OUTCOMES, kind="deselected")],
            test_files(),
        ),
        "speed": {"measured": 0, "worst_ratios": {}, "below": ["not yet measured"]},
    }
    if tree_hash() != tree:
        return "gpu_record: the tree changed during the run, so no record is written."
    write(RECORD, record)  # what the tests have shown is not lost if the gate is broken off
    verdict = record["speed"] = speed(options.bench_json)
    write(RECORD, record)
    OUTCOMES.unlink()
    print(f"gpu_record: {RECORD.relative_to(ROOT)} written")
    for label in verdict["below"]:
        print(f"gpu_record: slower than eager by more than 2 %: {label}")
    return int(bool(record["failed"] or verdict["below"]))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # a script's own folder comes first there, not the root
    sys.exit(main(sys.argv[1:]))
