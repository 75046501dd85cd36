"""Searches shapes for our own products on Hopper GPUs: tile, cluster, epilogue's tile, schedule.

    python build_tools/tune_hopper.py --json FILE    on the GPU, with nvcc and CUTLASS
    python build_tools/tune_hopper.py --list         the names of the shapes

Every shape is compiled from csrc/cuda/hopper by itself (half a minute and 4 GiB of memory each,
``--jobs`` at a time), checked against fp64, and timed beside the bare product in rounds of random
order. What csrc/gemm/hopper.h and csrc/cuda/hopper/kernel.cuh hold is what this has found.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import itertools
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, where not installed

import parts
import toolkits
import torch
import torch.nn.functional as F

from benchmarks.machine import header
from benchmarks.results import write

ROOT = Path(__file__).resolve().parents[1]
ACTIVATIONS = {
    "relu": F.relu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "gelu_erf": F.gelu,
}
ORDERS = ((0, 1), (1, 1), (2, 1), (2, 4), (2, 8))  # CUTLASS's raster order and swizzle
PROBLEMS = ((8192, 768, 3072), (8192, 1024, 4096), (65536, 1024, 4096), (8192, 4096, 16384))
ROUNDS, CALLS = 5, 6


@dataclass(frozen=True)
class Shapes:
    """A kernel's shapes; features come first."""

    tile: tuple[int, int]
    cluster: tuple[int, int] = (2, 1)
    epilogue: tuple[int, int] = (64, 64)
    pingpong: bool = True

    @property
    def name(self) -> str:
        words = ("pingpong" if self.pingpong else "cooperative", self.tile, self.cluster)
        return "_".join("x".join(map(str, w)) if w is not words[0] else w for w in words) + (
            "_epilogue_" + "x".join(map(str, self.epilogue))
        )


SHAPES = (
    *(Shapes((128, 128), epilogue=(64, n)) for n in (32, 64, 128)),
    *(Shapes((128, 128), cluster) for cluster in ((1, 1), (1, 2))),
    *(Shapes((128, 192), epilogue=(64, n)) for n in (64, 96)),
    Shapes((192, 128)),
    Shapes((64, 256), epilogue=(64, 32)),
    *(Shapes((256, 128), epilogue=(128, n), pingpong=False) for n in (32, 64)),
    *(Shapes((128, 256), cluster, (128, 64), False) for cluster in ((2, 1), (1, 2))),
    *(Shapes((256, 192), cluster, (128, 32), False) for cluster in ((2, 1), (1, 2))),
)

SOURCE = """
#define FUSED_HOPPER_SHAPES
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/dispatch_policy.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>
namespace fused::cuda::hopper {{
using Tile = cute::Shape<cute::Int<{tile[0]}>, cute::Int<{tile[1]}>, cute::_64>;
using Cluster = cute::Shape<cute::Int<{cluster[0]}>, cute::Int<{cluster[1]}>, cute::_1>;
using EpilogueTile = cute::Shape<cute::Int<{epilogue[0]}>, cute::Int<{epilogue[1]}>>;
using Schedule = cutlass::gemm::KernelTmaWarpSpecialized{schedule};
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized{cooperative};
}}
#include "cuda/hopper/backward.cuh"
#include "cuda/hopper/forward.cuh"
extern "C" int run(bool forward, int m, int n, int k, void* a, void* b, void* d, void* aux,
                   void* bias, float* partials, int along, int swizzle, int processors,
                   void* stream) {{
  using namespace fused;
  using namespace fused::cuda::hopper;
  const gemm::hopper::Order order{{gemm::hopper::Order::Along(along), swizzle}};
  const Product product{{m, n, k, a, b, d, forward ? k : m, k, m, aux, m, bias, partials, order,
                        processors, static_cast<cudaStream_t>(stream)}};
  constexpr auto type = gemm::Type::bf16;
  return forward ? Forward<type, Activation::{activation}, true, {keeps}>::run(product)
                 : Backward<type, Activation::{activation}, false>::run(product);
}}
"""


