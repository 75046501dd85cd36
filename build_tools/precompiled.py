"""torch's headers, read once for all files of a build (GCC's precompiled headers).

Half of the time that a file takes is theirs. GCC passes over a header that was made with other
flags, so that at worst nothing is gained.
"""

from compiling import Unit, version_of

# Headers that most of csrc includes.
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
SECONDS = 20


def unit(command, folder, with_cuda, jobs):
    """Returns the unit that makes the header for files of these flags; None where it does not pay,
    or the compiler is none that can.

    Args:
        command: the compiler and the flags that all files are compiled with.
        folder: where the header is put.
        with_cuda: whether the files include CUDA's headers.
        jobs: how many compilers run at once.
    """
    if jobs > MOST_JOBS or "Free Software Foundation" not in version_of(command[0]):
        return None
    header = folder / "precompiled.h"
    folder.mkdir(parents=True, exist_ok=True)
    names = HEADERS + CUDA_HEADERS * with_cuda
    header.write_text("".join(f"#include <{name}>\n" for name in names))
    return Unit(header, folder / "precompiled.h.gch", (*command, "-x", "c++-header"), SECONDS)
