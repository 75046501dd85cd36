"""A small LLaMA that learns Python's documentation: as it is, and after `fuse_`.

Most of such a model's work is its feed-forward block, a gated one:

    h = silu(gate(x)) * up(x)        two layers of one input, one of them with SiLU
    y = down(h)                      a third after their product

Eager PyTorch runs five operators for it, three products and two passes over memory, and keeps four
tensors of the hidden size for the backward: what gate and up return, what SiLU returns, and h.
`fuse_` makes one call of the expression, `fused::gated_mlp`: the two passes become one, and two
tensors are kept, those that gate and up return. What the backward needs beside them it computes
again, in the one pass over memory that it makes anyway.

The model below is written as such models are: root mean square norms, rotary positions, no biases.
One copy of it goes through `fuse_`, and both learn the same batches, bytes of the texts that
Python's `help("topics")` shows, which every Python has. So their losses have to be the same but for
rounding. What a forward keeps is counted, and on a GPU a step of each is timed, in turns.

With a model as small as the default, most of a step is spent elsewhere. Sizes of real models, for a
GPU: `--width 1024 --hidden 2816 --layers 8 --context 512 --batch 16`.

    python examples/llama.py
"""

from __future__ import annotations

import copy
import pydoc_data.topics
import signal
from argparse import ArgumentDefaultsHelpFormatter as WithDefaults
from argparse import ArgumentParser
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from torch_fused_linear import explain, fuse_
from torch_fused_linear.timing import Contender, clock_for, measure

COLOURS = {"plain": "#e69f00", "fused": "#0072b2"}


class Block(nn.Module):
    """Attention and the gated block, each around a residual connection."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def attend(self, x: Tensor, turns: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = rotate(parts[0], turns), rotate(parts[1], turns), parts[2]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed.transpose(1, 2).flatten(2))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # what fuse_ reads

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), turns)
        return x + self.feed_forward(self.norm2(x))


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: pairs of features are turned by an angle that grows with the position."""
    a, b = x.chunk(2, -1)
    cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Llama(nn.Module):
    """A model of bytes: 256 words, of which each position predicts the next."""

    def __init__(self, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.size = max(width // 64, 2), width
        self.words = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, hidden, self.size[0]) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """The loss."""
        inputs, targets = text[:, :-1], text[:, 1:]
        heads, width = self.size
        rates = 10000.0 ** -torch.arange(0, 1, 2 * heads / width, device=text.device)
        turns = torch.outer(torch.arange(inputs.shape[1], device=text.device), rates)
        x = self.words(inputs)
        for block in self.blocks:
            x = block(x, turns)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def batches(count: int, batch: int, context: int, device: str) -> list[Tensor]:
    """Pieces of the texts, at random places."""
    texts = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    data = torch.frombuffer(bytearray(texts.encode()), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - context, (count, batch))
    return [torch.stack([data[s : s + context + 1] for s in row]).to(device) for row in starts]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor) -> float:
    optimizer.zero_grad()
    loss = model(text)
    loss.backward()
    optimizer.step()
    return loss.detach()


def kept(model: nn.Module, text: Tensor) -> int:
    """Bytes that the forward keeps for the backward, parameters aside."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(text)
    return sum(storages.values())


def draw(path: Path, losses: dict, memory: dict, where: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=130, layout="constrained")
    curve, apart, bars = figure.subplots(1, 3)
    curve.plot(losses["fused"], color=COLOURS["fused"])
    curve.set(title="Loss after fuse_", xlabel="step", ylabel="cross entropy of a byte")
    # Drawn upon each other, one of the two curves would be hidden.
    apart.plot([abs(a - b) for a, b in zip(*losses.values(), strict=True)], color="#d55e00")
    apart.set(title="... and its distance from the plain one's", xlabel="step", ylim=(0, None))
    drawn = bars.bar(list(memory), list(memory.values()), color=[COLOURS[n] for n in memory])
    bars.bar_label(drawn, [f"{value:,.1f}" for value in memory.values()])
    bars.set(title=f"A step, {where}", ylabel="MiB kept for the backward")
    for axes in (curve, apart, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> dict:
    """Runs the example; -> its numbers."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=WithDefaults)
    add = parser.add_argument
    add("--out", type=Path, default=Path("example_pictures"), help="folder for the pictures")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    for name, value in (("width", 64), ("hidden", 176), ("layers", 2), ("context", 64)):
        add(f"--{name}", type=int, default=value, help="of the model")
    add("--batch", type=int, default=8, help="texts in a batch")
    add("--steps", type=int, default=100, help="of training")
    add("--seconds", type=float, default=2, help="of measuring")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    plain = Llama(given.width, given.hidden, given.layers).to(given.device)
    models = {"plain": plain, "fused": copy.deepcopy(plain)}
    report = fuse_(models["fused"])
    print(report)
    texts = batches(given.steps, given.batch, given.context, given.device)
    memory = {name: kept(model, texts[0]) / 2**20 for name, model in models.items()}
    with explain() as calls:
        models["fused"](texts[0]).backward()
    losses, steps = {}, {}
    for name, model in models.items():
        steps[name] = partial(step, model, torch.optim.AdamW(model.parameters(), 3e-3))
        progress = tqdm(texts, f"training, {name}", leave=False, disable=None)
        losses[name] = torch.stack([steps[name](text) for text in progress]).tolist()
    for name, values in losses.items():
        print(f"{name:>6}: loss {values[0]:.4f} to {values[-1]:.4f}, {memory[name]:.1f} MiB kept")
    speeds = {}
    if given.device != "cpu":
        contenders = [Contender(name, partial(call, texts[0])) for name, call in steps.items()]
        numbers, _ = measure(contenders, clock_for(torch.device(given.device)), given.seconds)
        tokens = given.batch * given.context
        speeds = {name: tokens / number.median * 1e6 for name, number in numbers.items()}
        print(", ".join(f"{name} {speed:,.0f} tokens per second" for name, speed in speeds.items()))
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    print(f"the losses are at most {apart:.1e} apart")
    report.save_picture(blocks := given.out / "llama_blocks.png")
    draw(path := given.out / "llama.png", losses, memory, given.device)
    print(blocks, path, sep="\n")
    found = {"losses": losses, "apart": apart, "speeds": speeds, "memory": memory}
    return {**found, "report": report, "calls": [call.operator for call in calls.calls]}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    main()
