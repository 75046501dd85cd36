"""Inference, fused and unfused: what RELU_BIAS saves, and what it does not.

A linear layer with its ReLU is three operations: a matrix product, the addition of the bias, the
ReLU. PyTorch's own `nn.Linear` joins the first two, so that eager mode has two operators left:

    z = torch.addmm(b, x, w.T)    writes z, [tokens, out]
    y = torch.relu(z)             reads z, writes y

What a fused layer saves is the way of z to memory and back. On a GPU the product keeps its results
in registers; the epilogue RELU_BIAS adds the bias and applies the ReLU there, and y is written
once. So it saves

- memory: one tensor of [tokens, out] instead of two at the layer's peak,
- traffic: one write instead of two writes and a read,
- a launch: one kernel instead of two,

and it does not save a single multiplication. The fewer of those there are for each number written,
that is the smaller the inner size, the more fusing gains; a product with a large inner size takes
so long that the pass over its output hardly shows. Nor does it save weights, or anything at all
where no product follows: the last layer of a classifier has no activation to fuse.

In training the balance is another: the backward needs what ReLU did. Eager keeps y for it, and so
does the fused layer, so that both keep the same (the next layer keeps y anyway).

    python examples/inference.py
"""

from __future__ import annotations

import signal
from argparse import ArgumentDefaultsHelpFormatter as WithDefaults
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from torch_fused_linear import FusedLinearReLU, explain
from torch_fused_linear.timing import Contender, clock_for, measure

# [in, out]: the same output, written from more and more multiplications.
SHAPES = [(16, 256), (64, 256), (256, 256), (1024, 256)]


class Results(TorchDispatchMode):
    """Counts the operators that make new tensors, and the bytes of these."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # A view, such as the transposed weight, is no new memory.
        if not function.is_view:
            self.operators.append(function.name())
            self.bytes += result.untyped_storage().nbytes()
        return result


def make_layers(size_in: int, size_out: int, device: str) -> dict[str, nn.Module]:
    """A layer unfused and fused; from_linear shares the parameters."""
    linear = nn.Linear(size_in, size_out, device=device)
    unfused = nn.Sequential(linear, nn.ReLU()).eval()
    return {"unfused": unfused, "fused": FusedLinearReLU.from_linear(linear).eval()}


def what_is_written(layers: dict[str, nn.Module], x: Tensor) -> dict[str, Results]:
    """Operators and bytes of one call of each."""
    counted = {}
    with torch.no_grad():
        for name, layer in layers.items():
            with Results() as results:
                layer(x)
            counted[name] = results
            operators = " + ".join(results.operators)
            print(f"{name:>8}: {results.bytes / x.shape[0]:6.0f} bytes a token by {operators}")
    return counted


def what_is_kept(layers: dict[str, nn.Module], x: Tensor) -> dict[str, dict[str, int]]:
    """Bytes that a call keeps for a backward, beside input and parameters."""
    kept: dict[str, dict[str, int]] = {}
    for mode, wanted in (("inference", torch.no_grad), ("training", torch.enable_grad)):
        for name, layer in layers.items():
            known = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
            storages: dict[int, int] = {}

            def pack(tensor: Tensor, known=known, storages=storages) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in known:
                    storages[storage.data_ptr()] = storage.nbytes()
                return tensor

            with wanted(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                y = layer(x)
            kept.setdefault(mode, {})[name] = sum(storages.values())
            del y
        print(f"{mode:>10}: " + ", ".join(f"{n} {b / 1024:.0f} KiB" for n, b in kept[mode].items()))
    return kept


def peak(call: Callable[[], object]) -> int:
    """The most memory that a call had beyond what was there (GPU only, where it can be asked)."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before


def time_shapes(tokens: int, device: str, seconds: float) -> dict[tuple[int, int], dict]:
    """Microseconds per call for each shape, interleaved: drifting clocks hit both alike."""
    times = {}
    for shape in tqdm(SHAPES, "timing", leave=False, disable=None):
        x = torch.randn(tokens, shape[0], device=device)
        contenders = [
            Contender(name, lambda layer=layer, x=x: layer(x), torch.no_grad)
            for name, layer in make_layers(*shape, device).items()
        ]
        numbers, _ = measure(contenders, clock_for(x.device), seconds)
        times[shape] = {name: number.median for name, number in numbers.items()}
        ratio = times[shape]["unfused"] / times[shape]["fused"]
        spoken = ", ".join(f"{name} {time:7.1f} us" for name, time in times[shape].items())
        tqdm.write(f"{shape[0]:5} → {shape[1]}: {spoken}, {ratio:.2f} times the speed")
    return times


def draw(path: Path, sizes: dict[str, float], times: dict[tuple[int, int], dict]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=130, layout="constrained")
    written, *timed = figure.subplots(1, 2 if times else 1, squeeze=False).flat
    colours = {"unfused": "#e69f00", "fused": "#0072b2"}
    bars = written.bar(list(sizes), list(sizes.values()), color=list(colours.values()))
    written.bar_label(bars, [f"{size:.0f}" for size in sizes.values()])
    written.set(title="New tensors, 64 → 256, fp32", ylabel="bytes for each token")
    for axes in timed:
        for offset, (name, colour) in enumerate(colours.items()):
            at = [k + 0.38 * offset for k in range(len(times))]
            heights = [time[name] / time["unfused"] for time in times.values()]
            bars = axes.bar(at, heights, 0.36, color=colour, label=name)
            axes.bar_label(bars, [f"{time[name]:.0f} µs" for time in times.values()], fontsize=7)
        axes.set_xticks([k + 0.19 for k in range(len(times))], [f"{i} → {o}" for i, o in times])
        axes.set(title="Linear and ReLU, fp32", ylabel="time of a call, unfused = 1")
        axes.set(xlabel="inputs → outputs")
        axes.margins(y=0.3)
        axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> dict:
    """Runs the example; -> its numbers."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=WithDefaults)
    add = parser.add_argument
    add("--out", type=Path, default=Path("example_pictures"), help="folder for the picture")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--tokens", type=int, help="rows of the input")
    add("--seconds", type=float, default=0.5, help="of measuring, for each shape")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    tokens = given.tokens or (65536 if given.device != "cpu" else 4096)
    torch.manual_seed(0)

    layers = make_layers(64, 256, given.device)
    x = torch.randn(tokens, 64, device=given.device)
    with torch.no_grad(), explain() as report:
        apart = float((layers["fused"](x) - layers["unfused"](x)).abs().max())
    print(f"what the fused layer ran, its result at most {apart:.1e} from the unfused one's:")
    print(report)

    print("\nnew tensors in one call, seen from Python:")
    written = what_is_written(layers, x)
    print("\nkept for a backward:")
    kept = what_is_kept(layers, x)
    if x.is_cuda:
        with torch.no_grad():
            peaks = {n: peak(lambda layer=layer: layer(x)) for n, layer in layers.items()}
        print("\npeak memory: " + ", ".join(f"{n} {b / 2**20:.0f} MiB" for n, b in peaks.items()))
    times = {}
    if x.is_cuda:
        times = time_shapes(tokens, given.device, given.seconds)
    else:
        print("\nA CPU has no RELU_BIAS, and takes as long as unfused: no time is measured here.")
    path = given.out / "inference.png"
    sizes = {name: results.bytes for name, results in written.items()}
    draw(path, {name: size / tokens for name, size in sizes.items()}, times)
    print(path)
    operators = {name: results.operators for name, results in written.items()}
    return {"apart": apart, "operators": operators, "bytes": sizes, "kept": kept, "times": times}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    main()
