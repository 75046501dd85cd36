"""Times training steps in FP8 beside torchao's under torch.compile, and beside bf16.

    python -m benchmarks.float8 --json FILE     on a GPU of capability 8.9 or newer
    python -m benchmarks.float8 --tiny          on a CPU, too: does it run?

Blocks and gated blocks by size: the step by the clock, the step in a CUDA graph, its kernels alone,
and what it keeps for the backward, the weights' FP8 copies among it. And the step of a LLaMA, 8
layers of 2048→5632, 4 x 2048 tokens, whose blocks are compiled one by one. FP8 is torchao's recipe
`tensorwise`. Numbers are written after each row; `--limit` begins none after so many seconds.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, where not installed

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_fused_linear as tfl
from benchmarks import suite
from benchmarks.contenders import events_of, graph_of, step_of
from benchmarks.memory import saved_bytes
from benchmarks.results import result
from examples import llama
from torch_fused_linear.timing import Contender, Number, clock_for, in_one_line, measure

BLOCKS = ((1024, 4096), (2048, 8192), (4096, 16384))
GATED = ((2048, 5632), (4096, 14336))
MODES = ("step, captured", "step", "kernels", "saved")
NAMES = ("ours", "torchao", "ours in bf16", "compile")
Network = Callable[[Tensor], Tensor]

# ---------------------------------------------------------------------------------------- blocks


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))

    def fused(self, x: Tensor, precision: str) -> Tensor:
        layers = self.up, self.down
        weights, biases = [m.weight for m in layers], [m.bias for m in layers]
        return tfl.mlp(x, weights, biases, "gelu_tanh", precision=precision)


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def fused(self, x: Tensor, precision: str) -> Tensor:
        weights = self.gate.weight, self.up.weight, self.down.weight
        return tfl.gated_mlp(x, *weights, precision=precision)


def in_torchao(model: nn.Module) -> nn.Module:
    """Its linear layers become torchao's, the head of a language model aside."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=not torch.cuda.is_available())
    keep = lambda module, name: not name.endswith("head")  # noqa: E731
    return convert_to_float8_training(model, module_filter_fn=keep, config=config)


def network_of(name: str, block: Mlp | Gated) -> tuple[Network, list[Tensor]]:
    """Returns the network that the contender calls, and its parameters."""
    own = copy.deepcopy(block)
    if name == "ours":
        return partial(own.fused, precision="float8"), [*own.parameters()]
    if name == "ours in bf16":
        return partial(own.fused, precision="default"), [*own.parameters()]
    if name == "torchao":
        own = in_torchao(own)
    return torch.compile(own, dynamic=False), [*own.parameters()]


class Block:
    """The contenders of one block, with equal weights and the same input."""

    def __init__(self, case: dict[str, Any], device: torch.device) -> None:
        self.device = device
        width, hidden, _ = case["sizes"]
        kind = Gated if case["activation"] == "silu" else Mlp
        dtype = torch.bfloat16
        self.block = kind(width, hidden).to(device, dtype)
        self.x = torch.randn(case["tokens"], width, device=device, dtype=dtype).requires_grad_()
        self.grad = torch.randn_like(self.x)
        self.networks: dict[str, tuple[Network, list[Tensor]]] = {}
        self.graphs: dict[str, Callable] = {}

    def network(self, name: str) -> tuple[Network, list[Tensor]]:
        if name not in self.networks:
            self.networks[name] = network_of(name, self.block)
        return self.networks[name]

    def step(self, name: str) -> Callable[[], None]:
        network, parameters = self.network(name)
        return step_of(partial(network, self.x), [self.x, *parameters], self.grad)

    def captured(self, name: str) -> Callable[[], None]:
        if name not in self.graphs:
            self.graphs[name] = graph_of(self.step(name))
        return self.graphs[name]

    def kernels(self, name: str) -> Number:
        call = Contender(name, self.step(name))
        call.call()
        calls = 5
        found = [events_of(call, self.device) for _ in range(calls)]
        return Number.over([sum(e.self_device_time_total for e in one) for one in found], 1)

    def saved(self, name: str) -> Number:
        """The input is made anew, as by a layer before; a leaf would live as long as its graph."""
        network, _ = self.network(name)
        make = lambda: network(self.x + 0)  # noqa: E731
        return Number.once(saved_bytes(make, self.device) / 2**20)


# ------------------------------------------------------------------------------------- a LLaMA


class Float8Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return tfl.float8_linear(x, self.weight, self.bias)


class Float8LlamaBlock(llama.Block):
    def feed_forward(self, x: Tensor) -> Tensor:
        weights = self.gate.weight, self.up.weight, self.down.weight
        return tfl.float8_gated_mlp(x, *weights)


def in_ours(model: llama.Llama) -> llama.Llama:
    """Returns the model with layers in FP8 and the parameters that it has."""
    for block in model.blocks:
        block.__class__ = Float8LlamaBlock
        block.qkv.__class__ = block.projection.__class__ = Float8Layer
    return model


