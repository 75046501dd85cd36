"""A small GPT that learns Python's sources three times: in bf16, in FP8 by torchao, in FP8 by ours.

Both FP8 ways follow one recipe, torchao's `tensorwise`: the operands of each product are cast with
one scale for the tensor, inputs and weights to `float8_e4m3fn`, gradients to `float8_e5m2`. They
differ in what runs: torchao casts layer by layer, ours takes a feed-forward block as one operator:

    y = down(gelu(up(x)))      torch_fused_linear.float8_mlp(x, weights, biases, "gelu_tanh")

so that an activation and the cast of its result are one pass over memory. The weights are fp32 and
autocast makes the rest bf16; embeddings, norms, attention and the last layer are bf16 in all three.

The text is what every machine has, the sources of Python's own library as bytes. All start from
the same weights and read the same batches, so that the losses differ by rounding alone. FP8 rounds
to four digits in binary, so a curve leaves the bf16 one after a few steps, as it would by another
seed; `--seeds` trains several and tells the spread between them. benchmarks/float8_training.py does
that with 30 million parameters.

    python examples/float8_training.py
"""

from __future__ import annotations

import signal
import statistics
import sysconfig
import time
from argparse import ArgumentDefaultsHelpFormatter as WithDefaults
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from torch_fused_linear import float8_linear, float8_mlp

COLOURS = {"bf16": "#e69f00", "torchao": "#009e73", "ours": "#0072b2"}
WORDS = 256  # bytes


