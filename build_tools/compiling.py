"""Compiles what has changed, several files at once, and says little.

A file is compiled again where its text, that of what it includes of csrc, the flags or the compiler
are others than before, whenever it was written: trees are copied between machines.
"""

import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"


@dataclass(frozen=True)
class Unit:
    """A file to be compiled.

    Attributes:
        source: the file.
        made: the object, or what else comes of it.
        command: the compiler and its flags, without the two.
        seconds: how long it takes, about.
        after: what has to be there before.
    """

    source: Path
    made: Path
    command: tuple[str, ...]
    seconds: float
    after: "Unit | None" = None


@cache
def included(path):
    """The file and all of csrc that it includes."""
    found, open_ends = {path}, [path]
    while open_ends:
        text = open_ends.pop().read_text()
        names = re.findall(r'^#include "(.+)"$', text, re.MULTILINE)
        fresh = {p for p in (CSRC / name for name in names) if p.exists()} - found
        found |= fresh
        open_ends += fresh
    return found


@cache
def version_of(compiler):
    """A compiler's name and version. Raises SystemExit if there is none, or none that is fit."""
    command = shlex.split(compiler)
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    except OSError:
        sys.exit(
            f"torch_fused_linear: there is no compiler '{compiler}'.\n"
            "  Install GCC (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or name "
            "another in CXX."
        )
    return said


def cxx():
    return os.environ.get("CXX") or "c++"


def check_cxx():
    """SystemExit where the C++ compiler does not know the C++ that csrc is written in."""
    first_line = version_of(cxx()).partition("\n")[0]
    command = [*shlex.split(cxx()), "-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
    text = "#include <concepts>\n#include <ranges>\n#include <span>\n"
    if subprocess.run(command, input=text, capture_output=True, text=True).returncode:
        sys.exit(
            f"torch_fused_linear: the compiler does not know C++20: {first_line}.\n"
            "  Install GCC 11 or newer, or name another in CXX."
        )


def digest(*texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def key_of(unit):
    command = shlex.join(unit.command).replace(str(ROOT), "")
    sources = (p.read_text() for p in sorted(included(unit.source)))
    before = key_of(unit.after) if unit.after else ""
    return digest(command, version_of(unit.command[0]), before, *sources)


def is_current(unit):
    stamp = unit.made.with_suffix(".sha256")
    return unit.made.exists() and stamp.exists() and stamp.read_text() == key_of(unit)


def compile_one(unit, log):
    unit.made.parent.mkdir(parents=True, exist_ok=True)
    stamp = unit.made.with_suffix(".sha256")
    stamp.unlink(missing_ok=True)
    unit.made.unlink(missing_ok=True)
    key = key_of(unit)  # an edit from here on counts as one of the next time
    command = [*unit.command, str(unit.source), "-o", str(unit.made)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log.write(f"{shlex.join(command)}\n{done.stdout}")
    log.flush()
    if done.returncode:
        raise SystemExit(f"torch_fused_linear: {unit.source} does not compile\n\n{done.stdout}")
    stamp.write_text(key)
    return [line for line in done.stdout.splitlines() if "warning:" in line]


def compile_all(units, jobs, log_path, every=30):
    """Compiles the units that are not current.

    Args:
        units: each after what it needs.
        jobs: how many compilers run at once.
        log_path: where commands are written, and all that compilers say.
        every: seconds from one line of progress to the next.
    """
    todo = [unit for unit in units if not is_current(unit)]
    if not todo:
        return
    whole = sum(unit.seconds for unit in todo) / min(jobs, len(todo))
    log_path.parent.mkdir(parents=True, exist_ok=True)
    print(
        f"  {len(todo)} files to compile, {jobs} at once: about {max(whole / 60, 0.1):.1f} min on "
        f"a quiet machine; all that is said: {log_path}",
        flush=True,
    )
    began = said = time.monotonic()
    running: dict[Future, Unit] = {}
    done = 0
    with log_path.open("w") as log, ThreadPoolExecutor(jobs) as pool:
        waiting = [unit for unit in todo if unit.after in todo]
        for unit in todo:
            if unit not in waiting:
                running[pool.submit(compile_one, unit, log)] = unit
        while running:
            finished, _ = wait(running, timeout=1, return_when=FIRST_COMPLETED)
            for future in finished:
                unit = running.pop(future)
                try:
                    warnings = future.result()
                except SystemExit:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
                print(*warnings, sep="\n", end="\n" * bool(warnings))
                done += 1
                for other in [w for w in waiting if w.after == unit]:
                    waiting.remove(other)
                    running[pool.submit(compile_one, other, log)] = other
            if time.monotonic() - said > every:
                said = time.monotonic()
                print(f"  {(said - began) / 60:.1f} min, {done} of {len(todo)} files", flush=True)
    print(f"  compiled in {time.monotonic() - began:.0f} s", flush=True)


def link(objects, made, flags):
    """Makes a library of objects; at no moment is there one that looks finished and is not."""
    made.parent.mkdir(parents=True, exist_ok=True)
    unfinished = made.with_suffix(".tmp")
    command = [*shlex.split(cxx()), "-shared", "-Wl,-Bsymbolic-functions", *map(str, objects)]
    command += ["-o", str(unfinished), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"torch_fused_linear: {made.name} does not link\n\n{done.stdout}{done.stderr}")
    os.replace(unfinished, made)