def fused_in_bf16(model: llama.Llama) -> llama.Llama:
    tfl.fuse_(model)
    return model


LLAMAS: dict[str, tuple[Callable[[llama.Llama], nn.Module], bool]] = {  # and whether compiled
    "ours": (in_ours, False),
    "torchao": (in_torchao, True),
    "ours compiled": (in_ours, True),
    "ours in bf16": (fused_in_bf16, False),
    "compile": (lambda model: model, True),
}


class Llama:
    def __init__(self, case: dict[str, Any], device: torch.device) -> None:
        width, hidden, _ = case["sizes"]
        self.model = llama.Llama(width, hidden, case["layers"]).to(device, torch.bfloat16)
        self.text = torch.randint(256, (case["batch"], case["context"] + 1), device=device)

    def step(self, name: str) -> Callable[[], None]:
        make, is_compiled = LLAMAS[name]
        own = make(copy.deepcopy(self.model))
        for block in own.blocks if is_compiled else ():
            block.compile(dynamic=False)
        return step_of(partial(own, self.text), [*own.parameters()])


# ----------------------------------------------------------------------------------- the command


def cases(tiny: bool) -> Iterator[dict[str, Any]]:
    """A LLaMA's is told by its layers."""

    def case(width: int, hidden: int, activation: str, tokens: int) -> dict[str, Any]:
        about = {"suite": "float8", "sizes": [width, hidden, width], "tokens": tokens}
        return {**about, "dtype": "bf16", "activation": activation}

    blocks, gated, tokens = (((32, 64),), ((32, 64),), 32) if tiny else (BLOCKS, GATED, 8192)
    layers, batch, context = (1, 2, 16) if tiny else (8, 4, 2048)
    yield from (case(*sizes, "gelu", tokens) for sizes in blocks)
    yield case(*gated[0], "silu", tokens)
    of_llama = case(*gated[0], "silu", batch * context)
    yield {**of_llama, "layers": layers, "batch": batch, "context": context}
    yield from (case(*sizes, "silu", tokens) for sizes in gated[1:])


def numbers_of(
    subject: Block | Llama, mode: str, names: list[str], device: torch.device, seconds: float
) -> tuple[dict[str, Number], dict[str, str]]:
    """Returns the numbers of each contender, and in words why others have none."""
    if mode in ("kernels", "saved"):
        make = getattr(subject, mode)
    else:
        of_step = subject.captured if mode == "step, captured" else subject.step
        make = lambda name: Contender(name, of_step(name))  # noqa: E731
    made, failed = {}, {}
    for name in names:
        try:
            made[name] = make(name)
        except Exception as failure:
            failed[name] = in_one_line(failure)
    if mode in ("kernels", "saved"):
        return made, failed
    numbers, more = measure([*made.values()], clock_for(device), seconds)
    return numbers, failed | more


def rows(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    begin = time.perf_counter()
    for case in cases(given.tiny):
        is_llama = "layers" in case
        names = [name for name in (LLAMAS if is_llama else NAMES) if name not in given.without]
        modes = ("step",) if is_llama else MODES if device.type == "cuda" else ("step", "saved")
        torch._dynamo.reset()
        torch.manual_seed(0)
        subject = None
        for mode in (mode for mode in modes if mode in given.modes):
            if given.limit and time.perf_counter() - begin > given.limit:
                return
            if subject is None:
                subject = Llama(case, device) if is_llama else Block(case, device)
            numbers, failed = numbers_of(subject, mode, names, device, given.seconds)
            row = result({**case, "mode": mode}, "MiB" if mode == "saved" else "us", numbers)
            yield {**row, "failed": failed} if failed else row
        del subject
        if device.type == "cuda":
            torch.cuda.empty_cache()


def in_words(row: dict[str, Any]) -> str:
    case, medians = row["case"], {n: v["median"] for n, v in row["numbers"].items()}
    what = f"LLaMA, {case['layers']} layers" if "layers" in case else case["activation"]
    shape = "→".join(map(str, case["sizes"]))
    parts = [f"{name} {value:,.1f}" for name, value in medians.items()]
    if {"ours", "torchao"} <= set(medians) and medians["ours"]:
        parts.append(f"torchao over ours {medians['torchao'] / medians['ours']:.2f}")
    parts += [f"{name} failed: {why}" for name, why in row.get("failed", {}).items()]
    return f"{shape} {what}, {case['mode']}, {row['unit']}: " + ", ".join(parts)


def main(arguments: list[str]) -> list[dict[str, Any]]:
    parser = suite.parser(__doc__, seconds=0.5)
    add = parser.add_argument
    add("--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help="default: all")
    add("--without", nargs="+", default=[], metavar="NAME", help="leave these out; default: none")
    return suite.run(rows, in_words, parser.parse_args(arguments), arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
