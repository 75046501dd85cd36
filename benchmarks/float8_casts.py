"""How near the casts to FP8 come to a copy's bandwidth, on a GPU.

    python -m benchmarks.float8_casts [--tokens 8192] [--json FILE]

Each cast is two kernels; `GB/s` counts what both must read and write, `of copy` compares with a
copy of as many bytes. Inputs alternate, so that none is in the cache from the call before.
"""

import argparse
import itertools
import json
import statistics

import torch

import torch_fused_linear as tfl  # loads the operators

ops = torch.ops.fused
GELU, SILU = 2, 4
BF16 = torch.bfloat16


def random(*size, scale=1.0):
    return torch.randn(*size, device="cuda", dtype=BF16).mul_(scale)


# --- timing ---------------------------------------------------------------------------------------


def captured(run, calls):
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph


def microseconds(graph):
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def in_turns(graphs, rounds):
    """The median of each graph's times."""
    times = [[microseconds(graph) for graph in graphs] for _ in range(rounds)][1:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def kernels(run, calls=5):
    """Microseconds of each kernel's name, a call."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as report:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    found = {}
    for event in report.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name] = found.get(event.name, 0) + event.device_time / calls
    return found


def of(found, *parts):
    return sum(time for name, time in found.items() if any(part in name for part in parts))


# --- passes ---------------------------------------------------------------------------------------


def passes():
    """(name, the call on a tuple of tensors, tensors read, FP8 copies written), as in training:
    an activation's cast is by rows, and the backward writes its columns."""
    scale = torch.ones((), device="cuda")
    yield "x to e4m3", lambda x: ops._float8_cast(x, False, False), 1, 2
    yield "dy to e5m2, sums", lambda x: ops._float8_cast(x, True, True), 1, 2
    yield "gelu_tanh", lambda z: ops._float8_activation(z, GELU, False), 1, 1
    yield "gelu_erf", lambda z: ops._float8_activation(z, 3, False), 1, 1
    yield (
        "gelu_tanh backward",
        lambda g, z: ops._float8_activation_backward(g, z, GELU, True, scale),
        2,
        3,
    )
    yield "silu gating", lambda g, u: ops._float8_gating(g, u, SILU, False), 2, 1
    yield (
        "silu gating backward",
        lambda d, g, u: ops._float8_gating_backward(d, g, u, SILU, False, True, scale),
        3,
        5,
    )


def passes_table(tokens, rows):
    print(f"{'pass':22}{'size':>14}{'us':>8}{'GB/s':>8}{'of copy':>9}{'maximum':>9}{'cast':>8}")
    for features in (1024, 4096, 16384):
        size = tokens * features
        sets = max(2, -(-(2**28) // (size * 2)))
        for name, run, read, copies in passes():
            operands = [[random(tokens, features) for _ in range(read)] for _ in range(sets)]
            turn = itertools.cycle(operands)
            graph = captured(lambda run=run, turn=turn: run(*next(turn)), 2 * sets)
            moved = size * (2 * 2 * read + copies)
            sources = itertools.cycle(
                [torch.empty(moved // 2, device="cuda", dtype=torch.uint8) for _ in range(2)]
            )
            target = torch.empty(moved // 2, device="cuda", dtype=torch.uint8)
            copy = captured(lambda t=target, s=sources: t.copy_(next(s)), 4)
            ours, theirs = in_turns([graph, copy], 8)
            ours, theirs = ours / (2 * sets), theirs / 4
            found = kernels(lambda run=run, turn=turn: run(*next(turn)))
            parts = of(found, "maximum_kernel"), of(found, "cast_kernel")
            row = {"pass": name, "features": features, "us": ours, "copy_us": theirs}
            row |= {"maximum_us": parts[0], "cast_us": parts[1], "bytes": moved}
            rows.append(row)
            print(
                f"{name:22}{f'{tokens}x{features}':>14}{ours:8.1f}{moved / ours / 1e3:8.0f}"
                f"{theirs / ours:9.2f}{parts[0]:9.1f}{parts[1]:8.1f}",
                flush=True,
            )
            del graph, copy, operands, turn, target, sources


# --- the command ----------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json")
    given = parser.parse_args()
    torch.manual_seed(0)
    record = {"torch": torch.__version__, "version": tfl.__version__, "passes": []}
    try:
        passes_table(given.tokens, record["passes"])
    finally:
        if given.json:
            with open(given.json, "w") as file:
                json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