# --- the model ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward block, each around a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 2)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def layer(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.layer(self.qkv, self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.layer(self.projection, mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class Float8Block(Block):
    """A model with the same parameters, in FP8."""

    def layer(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return float8_linear(x, layer.weight, layer.bias)

    def feed_forward(self, x: Tensor) -> Tensor:
        layers = self.up, self.down
        return float8_mlp(x, [m.weight for m in layers], [m.bias for m in layers], "gelu_tanh")


class GPT(nn.Module):
    """Each position predicts the next byte."""

    def __init__(self, width: int, layers: int, context: int, block: type[Block] = Block) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def initialise(self, seed: int) -> None:
        """GPT-2's rule: the same weights for the same seed, whatever the blocks are."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            value = torch.zeros(p.shape) if name.endswith("bias") else torch.ones(p.shape)
            if p.dim() > 1:
                is_last = "projection" in name or "down" in name
                scale = 0.02 / (2 * len(self.blocks)) ** 0.5 if is_last else 0.02
                value = torch.randn(p.shape, generator=generator) * scale
            with torch.no_grad():
                p.copy_(value)

    def forward(self, text: Tensor) -> Tensor:
        """The loss."""
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.words(inputs) + self.places.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(arm: str, width: int, layers: int, context: int) -> GPT:
    """The model of an arm: bf16, torchao or ours."""
    model = GPT(width, layers, context, Float8Block if arm == "ours" else Block)
    if arm == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Without a GPU it has no products in FP8 but makes them in fp32.
        config = Float8LinearConfig(emulate=not torch.cuda.is_available())
        is_inside = lambda module, name: "blocks" in name  # noqa: E731
        convert_to_float8_training(model, module_filter_fn=is_inside, config=config)
    return model


def available() -> list[str]:
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        return ["bf16", "ours"]
    return ["bf16", "torchao", "ours"]


# --- the text -------------------------------------------------------------------------------------


def sources(folders: list[Path], most: int) -> tuple[Tensor, Tensor]:
    """Bytes of Python files, in an order that is the same everywhere: to learn, and to validate."""
    learnt, validated, size = bytearray(), bytearray(), 0
    paths = sorted({path for folder in folders for path in folder.rglob("*.py")})
    generator = torch.Generator().manual_seed(0)
    for k in torch.randperm(len(paths), generator=generator).tolist():
        text = paths[k].read_bytes()
        (validated if len(validated) * 20 < len(learnt) else learnt).extend(text)
        size += len(text)
        if size > most:
            break
    return tuple(torch.frombuffer(text, dtype=torch.uint8) for text in (learnt, validated))


def batch_of(data: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - context, (count, 1), generator=generator)
    return data[starts + torch.arange(context + 1)].long()


# --- training -------------------------------------------------------------------------------------


@dataclass
class Course:
    """How long is trained, and on how much."""

    steps: int
    batch: int
    context: int
    rate: float
    device: str

    def rate_at(self, step: int) -> float:
        """It rises for a tenth, and falls to a tenth by the end."""
        rise = max(1, self.steps // 10)
        if step < rise:
            return self.rate * (step + 1) / rise
        return self.rate * (1 - 0.9 * (step - rise) / max(1, self.steps - rise))


def validation_loss(model: GPT, data: Tensor, course: Course, batches: int = 8) -> float:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad(), torch.autocast(course.device, torch.bfloat16):
        texts = (batch_of(data, course.batch, course.context, generator) for _ in range(batches))
        return statistics.fmean(model(text.to(course.device)).item() for text in texts)


def train(model: GPT, seed: int, texts: tuple[Tensor, Tensor], course: Course) -> dict:
    """Trains from the beginning; -> losses of all steps, the validation's, tokens a second."""
    model.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": course.device == "cuda"}
    optimizer = torch.optim.AdamW(model.parameters(), course.rate, **options)
    losses, synchronize = [], torch.cuda.synchronize if course.device == "cuda" else lambda: None
    warm = min(5, course.steps - 1)  # steps without the clock
    for step in tqdm(range(course.steps), leave=False, disable=None):
        if step == warm:
            synchronize()
            begin = time.perf_counter()
        optimizer.param_groups[0]["lr"] = course.rate_at(step)
        text = batch_of(texts[0], course.batch, course.context, generator)
        if course.device == "cuda":
            text = text.pin_memory().to("cuda", non_blocking=True)
        with torch.autocast(course.device, torch.bfloat16):
            loss = model(text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize()
    seconds = time.perf_counter() - begin
    speed = (course.steps - warm) * course.batch * course.context / seconds
    validation = validation_loss(model, texts[1], course)
    return {"losses": torch.stack(losses).tolist(), "validation": validation, "speed": speed}


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def draw(path: Path, runs: dict[str, list[dict]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=130, layout="constrained")
    curves, points = figure.subplots(1, 2, width_ratios=(2, 1))
    for k, (arm, results) in enumerate(runs.items()):
        for result in results:
            label = arm if result is results[0] else None
            curves.plot(result["losses"], color=COLOURS[arm], linewidth=1, label=label)
            points.plot(k, result["validation"], "o", color=COLOURS[arm])
    curves.set(title="Loss of each run", xlabel="step", ylabel="cross entropy of a byte")
    curves.legend(frameon=False)
    points.set(title="After training, on other files", xlim=(-0.5, len(runs) - 0.5))
    points.set_xticks(range(len(runs)), list(runs))
    for axes in (curves, points):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> dict:
    """Runs the example; -> its numbers."""
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=WithDefaults)
    add = parser.add_argument
    add("--out", type=Path, default=Path("example_pictures"), help="folder for the picture")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    for name, value in (("width", 64), ("layers", 2), ("context", 64)):
        add(f"--{name}", type=int, default=value, help="of the model")
    add("--batch", type=int, default=8, help="texts in a batch")
    add("--steps", type=int, default=60, help="of training")
    add("--seeds", type=int, default=1, help="runs of each arm")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    course = Course(given.steps, given.batch, given.context, 3e-3, given.device)
    texts = sources([Path(sysconfig.get_path("stdlib")) / "asyncio"], most=2**22)
    runs: dict[str, list[dict]] = {arm: [] for arm in available()}
    for arm, results in runs.items():
        model = gpt(arm, given.width, given.layers, given.context).to(given.device)
        results.extend(train(model, seed, texts, course) for seed in range(given.seeds))
        last = [result["validation"] for result in results]
        speed = statistics.median(result["speed"] for result in results)
        print(
            f"{arm:>7}: loss {results[0]['losses'][0]:.3f} to {results[0]['losses'][-1]:.3f}, on "
            f"other files {statistics.fmean(last):.3f} (spread {spread(last):.3f}), "
            f"{speed:,.0f} tokens per second"
        )
    draw(path := given.out / "float8_training.png", runs)
    print(path)
    return runs


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback
    main()
