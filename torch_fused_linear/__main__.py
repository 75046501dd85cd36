"""`python -m torch_fused_linear`: the commands that there are."""

from torch_fused_linear import __version__

COMMANDS = {
    "demo": "two networks, fused and plain, learn handwritten digits; leaves two pictures",
    "doctor": "what is installed, what was built, and whether it works",
    "bench": "time fused layers beside eager, torch.compile and the bare products",
}

if __name__ == "__main__":
    print(f"torch_fused_linear {__version__}\n")
    for name, about in COMMANDS.items():
        print(f"  python -m torch_fused_linear.{name:<7} {about}")
    print("\nEach says more with --help.")
