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
    add("--share", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    add("--work", action="store_true", help=argparse.SUPPRESS)
    add("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if unknown := set(options.parts) - set(parts.ALL):
        parser.error(
            f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts.ALL)}"
        )
    if options.only is not None and len(options.parts) != 1:
        parser.error("--only: expected one part")
    options.device = options.device or parts.default_device()
    if options.measured and options.device == "cpu":
        parser.error("--measured: plans are of a GPU")
    return options


def path_of(name: str, options: argparse.Namespace, share: tuple[int, int] = (0, 1)) -> Path:
    measured = "_measured" if options.measured else ""
    part = f"_{share[0]}_of_{share[1]}" if share[1] > 1 else ""
    return options.records / f"{name}{measured}_{record.machine_kind(options.device)}{part}.json"


def work(name: str, options: argparse.Namespace) -> None:
    """In the process of its own."""
    part = parts.ALL[name]
    trial = part.trial(options.device, options.measured)
    if options.plain:
        trial.plain(options.seed, options.only)
    elif options.only is not None:
        print(json.dumps(trial.one(options.seed, options.only), indent=1))
    else:
        share, count = tuple(options.share), options.count or part.count or len(trial.units)
        asked = {"seed": options.seed, "count": count, "measured": options.measured}
        asked |= {"share": list(share)} if share[1] > 1 else {}
        path = path_of(name, options, share)
        begun = record.begin(path, part, options.device, asked, options.anew)
        record.work(path, trial, begun, share)


def ended_by(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def worked(name: str, options: argparse.Namespace, given: list[str], share) -> Path | None:
    """Where the record of a share of the units is, whose process is started anew after a crash."""
    words = [word for word in given if word not in (*parts.ALL, "--anew")]
    command = [sys.executable, str(Path(__file__).parent), name, *words, "--work"]
    command += ["--share", *map(str, share)]
    path = path_of(name, options, share)
    pointer = record.Pointer(path)
    pointer.remove()
    for attempt in range(CRASHES):
        begin = ["--anew"] if options.anew and attempt == 0 else []
        status = subprocess.run([*command, *begin]).returncode
        if status == 0:
            break
        if (unit := pointer.read()) is None:
            print(f"certify: {name} did not start: {ended_by(status)}", file=sys.stderr)
            return None
        found = json.loads(path.read_text())
        # a part that can tell whether plain torch ends the process as well
        plain = [*command, "--only", str(unit), "--plain"]
        by_torch = subprocess.run(plain, capture_output=True).returncode < 0
        found["torch_crashed" if by_torch else "crashed"][str(unit)] = ended_by(status)
        record.write(path, found)
    pointer.remove()
    return path


def run(name: str, options: argparse.Namespace, given: list[str]) -> bool:
    """Whether the part found nothing wrong; the records of several processes become one."""
    shares = [(i, options.jobs) for i in range(options.jobs)]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        paths = list(pool.map(lambda share: worked(name, options, given, share), shares))
    if None in paths:
        return False
    found = [json.loads(path.read_text()) for path in paths]
    whole = found[0]
    if len(found) > 1:
        trial = parts.ALL[name].trial(options.device, options.measured)
        whole = record.merge(found, trial)
        record.write(path_of(name, options), whole)
        for path in paths:
            path.unlink()
    print(*record.lines(whole), sep="\n", flush=True)
    return whole["finished"] and not record.bad(whole)


def main(given: list[str] | None = None) -> int:
    given = sys.argv[1:] if given is None else given
    options = arguments(given)
    if options.work or options.only is not None:
        work(options.parts[0], options)
        return 0
    names = options.parts or parts.that_make_sense(options.device)
    verdicts = [run(name, options, given) for name in names]
    return int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
