"""`python -m torch_fused_linear`: the commands that there are."""

import sys

from torch_fused_linear import __version__

if __name__ == "__main__":
    print(f"torch_fused_linear {__version__}\n")
    print("  python -m torch_fused_linear.doctor  what is installed, what was built, does it work")
    print("  python -m torch_fused_linear.gain    what fusing would bring a model of yours")
    print("\nThey say more with --help.")
    sys.exit(0 if sys.argv[1:] in ([], ["-h"], ["--help"]) else 2)
