"""Times a first pass over many sizes, in which plans are made, beside eager's first pass.

    python benchmarks/cold_start.py [--json FILE]

Three programs, each contender in a fresh process with CUDA and cuBLAS set up: training a block
1024→4096→1024 with GELU (tanh) on 300 random lengths of 256 to 8192 tokens in bf16, the same in
fp32 with 60, and inference on 500 random batches of 1 to 512 in bf16. A second pass over the same
sizes follows. Needs a GPU.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, where not installed

PROGRAMS = {
    "training, bf16": ("bfloat16", 300, (256, 8192), True),
    "training, fp32": ("float32", 60, (256, 8192), True),
    "inference, bf16": ("bfloat16", 500, (1, 512), False),
}


def run(program, contender):
    """Seconds of the first pass and of the second."""
    import torch
    from torch import nn

    import torch_fused_linear as tfl

    name, count, (low, high), trains = PROGRAMS[program]
    dtype = getattr(torch, name)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU("tanh"), nn.Linear(4096, 1024))
    model = model.to("cuda", dtype)
    if contender == "fused":
        tfl.fuse_(model)
    draw = random.Random(0)
    lengths = [draw.randint(low, high) for _ in range(count)]
    x = torch.randn(high, 1024, device="cuda", dtype=dtype)
    for width in (8, 16):  # CUDA, cuBLAS and the autograd thread are there
        small = torch.randn(width, width, device="cuda", dtype=dtype, requires_grad=True)
        nn.functional.linear(small, small).sum().backward()

    def one_pass():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for length in lengths:
            if trains:
                model.zero_grad()
                model(x[:length]).backward(x[:length])
            else:
                with torch.no_grad():
                    model(x[:length])
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    return [one_pass(), one_pass()]


def in_own_process(program, contender):
    command = [sys.executable, __file__, "--one", program, contender]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def result(program, mode, rounds):
    """As the benchmark suite's files have them."""
    from torch_fused_linear.timing import Number

    samples = {name: [r[name] for r in rounds] for name in ("ours", "eager")}
    numbers = {name: asdict(Number.over(seconds, calls=1)) for name, seconds in samples.items()}
    case = {"suite": "cold-start", "program": program, "mode": mode}
    return {"case": case, "unit": "s", "numbers": numbers}


def describe(result):
    case, ours, eager = result["case"], *(result["numbers"][n] for n in ("ours", "eager"))
    times = eager["median"] / ours["median"]
    return (
        f"{case['program']}, {case['mode']}: ours {ours['median']:.3f} s, "
        f"eager {eager['median']:.3f} s, {times:.2f} times"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="a file for the numbers")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each; default: 3")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(run(*arguments.one)))
        return
    import torch

    from benchmarks import machine
    from benchmarks.results import write

    results = []
    for program in PROGRAMS:
        rounds = [
            {"eager": in_own_process(program, "eager"), "ours": in_own_process(program, "fused")}
            for _ in range(arguments.repeats)
        ]
        for index, mode in enumerate(("first pass", "second pass")):
            results.append(result(program, mode, [{n: r[n][index] for n in r} for r in rounds]))
            print(describe(results[-1]), flush=True)
        if arguments.json:
            header = machine.header(torch.device("cuda"), sys.argv[1:])
            write(Path(arguments.json), header, results)


if __name__ == "__main__":
    main()
