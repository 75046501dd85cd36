"""The graph pass: a small transformer, before and after.

Nobody wants to rewrite a model for the sake of its linear layers. There are two ways around it:

`fuse_(model)` changes a model in place. It reads the code of the modules for linear layers whose
output goes straight to a ReLU or GELU, and makes one call of such an expression. Layers, names and
results stay. What it leaves alone, its report gives the reason for. `unfuse_` takes it all back.

`compile_options()`, for `torch.compile`, changes the graph that the compiler has captured, so that
it does not matter how the model is written: `F.linear`, a function called on a matrix product, a
GELU spelled out by hand. Layers in a chain become one operator, `fused::mlp`, whose compiled
backward has each hidden layer's activation gradient in the next one's step. `compile_backend` is
the same pass in front of any other backend; here it stands in front of one that only counts, so
that the graph can be looked at before and after without a compiler.

The model below has both kinds of code, and both ways find both: `Block` calls modules, `Head` calls
functions.

    python examples/graph_pass.py               the pass, with the graphs counted
    python examples/graph_pass.py --inductor    and compiled for real: takes a minute on a CPU
"""

from __future__ import annotations

import copy
import signal
import time
from argparse import ArgumentDefaultsHelpFormatter as WithDefaults
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_linear import compile_backend, compile_options, explain, fuse_, unfuse_


class Block(nn.Module):
    """Attention and a feed-forward part, each around a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = nn.GELU()

    def attend(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.projection(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))  # what fuse_ reads


class Head(nn.Module):
    """The model with a function for the activation."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.hidden(x.mean(1))))


def transformer(width: int = 64, heads: int = 4, blocks: int = 3, classes: int = 10) -> nn.Module:
    layers = [Block(width, heads) for _ in range(blocks)]
    return nn.Sequential(*layers, Head(width, classes))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and every parameter's gradient."""
    output = model(x)
    return [output.detach(), *torch.autograd.grad(output.square().mean(), list(model.parameters()))]


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, as a part of the largest element."""
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True)
    )


def count_fused(model: nn.Module, x: Tensor) -> int:
    """How many fused operators its forward calls."""
    with torch.no_grad(), explain() as report:
        model(x)
    return len(report.calls)


def capture(model: nn.Module, x: Tensor, with_pass: bool) -> tuple[Counter, Counter]:
    """The operators of the captured graph, and what the pass put in."""
    seen: Counter[str] = Counter()

    def count(graph: torch.fx.GraphModule, example_inputs):
        for node in graph.graph.nodes:
            if node.op in ("call_function", "call_method"):
                seen[getattr(node.target, "__name__", str(node.target))] += 1
        return graph.forward

    torch.compiler.reset()  # the same model is captured twice
    backend = compile_backend(count) if with_pass else count
    torch.compile(model, backend=backend, fullgraph=True)(x)
    return seen, backend.replaced if with_pass else Counter()


def compiled(model: nn.Module, x: Tensor) -> dict:
    """Compiles with Inductor and the pass, as in a real program."""
    options = compile_options()
    torch.compiler.reset()
    begin = time.perf_counter()
    model = torch.compile(copy.deepcopy(model), options=options)
    results = gradients(model, x)
    replaced = options["pre_grad_custom_pass"].replaced
    print(f"\nInductor: {time.perf_counter() - begin:.0f} s to compile, put in: {dict(replaced)}")
    return {"results": results, "replaced": dict(replaced)}


def draw(path: Path, before: Counter, after: Counter) -> None:
    """How often each operator of interest stands in the graph; the rest stays as it is."""
    from matplotlib.figure import Figure

    names = [name for name in {**before, **after} if before[name] != after[name]]
    shown = {"mlp.default": "fused::mlp\n(linear, activation,\nlinear in one)"}
    figure = Figure(figsize=(9, 0.8 * len(names) + 1.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    drawn = ((before, "before the pass", "#e69f00"), (after, "after the pass", "#0072b2"))
    for offset, (counts, label, colour) in enumerate(drawn):
        at = [k + 0.38 * offset for k in range(len(names))]
        bars = axes.barh(at, [counts[name] for name in names], 0.36, color=colour, label=label)
        axes.bar_label(bars, padding=3, fontsize=9)
    axes.set_yticks([k + 0.19 for k in range(len(names))], [shown.get(n, n) for n in names])
    axes.invert_yaxis()
    axes.set(title="A small transformer in torch.compile: operators that our pass exchanges")
    axes.set(xlabel="how often the graph of the forward has it")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> dict:
    """Runs the example; -> its numbers."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=WithDefaults)
    add = parser.add_argument
    add("--out", type=Path, default=Path("example_pictures"), help="folder for the pictures")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--inductor", action="store_true", help="compile for real as well")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = transformer().to(given.device)
    x = torch.randn(8, 16, 64, device=given.device)
    plain = gradients(model, x)

    # Before it is captured: with the graph's pass on the untouched model ...
    before, _ = capture(model, x, with_pass=False)
    after, replaced = capture(model, x, with_pass=True)
    print(f"operators in the graph: {before.total()} as captured, {after.total()} after the pass")
    print(f"put in by compile_backend: {dict(replaced)}")

    # ... and then in place.
    report = fuse_(model)
    print(f"\nfuse_: {report}")
    fused = gradients(model, x)
    numbers = {
        "fused": {block.layers: block.after for block in report.fused},
        "skipped": {skipped.path: skipped.reason for skipped in report.skipped},
        "apart": apart(fused, plain),
        "before": before,
        "after": after,
        "replaced": dict(replaced),
    }
    print(f"\noutput and gradients differ by {numbers['apart']:.1e} at most")
    pictures = [given.out / "graph_pass_fuse.png", given.out / "graph_pass_graph.png"]
    report.save_picture(pictures[0])
    draw(pictures[1], before, after)

    layers = numbers["fused calls"] = {"fuse_": count_fused(model, x)}
    unfuse_(model)
    layers["unfuse_"] = count_fused(model, x)
    print(f"\nfused calls of the model: {layers['fuse_']}, after unfuse_ {layers['unfuse_']}")
    numbers["apart after unfuse_"] = apart(gradients(model, x), plain)
    if given.inductor:
        found = compiled(model, x)
        numbers["inductor"] = {**found, "apart": apart(found["results"], plain)}
        print(f"output and gradients differ by {numbers['inductor']['apart']:.1e} at most")
    print(*pictures, sep="\n")
    return numbers


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    main()
