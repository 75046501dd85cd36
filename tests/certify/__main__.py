"""Puts the package through what docs/reliability.md tells of, part by part.

    python tests/certify [PART ...] [--seed N] [--count N] [--device cpu|cuda]

Without parts, all of them. Each runs in a process of its own, which may crash without ending the
rest, and writes tests/certify/records/PART_MACHINE.json as it goes; an interrupted run goes on
where it was, if tree and question are the same.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script
    sys.path[:1] = [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(ROOT)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from certify import parts, record  # noqa: E402

CRASHES = 20  # after so many a part is given up


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:12} {part.about}" for name, part in parts.ALL.items()),
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts.ALL))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, help="how many units; each part has its own number")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="the GPU, if there is one")
    parser.add_argument("--measured", action="store_true", help="plans are measured, not by rule")
    parser.add_argument("--records", type=Path, default=record.FOLDER)
    parser.add_argument("--anew", action="store_true", help="from the start, whatever is there")
    parser.add_argument("--only", type=int, help="print what this unit finds; no record is written")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the units")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if unknown := set(options.parts) - set(parts.ALL):
        parser.error(
            f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts.ALL)}"
        )
    options.device = options.device or parts.default_device()
    if options.measured and options.device == "cpu":
        parser.error("--measured: plans are of a GPU")
    return options


def path_of(name: str, options: argparse.Namespace) -> Path:
    measured = "_measured" if options.measured else ""
    share = f"_{options.share[0]}_of_{options.share[1]}" if options.share[1] > 1 else ""
    return options.records / f"{name}{measured}_{record.machine_kind(options.device)}{share}.json"


def work(name: str, options: argparse.Namespace) -> None:
    """In the process of its own."""
    part = parts.ALL[name]
    trial = part.trial(options.device, options.measured)
    if options.plain:
        trial.plain(options.seed, options.only)
        return
    if options.only is not None:
        print(json.dumps(trial.one(options.seed, options.only), indent=1))
        return
    count = options.count or part.count or len(trial.units)
    asked = {"seed": options.seed, "count": count}
    asked["measured"] = options.measured
    if options.share[1] > 1:
        asked["share"] = list(options.share)
    path = path_of(name, options)
    begun = record.begin(path, part, options.device, asked, options.anew)
    record.work(path, trial, begun, tuple(options.share))


def ended_by(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def ends_without_us(command: list[str], unit: int) -> bool:
    """Whether plain torch ends the process as well, in a part that can tell."""
    plain = [*command, "--only", str(unit), "--plain"]
    return subprocess.run(plain, capture_output=True).returncode < 0


def run(name: str, options: argparse.Namespace, given: list[str]) -> bool:
    """Whether the part found nothing wrong."""
    words = [word for word in given if word not in (*parts.ALL, "--anew")]
    command = [sys.executable, str(Path(__file__).parent), name, *words, "--work"]
    path = path_of(name, options)
    pointer = record.Pointer(path)
    pointer.remove()
    if options.only is not None:
        return subprocess.run(command).returncode == 0
    for attempt in range(CRASHES):
        begin = ["--anew"] if options.anew and attempt == 0 else []
        status = subprocess.run([*command, *begin]).returncode
        if status == 0:
            break
        if (unit := pointer.read()) is None:
            print(f"certify: {name} did not start: {ended_by(status)}", file=sys.stderr)
            return False
        found = json.loads(path.read_text())
        whose = "torch_crashed" if ends_without_us(command, unit) else "crashed"
        found[whose][str(unit)] = ended_by(status)
        record.write(path, found)
    pointer.remove()
    found = json.loads(path.read_text())
    print(*record.lines(found), sep="\n", flush=True)
    return found["finished"] and not record.bad(found)


def run_shared(name: str, options: argparse.Namespace, given: list[str]) -> bool:
    """The same by several processes; their records become one."""

    def run_share(i: int) -> Path:
        share = argparse.Namespace(**{**vars(options), "share": (i, options.jobs)})
        run(name, share, [*given, "--share", str(i), str(options.jobs)])
        return path_of(name, share)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        paths = list(pool.map(run_share, range(options.jobs)))
    shares = [json.loads(path.read_text()) for path in paths if path.exists()]
    if len(shares) < options.jobs:
        return False
    whole = record.merge(shares, parts.ALL[name].trial(options.device, options.measured))
    record.write(path_of(name, options), whole)
    for path in paths:
        path.unlink()
    print(*record.lines(whole), sep="\n", flush=True)
    return whole["finished"] and not record.bad(whole)


def main(given: list[str] | None = None) -> int:
    given = sys.argv[1:] if given is None else given
    options = arguments(given)
    if options.work:
        work(options.parts[0], options)
        return 0
    names = options.parts or parts.that_make_sense(options.device)
    how = run_shared if options.jobs > 1 and options.only is None else run
    verdicts = [how(name, options, given) for name in names]
    return int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
