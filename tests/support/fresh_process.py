"""Programs that load an exported model in a fresh process."""

import sys

from processes import run

import torch_fused_linear as tfl

LIBRARY = tfl.library_path()


def python(program, *args, **variables):
    """Runs it in a fresh process, which finds the package only if the program says where it is."""
    program = f"import sys, torch\n{program}"
    return run(sys.executable, "-c", program, *map(str, args), **variables)


LOAD_EXPORTED = "model = torch.export.load(sys.argv[1]).module()"

LOAD_PACKAGE = "model = torch._inductor.aoti_load_package(sys.argv[1])"

RUN = """
for x, y in torch.load(sys.argv[2]):
    torch.testing.assert_close(model(x), y)
assert "torch_fused_linear" not in sys.modules
print("equal")
"""

LOAD_LIBRARY = f"torch.ops.load_library({LIBRARY!r})"

# The end of a program with a backward on a GPU: autograd's thread may still let go of tensors, and
# where the interpreter is gone by then it ends the process, in plain torch, too.
LET_GO = """
import time
time.sleep(0.2)
"""
