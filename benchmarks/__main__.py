"""The command line of the benchmark suite: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import machine, results
from benchmarks.cases import AUTOCAST, DTYPES, SUITES, Case, cases_of
from benchmarks.contenders import BASELINES, COMPILED
from benchmarks.results import Record
from benchmarks.run import entrants, measure_case
from benchmarks.table import Table, details
from torch_fused_linear._support.command_line import OneLineParser
from torch_fused_linear.timing import in_one_line

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
QUICK_SECONDS = 0.02
SECONDS = sorted(suite.seconds for suite in SUITES.values() if suite.seconds)
RUNNING_TIME = f"seconds of rounds; default: {SECONDS[0]:g} to {SECONDS[-1]:g}, by suite"
JSON_NAME = "bench.json"


class Settings(argparse.Namespace):
    """The user's options, checked."""

    def cases(self, suite: str) -> list[Case]:
        found = cases_of(suite, self.device, self.quick, self.dtypes)
        return [case for case in found if all(text in str(case) for text in self.only)]

    def names(self, suite: str) -> list[str]:
        """The contenders of `suite`, in the order of the table's columns."""
        wanted = {*SUITES[suite].baselines, *self.baselines}
        names = [*SUITES[suite].ours, *(name for name in BASELINES if name in wanted)]
        return [name for name in names if name not in self.without]

    def entrants(self, case: Case) -> list[str]:
        compiles = self.compile_all or SUITES[case.suite].compiles(case)
        names = [n for n in self.names(case.suite) if compiles or n not in COMPILED]
        return entrants(case, names, self.device)

    def seconds_for(self, suite: str) -> float:
        return self.seconds_per_case or (QUICK_SECONDS if self.quick else SUITES[suite].seconds)


def suite_name(text: str) -> str:
    if text not in SUITES:
        raise argparse.ArgumentTypeError(f"unknown suite {text!r}; there are {', '.join(SUITES)}")
    return text


