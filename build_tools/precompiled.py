"""torch's headers, read once for all files of a build (GCC's precompiled headers).

Half of the time that a file takes is theirs. GCC passes over a header that was made with other
flags, so that at worst nothing is gained.
"""

import hashlib
import subprocess
from pathlib import Path

# What most of csrc includes.
HEADERS = [
    "ATen/ATen.h",
    "torch/csrc/autograd/function.h",
    "torch/csrc/autograd/saved_variable.h",
    "torch/csrc/dynamo/compiled_autograd.h",
    "torch/library.h",
]
CUDA_HEADERS = ["ATen/cuda/CUDAContext.h"]
# The header itself takes as long as three files: with more compilers at once nobody waits for it.
MOST_JOBS = 8
HEADER = "precompiled.h"


def flags(command, folder, build, jobs):
    """Makes the header, unless it is there.

    Args:
        command: the compiler and the flags that all files are compiled with.
        folder: where the header is put.
        build: the versions of torch, and of CUDA if the files include its headers.
        jobs: how many compilers run at once.

    Returns:
        Flags that have a file include it; none where it does not pay, or is not made.
    """
    if jobs > MOST_JOBS:
        return []
    answer = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout
    if "Free Software Foundation" not in answer:
        return []
    header = Path(folder, HEADER)
    header.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"#include <{name}>\n" for name in HEADERS + CUDA_HEADERS * bool(build["cuda"]))
    told = [*command, answer, build["torch"], str(build["cuda"]), text]
    made_with = hashlib.sha256("\n".join(told).encode()).hexdigest()
    stamp, made = header.with_suffix(".sha256"), header.with_suffix(".h.gch")
    if not (made.exists() and stamp.exists() and stamp.read_text() == made_with):
        stamp.unlink(missing_ok=True)
        made.unlink(missing_ok=True)
        header.write_text(text)
        command = [*command, "-x", "c++-header", str(header), "-o", str(made)]
        if subprocess.run(command, capture_output=True).returncode:
            return []
        stamp.write_text(made_with)
    return ["-include", str(header)]


def remove(folder):
    """Half a gigabyte, which is of use only where files are compiled again and again."""
    Path(folder, HEADER).with_suffix(".h.gch").unlink(missing_ok=True)
