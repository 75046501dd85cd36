"""FP8 on a GPU: how near the casts come to a copy's bandwidth, and a block's step made of them.

    python -m benchmarks.float8_steps [passes] [steps] [--tokens 8192] [--json FILE]

Each cast is two kernels; `GB/s` counts what both must read and write, `of copy` compares with a
copy of as many bytes. Inputs alternate, so that none is in the cache from the call before. Steps
are timed beside torchao's `tensorwise` recipe under torch.compile where torchao is installed: in
CUDA graphs in turns, and as the sum of their kernels.
"""

import argparse
import itertools
import json
import statistics

import torch
import torch.nn.functional as F
from torch import nn

import torch_fused_linear as tfl  # loads the operators

ops = torch.ops.fused
GELU, SILU, RELU = 2, 4, 1
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
    """(name, the call on a tuple of tensors, tensors read, results)"""
    yield "x to e4m3", lambda x: ops._float8_cast(x, False, False), 1, 1
    yield "dy to e5m2, sums", lambda x: ops._float8_cast(x, True, True), 1, 1
    yield "gelu_tanh", lambda z: ops._float8_activation(z, GELU), 1, 1
    yield "gelu_erf", lambda z: ops._float8_activation(z, 3), 1, 1
    yield (
        "gelu_tanh backward",
        lambda g, z: ops._float8_activation_backward(g, z, GELU, True),
        2,
        1,
    )
    yield "silu gating", lambda g, u: ops._float8_gating(g, u, SILU), 2, 1
    yield (
        "silu gating backward",
        lambda d, g, u: ops._float8_gating_backward(d, g, u, SILU, False, True),
        3,
        2,
    )


def passes_table(tokens, rows):
    print(f"{'pass':22}{'size':>14}{'us':>8}{'GB/s':>8}{'of copy':>9}{'maximum':>9}{'cast':>8}")
    for features in (1024, 4096, 16384):
        size = tokens * features
        sets = max(2, -(-(2**28) // (size * 2)))
        for name, run, read, results in passes():
            operands = [[random(tokens, features) for _ in range(read)] for _ in range(sets)]
            turn = itertools.cycle(operands)
            graph = captured(lambda run=run, turn=turn: run(*next(turn)), 2 * sets)
            moved = size * (2 * 2 * read + 2 * results)
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


# --- steps ----------------------------------------------------------------------------------------


class Cast:
    def __init__(self, rows, columns, inverse, *_):
        self.rows, self.columns, self.inverse = rows, columns, inverse


def forward(x, w, bias=None):
    return ops._float8_product(x.rows, w.rows, x.inverse, w.inverse, bias, None, BF16, True)


def input_gradient(dz, w, add=None):
    return ops._float8_product(dz.rows, w.columns, dz.inverse, w.inverse, None, add, BF16, False)


def weight_gradient(dz, x):
    return ops._float8_product(
        dz.columns, x.columns, dz.inverse, x.inverse, None, None, BF16, False
    )


def cast(x):
    return Cast(*ops._float8_cast(x, False, False))


def mlp_step(x, dy, w1, b1, w2, b2):
    w1, w2, x = cast(w1), cast(w2), cast(x)
    z = forward(x, w1, b1)
    h = Cast(*ops._float8_activation(z, GELU))
    y = forward(h, w2, b2)
    *dy, db2 = ops._float8_cast(dy, True, True)
    dy = Cast(*dy)
    dh = input_gradient(dy, w2)
    *dz, db1 = ops._float8_activation_backward(dh, z, GELU, True)
    dz = Cast(*dz)
    return (
        y,
        input_gradient(dz, w1),
        weight_gradient(dz, x),
        db1,
        weight_gradient(dy, h),
        db2,
    )


def gated_step(x, dy, gate, up, down):
    gate, up, down, x = cast(gate), cast(up), cast(down), cast(x)
    zg, zu = forward(x, gate), forward(x, up)
    h = Cast(*ops._float8_gating(zg, zu, SILU))
    y = forward(h, down)
    dy = Cast(*ops._float8_cast(dy, True, False))
    dh = input_gradient(dy, down)
    both = ops._float8_gating_backward(dh, zg, zu, SILU, False, False)
    dg, du = Cast(*both[:3]), Cast(*both[4:7])
    dx = input_gradient(du, up, input_gradient(dg, gate))
    return y, dx, weight_gradient(dg, x), weight_gradient(du, x), weight_gradient(dy, h)


class Mlp(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(features, hidden), nn.Linear(hidden, features)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))

    def parts(self):
        return self.up.weight, self.up.bias, self.down.weight, self.down.bias


class Gated(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.gate = nn.Linear(features, hidden, bias=False)
        self.up = nn.Linear(features, hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def parts(self):
        return self.gate.weight, self.up.weight, self.down.weight


def step_of(call, module, x, dy):
    def step():
        for tensor in (x, *module.parameters()):
            tensor.grad = None
        y = call(x)
        y.backward(dy)
        return (y.detach(), x.grad, *(p.grad for p in module.parts()))

    return step


def torchaos(module):
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        return None
    return torch.compile(convert_to_float8_training(module))


def relative(got, wanted):
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def steps_table(tokens, rows):
    blocks = [(Mlp, 1024, 4096), (Mlp, 2048, 8192), (Mlp, 4096, 16384)]
    blocks += [(Gated, 2048, 5632), (Gated, 4096, 14336)]
    for kind, features, hidden in blocks:
        torch._dynamo.reset()
        module = kind(features, hidden).to("cuda", BF16)
        x, dy = random(tokens, features).requires_grad_(), random(tokens, features)
        ours = mlp_step if kind is Mlp else gated_step
        weights = [p.detach() for p in module.parts()]
        runs = {"ours": lambda o=ours, w=weights, x=x, dy=dy: o(x.detach(), dy, *w)}
        exact = step_of(module, module, x, dy)()
        other = torchaos(module)
        if other is not None:
            runs["torchao"] = step_of(other, module, x, dy)
        name = f"{kind.__name__} {features}->{hidden}"
        row = {"block": name, "tokens": tokens}
        graphs = {}
        for who, run in runs.items():
            errors = [relative(g, w) for g, w in zip(run(), exact, strict=True)]
            found = kernels(run)
            products = of(found, "nvjet", "cutlass", "gemm", "sm90_xmma")
            row[who] = {
                "errors": errors,
                "kernels_us": sum(found.values()),
                "products_us": products,
                "kernels": dict(sorted(found.items(), key=lambda item: -item[1])[:12]),
            }
            try:
                graphs[who] = captured(run, 4)
            except RuntimeError as failure:
                print(f"   {who} cannot be captured: {str(failure)[:100]}")
        for who, time in zip(graphs, in_turns(list(graphs.values()), 8), strict=True):
            row[who]["graph_us"] = time / 4
        rows.append(row)
        print(name)
        for who in runs:
            about = row[who]
            print(
                f"   {who:8} kernels {about['kernels_us']:7.0f} us (products "
                f"{about['products_us']:.0f}), in a graph {about.get('graph_us', 0):7.0f}; errors "
                + " ".join(f"{e:.4f}" for e in about["errors"]),
                flush=True,
            )
        del graphs, module, other, runs, exact


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", default=["passes", "steps"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.manual_seed(0)
    record = {"torch": torch.__version__, "version": tfl.__version__, "passes": [], "steps": []}
    try:
        if "passes" in args.what:
            passes_table(args.tokens, record["passes"])
        if "steps" in args.what:
            steps_table(args.tokens, record["steps"])
    finally:
        if args.json:
            with open(args.json, "w") as file:
                json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