def make_parser() -> argparse.ArgumentParser:
    about = "\n".join(f"  {name:<13} {suite.about}" for name, suite in SUITES.items())
    parser = OneLineParser(
        prog="python -m benchmarks",
        description="Time fused layers beside eager and others: medians of interleaved rounds, in "
        f"microseconds.\n\nsuites:\n{about}",
        epilog="examples:\n"
        "  python -m benchmarks layer --quick      does everything run?\n"
        "  python -m benchmarks ffn --list         the names of the cases\n"
        '  python -m benchmarks layer --only "T=8192 bf16" --out DIR',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    several = {"nargs": "+", "default": [], "metavar": "NAME"}
    ours = {name for suite in SUITES.values() for name in suite.ours}
    more = f"measure these too; default: each suite's own; there are {', '.join(BASELINES)}"
    less = "leave these out, such as compile, which takes long; default: none"
    only = 'only cases with TEXT in their name, such as "T=8192"; may be repeated; default: all'
    add("suites", nargs="*", type=suite_name, metavar="suite", help="which; all by default")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    where = "cpu, cuda or cuda:N; default: a GPU if there is one"
    add("--device", type=device_named, default=best, help=where)
    add("--threads", type=int, metavar="N", help="of the CPU; default: as torch has it")
    add("--dtypes", nargs="+", choices=(*DTYPES, AUTOCAST), help="default: each suite's own")
    add("--baselines", choices=BASELINES, help=more, **several)
    add("--without", choices=sorted({*BASELINES, *ours}), help=less, **several)
    add("--compile-all", action="store_true", help="torch.compile for all cases, not for some")
    add("--only", action="append", default=[], metavar="TEXT", help=only)
    add("--seconds-per-case", type=float, metavar="S", help=RUNNING_TIME)
    add("--cudnn-benchmark", action="store_true", help="cuDNN's convolutions by trial, for all")
    add("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    add("--kernels", action="store_true", help="name the kernels that one call runs")
    add("--list", action="store_true", help="print the names of the cases and stop")
    add("--json", type=Path, metavar="FILE", help="numbers; default: DIR/bench.json with --out")
    folder = "the folder of bench.json; default: none"
    add("--out", type=output_directory, metavar="DIR", help=folder)
    return parser


def parse(arguments: Sequence[str] | None) -> Settings:
    """Read the command line; bad arguments end the program with one line."""
    parser = make_parser()
    settings = parser.parse_args(arguments, namespace=Settings())
    settings.suites = list(dict.fromkeys(settings.suites)) or list(SUITES)
    for name in ("threads", "seconds_per_case"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')}: must be above zero, got {value}")
    if settings.out is not None:
        settings.json = settings.json or settings.out / JSON_NAME
    if settings.json is not None and not settings.json.parent.is_dir():
        parser.error(f"--json {settings.json}: no such directory")
    cases = [case for suite in settings.suites for case in settings.cases(suite)]
    if not cases:
        parser.error("no case is left to measure; see --list without --only")
    if settings.list:
        parser.exit(0, "".join(f"{case}\n" for case in cases))
    return settings


def say(text: str = "") -> None:
    """Print at once, also into a pipe, and around the progress bar."""
    tqdm.write(text)
    sys.stdout.flush()


def introduce(header: dict[str, Any]) -> None:
    say(f"machine  {header['machine']}")
    say(
        f"versions torch {header['torch']}, CUDA {header['cuda']}, driver {header['driver']}, "
        f"cuBLASLt {header['cublaslt']}"
    )
    if header["clocks"]:
        clocks = header["clocks"]["start"].items()
        say("clocks   " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in clocks))
    say(f"policy   ours, mlp, fused, compile+pass: auto; the process: {header['policy']}")
    say("times    medians over interleaved rounds; spread: distance of the quartiles, of ours")


def run_suite(
    suite: str,
    settings: Settings,
    header: dict[str, Any],
    records: list[Record],
    progress: tqdm,
) -> None:
    """Adds a record a case to `records`; whatever happens, those that were measured are saved."""
    plan = {case: settings.entrants(case) for case in settings.cases(suite)}
    if not plan:
        return
    here: list[Record] = []
    present = {name for names in plan.values() for name in names}
    table = Table(list(plan), [name for name in settings.names(suite) if name in present])
    say(f"\n{suite}: {SUITES[suite].about}\n{table.head()}")
    for case, names in plan.items():
        progress.set_description(str(case))
        seconds = settings.seconds_for(suite)
        kernels = settings.kernels or SUITES[suite].kernels
        record = measure_case(case, names, settings.device, seconds, kernels)
        here.append(record)
        records.append(record)
        if settings.json is not None:
            results.save(settings.json, header, records)
        say("\n".join([table.line(record), *details(record)]))
        progress.update()
    say(table.foot(here))
    header["clocks"].update({suite: now} if (now := machine.clocks(settings.device)) else {})


def run(settings: Settings) -> int:
    if settings.device.type == "cuda" and settings.device.index is not None:
        torch.cuda.set_device(settings.device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    torch.backends.cudnn.benchmark |= settings.cudnn_benchmark
    header = machine.begin(settings.device, sys.argv[1:])
    introduce(header)

    records: list[Record] = []
    status = 0
    total = sum(len(settings.cases(suite)) for suite in settings.suites)
    try:
        with tqdm(total=total, disable=None, leave=False) as progress:
            for suite in settings.suites:
                run_suite(suite, settings, header, records, progress)
    except KeyboardInterrupt:
        say(f"\nstopped by Ctrl-C after {len(records)} of {total} cases")
        status = EXIT_INTERRUPTED
    if settings.json is not None and records:
        results.save(settings.json, header, records)  # with the clocks after the last suite
        say(f"numbers  {settings.json.resolve()}")
    ours_failed = any(r.failed_alone(name) for r in records for name in SUITES[r.case.suite].ours)
    return status or (EXIT_FAILED if ours_failed else 0)


def device_named(text: str) -> torch.device:
    """An argument type: what tensors can be on."""
    try:
        device = torch.device(text)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("not supported")
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as failure:
        why = f"{text!r}: use cpu, cuda or cuda:N: {in_one_line(failure)}"
        raise argparse.ArgumentTypeError(why) from None
    return device


def output_directory(text: str) -> Path:
    """An argument type: a folder, made if need be, in which files can be made."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return run(parse(arguments))
    except KeyboardInterrupt:
        say("\nstopped by Ctrl-C")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
