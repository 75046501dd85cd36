"""Runs the C++ tests under AddressSanitizer or ThreadSanitizer.

    python tests/support/sanitized.py address|thread [PROGRAM ...]

Our sources for the CPU are compiled with the sanitizer, into build/address or build/thread, and
linked into each program; torch is as it is.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import cpp_programs  # noqa: E402
from cpp_programs import parts  # noqa: E402

# All of them but those that run kernels of CUDA on the CPU.
TESTS = sorted((ROOT / "tests" / "csrc").glob("*_test.cpp"))
PROGRAMS = [path.stem for path in TESTS if '.cuh"' not in path.read_text()]
# Suppressions for torch, which is not compiled with the sanitizer. It then cannot see how torch
# keeps its threads apart; its registries live until the process ends.
OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0"},
    "thread": {
        "TSAN_OPTIONS": f"suppressions={ROOT}/tests/csrc/tsan.supp:halt_on_error=1"
        ":ignore_noninstrumented_modules=1"
    },
}


def compile_one(kind: str, source: Path, folder: Path) -> Path:
    """The object of a source; as it was, if neither it nor a header has changed since."""
    target = folder / f"{source.relative_to(ROOT)}.o".replace("/", "-")
    newest = max(p.stat().st_mtime for p in (source, *(ROOT / "csrc").rglob("*.h")))
    if target.exists() and target.stat().st_mtime > newest:
        return target
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O0", "-g1", "-fno-omit-frame-pointer"]
    command += ["-Wno-return-type"]  # without optimisation it knows less
    command += [f"-fsanitize={kind}", f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(target)]
    command += parts.headers_of(cpp_programs.TORCH, None)
    subprocess.run(command, check=True)
    return target


def build(kind: str) -> dict[str, Path]:
    folder = ROOT / "build" / kind
    folder.mkdir(parents=True, exist_ok=True)
    library = [p for room in parts.ROOMS for p in (ROOT / "csrc" / room).glob("*.cpp")]
    tests = [ROOT / "tests/csrc" / f"{name}.cpp" for name in PROGRAMS]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        objects = list(pool.map(lambda s: compile_one(kind, s, folder), [*library, *tests]))
    programs = {}
    for name, test in zip(PROGRAMS, objects[len(library) :]):
        programs[name] = folder / name
        command = [os.environ.get("CXX", "c++"), f"-fsanitize={kind}", str(test)]
        command += [*map(str, objects[: len(library)]), "-o", str(programs[name])]
        command += [f"-L{cpp_programs.LIB}", f"-Wl,-rpath,{cpp_programs.LIB}", "-Wl,--no-as-needed"]
        command += ["-ltorch", "-ltorch_cpu", "-lc10", "-pthread", "-Wl,--allow-shlib-undefined"]
        subprocess.run(command, check=True)
    return programs


def tested(kind: str, chosen: Sequence[str] = ()) -> dict[str, bool]:
    """Returns whether each test of the programs, by default of all, is clean."""
    # ThreadSanitizer wants the addresses where it expects them.
    start = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
    clean = {}
    for name, program in build(kind).items():
        if chosen and name not in chosen:
            continue
        for test in cpp_programs.names_in(f"{name}.cpp"):
            command = [*(start if kind == "thread" else []), str(program), test]
            with tempfile.TemporaryDirectory() as folder:
                run = subprocess.run(command, env={**os.environ, **OPTIONS[kind]}, cwd=folder)
            clean[f"{name} {test}"] = run.returncode == 0
            print(f"{name} {test}: {'failed' if run.returncode else 'clean'}", flush=True)
    return clean


def main() -> None:
    kind, *chosen = sys.argv[1:]
    clean = tested(kind, chosen)
    failed = [test for test in clean if not clean[test]]
    print(f"{sum(clean.values())} of {len(clean)} tests are clean under the {kind} sanitizer")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
