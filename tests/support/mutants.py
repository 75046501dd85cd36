"""Plants faults, one at a time, and says which of them the tests notice.

    python tests/support/mutants.py [WORD ...]

Words choose the faults whose name or file holds one of them. Everything happens in a copy of the
sources in build/mutants, which is built for the CPU. A fault whose text is not found exactly once
ends the run: the code has moved, and the list (mutant_list.py) must follow.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from mutant_list import MUTANTS  # noqa: E402

COPY = ROOT / "build" / "mutants"
LONGEST = 3600  # seconds for the tests of one fault; what hangs is noticed, too
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_FUSED_LINEAR_CUDA": "0"}


def planted(mutant, text):
    """The file's text with the fault in it."""
    count = text.count(mutant.find)
    if count != 1:
        sys.exit(f"{mutant.name}: {count} times in {mutant.file}, expected once:\n{mutant.find}")
    return text.replace(mutant.find, mutant.put)


def copy_sources():
    """Git's files as they are here; those that are the same already keep their times."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    names = {name for name in listed if (ROOT / name).is_file()}
    for name in names:
        source, target = ROOT / name, COPY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != source.read_bytes():
            shutil.copy(source, target)
    for path in (COPY / "tests").rglob("*.py"):
        if path.relative_to(COPY).as_posix() not in names:
            path.unlink()


def run(*command, timeout=None):
    return subprocess.run(
        [sys.executable, *command], cwd=COPY, env={**os.environ, **ENVIRONMENT}, timeout=timeout,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def build():
    result = run("setup.py", "-q", "build_ext", "--inplace")
    if result.returncode:
        sys.exit(f"the build failed:\n{result.stdout[-5000:]}")


def noticed_by(tests):
    """The first test that fails, or None."""
    try:
        result = run("-m", "pytest", "-x", "-q", *tests.split(), timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return "(does not end)"
    if result.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    crashed = result.returncode < 0 or "Fatal Python error" in result.stdout
    if not found and not crashed:
        sys.exit(f"pytest could not run {tests}:\n{result.stdout[-5000:]}")
    return found[1] if found else "(a crash)"


def is_noticed(mutant):
    """Plants it, runs the tests, and prints a line of the table."""
    path = COPY / mutant.file
    text = path.read_text()
    path.write_text(planted(mutant, text))
    try:
        build()  # of the one before nothing must be left
        test = noticed_by(mutant.tests)
    finally:
        path.write_text(text)
    how = "caught by " + test if test else "NOT CAUGHT by " + mutant.tests
    print(f"{mutant.name}: {how}", flush=True)
    return test is not None


def main():
    words = sys.argv[1:]
    chosen = [m for m in MUTANTS if not words or any(w in m.name or w in m.file for w in words)]
    for mutant in MUTANTS:
        planted(mutant, (ROOT / mutant.file).read_text())
    copy_sources()
    build()
    missed = [mutant.name for mutant in chosen if not is_noticed(mutant)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults are caught")
    sys.exit(f"not caught: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