def build(shapes: Shapes, activation: str, folder: Path) -> Path:
    source = folder / f"{shapes.name}_{activation}.cu"
    source.write_text(
        SOURCE.format(
            **asdict(shapes),
            schedule="Pingpong" if shapes.pingpong else "Cooperative",
            cooperative="" if shapes.pingpong else "Cooperative",
            activation=activation,
            keeps="false" if activation == "relu" else "true",
        )
    )
    command = [shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "-shared", "-cudart", "shared"]
    command += ["-std=c++20", "--expt-relaxed-constexpr", *parts.HOPPER_FLAGS]
    command += ["-Xcompiler", "-fPIC", f"-I{ROOT / 'csrc'}"]
    command += parts.as_system([toolkits.cutlass_headers()])
    command += [str(source), "-o", str(source.with_suffix(".so"))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{source.stem} does not compile: {done.stderr[-400:]}", file=sys.stderr)
    return source.with_suffix(".so")


class Kernel:
    """A compiled shape, for one activation."""

    def __init__(self, shapes: Shapes, library: Path) -> None:
        self.shapes, self.function = shapes, ctypes.CDLL(str(library)).run
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.function.argtypes = [ctypes.c_bool, *[number] * 3, *[pointer] * 6, *[number] * 3]
        self.function.argtypes.append(pointer)
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count

    def __call__(self, p: Problem, forward: bool, order: tuple[int, int]) -> bool:
        given = (p.first, p.x, p.y, p.z, p.bias, None)
        if not forward:
            given = (p.second, p.grad, p.dz, p.saved, None, p.partials)
        tokens, width, hidden = p.sizes
        pointers = [None if t is None else t.data_ptr() for t in given]
        stream = torch.cuda.current_stream().cuda_stream
        sizes = (hidden, tokens, width)
        return self.function(forward, *sizes, *pointers, *order, self.processors, stream) == 0


class Problem:
    """A layer, width to hidden, and the gradient that the next, hidden to width, gives it."""

    def __init__(self, sizes: tuple[int, int, int], activation: str) -> None:
        tokens, width, hidden = self.sizes = sizes

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.x, self.grad = draw(tokens, width), draw(tokens, width)
        self.first, self.second = draw(hidden, width) / width**0.5, draw(width, hidden)
        self.second /= width**0.5
        self.bias, self.saved = draw(hidden), draw(tokens, hidden)
        if activation == "relu":
            self.saved.relu_()
        self.y, self.z, self.dz = (torch.empty_like(self.saved) for _ in range(3))
        # A row for each tile of tokens, of 64 at least, as wide as whole tiles of features.
        self.partials = torch.empty((tokens + 63) // 64 * (hidden + 256), device="cuda")

    def largest_error(self, activation: str) -> float:
        """The errors of the results that are there, relative to their size."""
        z = F.linear(self.x.double(), self.first.double(), self.bias.double())
        at = self.saved.double().requires_grad_()
        (slope,) = torch.autograd.grad(ACTIVATIONS[activation](at).sum(), at)
        pairs = [(self.y, ACTIVATIONS[activation](z))]
        pairs.append((self.dz, self.grad.double() @ self.second.double() * slope))
        return max(
            float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())
            for got, want in pairs
        )


def microseconds(call) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / CALLS


def medians(calls: dict) -> dict:
    """Times rounds in which each has its turn, in random order."""
    times = {key: [] for key in calls}
    for _ in range(ROUNDS):
        for key in random.sample(list(calls), len(calls)):
            times[key].append(microseconds(calls[key]))
    return {key: sorted(values)[ROUNDS // 2] for key, values in times.items()}


def search(kernels: list[Kernel], activation: str, sizes: tuple[int, int, int]) -> list[dict]:
    problem = Problem(sizes, activation)
    calls = {("mm", None, None): lambda: torch.mm(problem.grad, problem.second, out=problem.dz)}
    for kernel, order in itertools.product(kernels, ORDERS):
        for forward in (True, False):
            if kernel(problem, forward, order):
                key = (kernel.shapes, order, forward)
                calls[key] = lambda k=kernel, f=forward, o=order: k(problem, f, o)
    rows = []
    for (shapes, order, forward), time in medians(calls).items():
        case = {"suite": "hopper", "sizes": sizes[1:], "tokens": sizes[0], "dtype": "bf16"}
        case |= {"activation": activation, "mode": "bare"}
        if shapes != "mm":
            case |= {"mode": "forward" if forward else "backward", "order": order}
            case |= {"shapes": asdict(shapes)}
        name = "ours" if shapes != "mm" else "mm"
        rows.append({"case": case, "unit": "us", "numbers": {name: {"median": round(time, 1)}}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--jobs", type=int, default=8, help="compilers at once; default: 8")
    parser.add_argument("--activations", nargs="+", default=list(ACTIVATIONS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the shapes and stop")
    options = parser.parse_args()
    if options.list:
        print(*(shapes.name for shapes in SHAPES), sep="\n")
        return
    if toolkits.cutlass_headers() is None:
        sys.exit(f"CUTLASS is missing: pip install --no-deps {toolkits.CUTLASS}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for activation in options.activations:
            with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
                made = pool.map(build, SHAPES, repeat(activation), repeat(Path(folder)))
                kernels = [Kernel(s, path) for s, path in zip(SHAPES, made) if path.exists()]
            small = Problem((1003, 520, 1032), activation)
            for kernel in kernels:
                assert kernel(small, True, ORDERS[0]) and kernel(small, False, ORDERS[0])
                error = small.largest_error(activation)
                assert error < 5e-3, f"{kernel.shapes.name}: wrong by {error:.1e}"
            for sizes in PROBLEMS:
                results += search(kernels, activation, sizes)
                print(activation, sizes, *results[-3:], sep="\n", flush=True)
            if options.json:
                write(options.json, header(torch.device("cuda"), sys.argv[1:]), results)


if __name__ == "__main__":
    main()
