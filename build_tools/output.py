"""What a build says: a line a minute, the warnings, and the compiler's own words if it fails."""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# ninja begins the line of each finished command with "[3/44] ".
STEP = re.compile(r"^\[(\d+)/(\d+)\] ", re.MULTILINE)
LAST_LINES = 60


def errors(log: str) -> str:
    """What the compiler said of the files that failed, without the commands."""
    told, telling, skip = [], False, False
    for line in log.splitlines():
        if line.startswith("FAILED:"):
            telling = skip = True  # the command follows, in a line of its own
        elif STEP.match(line) or line.startswith("ninja:"):
            telling = False
        elif telling and not skip:
            told.append(line)
        else:
            skip = False
    return "\n".join(told or log.splitlines()[-LAST_LINES:])


def progress(log: str, seconds: float) -> str:
    steps = STEP.findall(log)
    done = f", {steps[-1][0]} of {steps[-1][1]} files compiled" if steps else ""
    return f"  {seconds / 60:.0f} min{done}"


@contextmanager
def summarised(path: Path, every: float = 60) -> Iterator[None]:
    """Writes all output of what is inside, and of its children, to `path`, and says it in short.

    SystemExit, with the compiler's words, in place of what is raised inside.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(fd, os.dup(fd)) for fd in (1, 2)]
    over, began = threading.Event(), time.monotonic()

    def say(text: str) -> None:
        os.write(kept[0][1], f"{text}\n".encode())

    def tell() -> None:
        while not over.wait(every):
            say(progress(path.read_text(errors="replace"), time.monotonic() - began))

    teller, failure = threading.Thread(target=tell, daemon=True), None
    with path.open("wb") as log:
        for fd, _ in kept:
            os.dup2(log.fileno(), fd)
    teller.start()
    try:
        yield
    except Exception as caught:
        failure = caught
    finally:
        over.set()
        teller.join()
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy in kept:
            os.dup2(copy, fd)
            os.close(copy)
    log = path.read_text(errors="replace")
    if failure is not None:
        raise SystemExit(
            f"torch_fused_linear: {failure}; everything that was said: {path}\n\n{errors(log)}"
        ) from failure
    for line in log.splitlines():
        if "warning:" in line:
            print(line)
    print(f"built in {time.monotonic() - began:.0f} s", flush=True)
