"""Random trees of modules, by seed: what is built, what is done to it, and how it is fused."""

from __future__ import annotations

import collections
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
import tree_changes
from helpers import setting
from torch import Tensor, nn
from tree_parts import Lora, LoudReLU, Named, Wrapped
from tree_sources import SIMPLE_NAMES, load_library

CLASSES = TREES = 8  # that share a file, which fuse_ compiles anew for every tree
ACTIVATIONS = (nn.ReLU, nn.ReLU, nn.GELU, lambda: nn.GELU("tanh"), nn.Tanh, LoudReLU)


@dataclass
class Tree:
    """One case. ``build()`` gives an equal model each time."""

    seed: int
    library: ModuleType
    plain: ModuleType  # the same, for the model that is not fused
    x: Tensor
    before: list[tuple[str, int]]  # changes before fusing
    after: list[tuple[str, int]]
    world: str | None
    memory: str
    filtered: bool
    part: bool  # only a part of the model is fused
    simple: bool  # made of what TorchScript takes
    linear: bool  # single layers too
    used: set[str] = field(default_factory=set)

    def build(self, plain: bool = False) -> nn.Module:
        rng = random.Random(f"model {self.seed}")
        torch.default_generator.manual_seed(self.seed)
        model = Grower(rng, self, self.plain if plain else self.library).node(2).double()
        tree_changes.apply(self.before, model)
        return model

    def options(self) -> dict:
        options = {} if self.memory == "default" else {"memory": self.memory}
        if self.linear:
            options["linear"] = True
        if self.filtered:
            options["filter_fn"] = lambda name, module: len(name) % 3 != self.seed % 3
        return options

    def source(self) -> str:
        """The model's own classes, as text."""
        blocks = self.library.text.split("\n\n\n")
        names = [rf"class {n}(" for n in sorted(self.used)]
        return "\n\n".join(b for b in blocks if any(n in b for n in names))

    def describe(self) -> str:
        facts = {k: v for k, v in vars(self).items() if k not in ("library", "plain", "used")}
        facts["x"] = f"{tuple(self.x.shape)} {self.x.dtype}"
        return f"{facts}\n{self.build()}\n{self.source()}"


class Grower:
    """Grows a model from 4 features to 4."""

    def __init__(self, rng: random.Random, tree: Tree, library: ModuleType):
        self.rng, self.tree, self.library, self.grown = rng, tree, library, []

    def node(self, depth: int) -> nn.Module:
        if self.grown and self.rng.random() < 0.08:
            return self.rng.choice(self.grown)  # shared
        ways = ["stack"] * 3 + ["own"] * 6 + ["encoder"]
        if self.tree.simple:
            ways = ["stack", "own", "own", "chain" if depth else "own"]
        elif depth:
            ways += ["own"] * 4 + ["chain"] * 2
        module = getattr(self, self.rng.choice(ways))(depth - 1)
        self.grown.append(module)
        return module

    def layer(self, i: int, o: int) -> nn.Module:
        bias = self.rng.random() < 0.7
        if (way := self.rng.random()) < 0.9:
            return nn.Linear(i, o, bias=bias)
        return Lora(i, o) if way < 0.95 else Wrapped(nn.Linear(i, o, bias=bias))

    def activation(self) -> nn.Module:
        if self.rng.random() < 0.15:
            return nn.ReLU(inplace=True)
        return self.rng.choice(ACTIVATIONS)()

    def stack(self, depth: int) -> nn.Module:
        rng, width, modules = self.rng, 4, []
        for last in [False] * rng.choice([0, 1, 2]) + [True]:
            other = 4 if last else rng.choice([4, 6])
            modules.append(self.layer(width, other))
            width = other
            if rng.random() < 0.25:
                modules.append(nn.Dropout(rng.choice([0.0, 0.4]), inplace=rng.random() < 0.5))
            if rng.random() < 0.8:
                modules.append(self.activation())
            if rng.random() < 0.1:
                modules.append(nn.LayerNorm(width))
        if rng.random() < 0.1 and len(modules) > 2:  # one activation module in two places
            modules += [nn.Linear(4, 4), modules[1]] if modules[1]._parameters == {} else []
        if rng.random() < 0.15 and len(modules) > 2:
            modules = [nn.Sequential(*modules[:2]), *modules[2:]]
        if rng.random() < 0.15:
            named = collections.OrderedDict((f"m{i}", m) for i, m in enumerate(modules))
            return nn.Sequential(named)
        return (Named if rng.random() < 0.15 else nn.Sequential)(*modules)

    def own(self, depth: int) -> nn.Module:
        name = f"C{self.rng.randrange(CLASSES)}"
        if self.tree.simple:
            name = self.rng.choice([n for n in SIMPLE_NAMES if hasattr(self.library, n)])
        self.tree.used.add(name)
        return getattr(self.library, name)(self.nodes(depth) if depth >= 0 else ())

    def nodes(self, depth: int) -> list[nn.Module]:
        return [self.node(max(depth, 0)) for _ in range(self.rng.choice([1, 2, 2]))]

    def encoder(self, depth: int) -> nn.Module:
        activation = self.rng.choice(["relu", "gelu", nn.GELU("tanh"), nn.functional.relu])
        dropout = self.rng.choice([0.0, 0.3])
        return nn.TransformerEncoderLayer(4, 2, 6, dropout, activation, batch_first=True)

    def chain(self, depth: int) -> nn.Module:
        return nn.Sequential(*self.nodes(depth))


def odd_input(rng: random.Random) -> Tensor:
    inputs = [
        torch.randn(4),
        torch.randn(0, 4),
        torch.randn(4, 3).t(),
        torch.randn(2, 1, 2, 4),
        torch.full((3, 4), float("nan")),
        torch.zeros(3, 4),
        torch.randn(3, 4).float(),  # another type than the model's
        torch.randn(3, 5),  # another width
        torch.ones(3, 4, dtype=torch.int64),
    ]
    return rng.choice(inputs)


def grow(seed: int, folder: Path, simple: bool = False) -> Tree:
    """The tree of this seed; its classes come from a file in the folder."""
    rng = random.Random(f"tree {seed}")
    torch.default_generator.manual_seed(seed)
    with setting(torch.set_default_dtype, torch.float64, torch.float32):
        usual = rng.choice([torch.randn(3, 4), torch.randn(2, 3, 4)])
        x = odd_input(rng) if rng.random() < 0.12 else usual
    worlds = [None] * 10 + ["global hooks", "global names", "global relu"] + [str(seed // 3)] * 4
    return Tree(
        seed,
        load_library(folder, seed // TREES, CLASSES),
        load_library(folder, seed // TREES, CLASSES, plain=True),
        x,
        before=tree_changes.some_changes(rng, 0 if simple else rng.choice([0, 1, 2])),
        after=tree_changes.some_changes(rng, rng.choice([1, 2, 3])),
        world=rng.choice(worlds),
        memory=rng.choice(["default", "default", "low"]),
        filtered=rng.random() < 0.1,
        part=rng.random() < 0.1,
        simple=simple,
        linear=rng.random() < 0.4,
    )
