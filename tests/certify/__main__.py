"""Puts the package through what docs/reliability.md tells of, part by part.

    python tests/certify [PART ...] [--seed N] [--count N] [--device cpu|cuda]

Without parts, all of them. Units are tried in processes of their own, which may crash without
ending the rest; tests/certify/records/PART_MACHINE.json is written meanwhile, and an interrupted
run goes on where it was, if tree and question are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script
    sys.path[:1] = [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(ROOT)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from certify import parts, record  # noqa: E402

CRASHES = 20  # after so many a part is given up


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=", ".join(parts.ALL))
    add("--seed", type=int, default=1)
    add("--count", type=int, help="how many units; each part has its own number")
    add("--device", choices=["cpu", "cuda"], help="the GPU, if there is one")
    add("--measured", action="store_true", help="plans are measured, not by rule")
    add("--records", type=Path, default=record.FOLDER)
    add("--anew", action="store_true", help="from the start, whatever is there")
    add("--only", type=int, help="print what this unit finds; no record is written")
    add("--jobs", type=int, default=1, help="processes that share the units")
    add("--work", type=int, nargs=3, metavar=("FIRST", "END", "STEP"), help=argparse.SUPPRESS)
    add("--plain", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if unknown := set(options.parts) - set(parts.ALL):
        parser.error(
            f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts.ALL)}"
        )
    if options.only is not None and len(options.parts) != 1:
        parser.error("--only: expected one part")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.measured and options.device == "cpu":
        parser.error("--measured: plans are of a GPU")
    return options


def work(part: parts.Part, options: argparse.Namespace) -> None:
    """Tries units in this process; says that it has begun, and then what each gives, on stdout."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what others print
    trial = part.trial(options.device, options.measured)
    print("begun", file=answers)
    for unit in range(*options.work):
        print(json.dumps(trial.one(options.seed, unit)), file=answers)


def ended_by(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


class GivenUp(Exception):
    pass


def results(part: parts.Part, options: argparse.Namespace, units: range) -> Iterator[parts.Found]:
    """Yields the units' findings in order; a process that a unit has ended is followed by
    another, which begins behind that unit."""
    command = [sys.executable, str(Path(__file__).parent), part.name]
    command += ["--seed", str(options.seed), "--device", options.device]
    command += ["--measured"] if options.measured else []
    environment = {**os.environ, **part.trial.environment()}

    def begun(first: int) -> subprocess.Popen:
        share = ["--work", *map(str, (first, units.stop, options.jobs))]
        pipe = subprocess.PIPE
        process = subprocess.Popen([*command, *share], stdout=pipe, text=True, env=environment)
        if not process.stdout.readline():
            raise GivenUp(f"{part.name} did not start: {ended_by(process.wait())}")
        return process

    workers = [begun(first) for first in units[: options.jobs]]
    crashes = 0
    for unit in units:
        k = (unit - units.start) % options.jobs
        if answer := workers[k].stdout.readline():
            yield json.loads(answer)
            continue
        how = ended_by(workers[k].wait())
        # a part that can tell whether plain torch ends the process as well
        plain = subprocess.run([*command, "--plain", str(unit)], capture_output=True)
        yield {"torch_crashed" if plain.returncode < 0 else "crashed": {str(unit): how}}
        crashes += 1
        if crashes == CRASHES:
            raise GivenUp(f"{part.name} has ended the process {crashes} times")
        workers[k] = begun(unit + options.jobs)
    for worker in workers:
        worker.wait()


def run(part: parts.Part, options: argparse.Namespace) -> bool:
    """Returns whether the part found nothing wrong."""
    count = options.count or part.count or len(part.trial.units(options.device))
    asked = {"seed": options.seed, "count": count, "measured": options.measured}
    measured = "_measured" if options.measured else ""
    kind = record.machine_kind(options.device)
    path = options.records / f"{part.name}{measured}_{kind}.json"
    found = record.begin(path, part, options.device, asked, options.anew)
    left = results(part, options, range(found["done"], count))
    try:
        record.keep(path, found, left, lambda sums: part.trial.verdict(sums, options.device))
    except GivenUp as why:
        print(f"certify: {why}", file=sys.stderr)
    print(*record.lines(found), sep="\n", flush=True)
    return found["finished"] and not record.bad(found)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    chosen = [parts.ALL[name] for name in options.parts or parts.that_make_sense(options.device)]
    if options.work:
        work(chosen[0], options)
    elif options.plain is not None:
        chosen[0].trial(options.device, options.measured).plain(options.seed, options.plain)
    elif options.only is not None:
        (found,) = results(chosen[0], options, range(options.only, options.only + 1))
        print(json.dumps(found, indent=1))
    else:
        verdicts = [run(part, options) for part in chosen]
        return int(not all(verdicts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
