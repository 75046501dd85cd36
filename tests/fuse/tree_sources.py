"""Writes files of classes whose ``forward`` is random code around layers and activations."""

from __future__ import annotations

import functools
import linecache
import random
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

from programs import module_of
from tree_templates import PARTS, SIMPLE, WILD

HEADER = '''"""Classes of generated trees."""
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from tree_parts import *

ACT = F.relu
KINDS = {"relu": F.relu, "tanh gelu": tanh_gelu}


'''

# The text that replaces the templates' capitals.
LAYERS = {
    "46": ["self.fc1", 'getattr(self, "fc1")', "self.seq[0]", "list(self.seq)[0]", "self.wide"],
    "64": ["self.fc2", 'self._modules["fc2"]', "self.seq[-1]"],
    "44": ["self.fc3", 'self.get_submodule("fc3")', "self.layers[0]", "self.__own", "self.__own"],
    "66": ["self.fc4", "next(iter([self.fc4]))"],
}
LAYERS["44"] += ["self.first", "self.layers[-1]", 'self.branch["fc"]', "self.tied"]
ACTIVATIONS = ["self.act", "F.relu", "F.gelu", "torch.relu", "self.act2", "nn.functional.relu"]
RARE = ["ACT", "self.fn", "tanh_gelu", "torch.tanh", "F.relu6", "nn.ReLU()", "self.static"]
RARE += ["F.silu", "F.leaky_relu", "torch._C._nn.gelu", "functools.partial(F.gelu)", "self.inplace"]
CONDITIONS = ["self.training", "x.dim() > 1", "self.flag", "len(self.layers) > 1"]
FUNCTIONS = ["F.relu", "torch.relu", "nn.GELU()", "nn.ReLU()", "nn.Tanh()", "lambda t: F.relu(t)"]
FUNCTIONS += ['functools.partial(F.gelu, approximate="tanh")', "tanh_gelu", "LoudReLU()"]
MODULES = ["nn.ReLU()", "nn.GELU()", 'nn.GELU("tanh")', "nn.ReLU(inplace=True)", "nn.ReLU6()"]
MODULES = [*MODULES[:3] * 3, *MODULES, "LoudReLU()", "LoudGELU()", "nn.Identity()", "nn.SiLU()"]


class Body:
    """One method's statements, with the local names that exist and their widths."""

    def __init__(self, rng: random.Random, simple: bool, helper: bool, parts: bool):
        self.rng, self.simple, self.count = rng, simple, 0
        self.names, self.lines = {"x": 4}, []
        table = SIMPLE + ([] if simple else WILD) + (PARTS * 3 if parts and not simple else [])
        self.table = [t for t in table if helper or "helper" not in t]

    def statement(self) -> None:
        fresh, pending = {}, {}

        def fill(match: re.Match) -> str:
            token = match[0]
            kind, width = token[0], token[1:2]
            if kind in "NT" and token not in fresh:
                self.count += 1
                fresh[token] = f"{self.rng.choice('hyzuv')}{self.count}"
                if kind == "N":
                    pending[fresh[token]] = int(width)
            if kind in "NT":
                return fresh[token]
            return self.piece(token)

        tokens = r"\b(?:[EV][46]|[NT][46][a-z]|L[46]{2}|A|C)\b"
        self.lines.append(re.sub(tokens, fill, self.rng.choice(self.table)))
        self.names |= pending

    def piece(self, token: str) -> str:
        kind = token[0]
        if kind == "E":
            return self.expression(int(token[1]), self.rng.choice([0, 0, 1, 1, 2]))
        if kind == "V":
            return self.name(int(token[1]))
        if kind == "L":
            first, *others = LAYERS[token[1:]]
            return first if self.simple or self.rng.random() < 0.6 else self.rng.choice(others)
        if kind == "A":
            rare = not self.simple and self.rng.random() < 0.25
            return self.rng.choice(RARE if rare else ACTIVATIONS)
        return self.rng.choice(CONDITIONS)

    def name(self, width: int) -> str:
        return self.rng.choice([n for n, w in self.names.items() if w == width] or ["self.fc1(x)"])

    def expression(self, width: int, depth: int) -> str:
        rng = self.rng
        if depth == 0:
            return self.name(width)
        other = rng.choice([4, 6])
        inner = self.expression(other, depth - 1)
        layer = f"{self.piece(f'L{other}{width}')}({inner})"
        if (way := rng.random()) < 0.45:
            return self.squared(f"{self.piece('A')}({layer})")
        if way < 0.55:
            return self.squared(f"{layer}.relu()")
        if way < 0.65:
            return f"{self.piece('A')}({self.expression(width, depth - 1)})"
        if way < 0.8:
            return f"({layer} + {self.expression(width, depth - 1)})"
        if way < 0.9 and not self.simple:
            return f"({layer} if {self.piece('C')} else {self.expression(width, depth - 1)})"
        return layer

    def squared(self, value: str) -> str:
        """Takes one value in four."""
        if self.rng.random() < 0.75:
            return value
        forms = ("{}.square()", "({} ** 2)", "{}.pow(2)", "torch.square({})", "torch.pow({}, 2)")
        return self.rng.choice(forms).format(value)

    def finish(self) -> list[str]:
        narrow = [n for n, w in self.names.items() if w == 4]
        wide = [n for n, w in self.names.items() if w == 6]
        terms = self.rng.sample(narrow, min(3, len(narrow)))
        if wide and self.rng.random() < 0.7:
            terms.append(f"{self.rng.choice(wide)}[..., :4]")
        if self.rng.random() < 0.3:
            terms.append("F.relu(self.fc3(x))")
        return textwrap.indent("\n".join([*self.lines, f"return {' + '.join(terms)}"]), "    " * 2)


def linear(rng: random.Random, i: int, o: int, plain: bool) -> str:
    bias = rng.choice(["", "", ", bias=False"])
    text = f"nn.Linear({i}, {o}{bias})"
    if plain or (way := rng.random()) < 0.85:
        return text
    return f"Lora({i}, {o}{bias})" if way < 0.93 else f"Wrapped({text})"


def attributes(rng: random.Random, text: str, simple: bool, modules_only: bool) -> list[str]:
    """The lines of ``__init__`` for the attributes that the code uses."""

    def line(i, o):
        return linear(rng, i, o, simple)

    sizes = {"fc1": (4, 6), "fc2": (6, 4), "fc3": (4, 4), "fc4": (6, 6), "__own": (4, 4)}
    sizes |= {"wide": (4, 6), "both": (4, 12)}
    found = {name: line(*size) for name, size in sizes.items()}
    several = ", ".join(line(4, 4) for _ in range(rng.choice([1, 2, 3])))
    acts = ", ".join(rng.choice(MODULES) for _ in range(3))
    drop = f"nn.Dropout({rng.choice([0.0, 0.4])}, inplace={rng.random() < 0.4})"
    found["tied"] = "self.fc3"
    found["act"] = rng.choice(MODULES)
    found["act2"] = rng.choice(MODULES if modules_only else MODULES + FUNCTIONS)
    found["fn"] = rng.choice(MODULES if modules_only else FUNCTIONS)
    found["inplace"] = "nn.ReLU(inplace=True)"
    found["layers"] = f"nn.ModuleList([{several}])"
    found["acts"] = f"nn.ModuleList([{acts}])"
    middle = rng.choice(["", f", {drop}"])
    found["seq"] = f"nn.Sequential({line(4, 6)}, {rng.choice(MODULES)}{middle}, {line(6, 4)})"
    found["branch"] = f'nn.ModuleDict({{"fc": {line(4, 4)}, "act": {rng.choice(MODULES)}}})'
    found["conv"] = "nn.Conv2d(1, 1, 3, padding=1)"
    norm, act = rng.choice(["", "", ", nn.BatchNorm2d(2)"]), rng.choice(MODULES)
    start = f"nn.Conv2d(1, 2, 3, padding=1, bias={rng.random() < 0.7}){norm}, {act}"
    found["stem"] = f"nn.Sequential({start}, nn.Conv2d(2, 1, 1), {rng.choice(MODULES)})"
    found["drop"], found["flag"] = drop, str(rng.random() < 0.5)
    found["axis"] = rng.choice(["-1", "-1", "0"])
    found["kind"] = repr(rng.choice(["relu", "tanh gelu"]))
    needed = [n for n in found if re.search(rf"self\.{n}\b|[\"']{n}[\"']", text)]
    if "tied" in needed and "fc3" not in needed:
        needed = ["fc3", *needed]
    return [f"self.{name} = {found[name]}" for name in found if name in needed]


ASKED = """
    times = 0

    @property
    def asked(self):
        self.times += 1
        return self.times % 3 != 1

    def changing(self, x):
        self.times += 1
        return x
"""
SIMPLE_NAMES = [f"C{i}" for i in range(0, 1000, 3)]


def write_class(rng: random.Random, name: str, bases: list[str]) -> str:
    """A class of its own, one that derives from an earlier one, or one made inside a function.

    Those of SIMPLE_NAMES are without anything that TorchScript does not take.
    """
    simple = name in SIMPLE_NAMES
    base = rng.choice(bases) if bases and not simple and rng.random() < 0.3 else None
    body = Body(rng, simple, helper=True, parts=True)
    for _ in range(rng.choice([1, 2, 2, 3, 4])):
        body.statement()
    helper = Body(rng, simple, helper=False, parts=False)
    helper.statement()
    forward = body.finish()
    if base and rng.random() < 0.5:
        ways = ["super().forward(", f"super({name}, self).forward(", f"{base}.forward(self, "]
        above = rng.choice(ways)
        forward = textwrap.indent(f"x = {above}x)\n{textwrap.dedent(forward)}", " " * 8)
    decorator = "    @twice\n" if not simple and rng.random() < 0.08 else ""
    text = f"{decorator}    def forward(self, x):\n{forward}\n"
    if "helper" in forward or rng.random() < 0.2:
        text += f"\n    def helper(self, x):\n{helper.finish()}\n"
    text = text if simple or rng.random() > 0.05 else text.replace("self", "this")
    if "self.static" in text:
        text += f"\n    static = staticmethod({rng.choice(['F.relu', 'tanh_gelu'])})\n"
    if "self.first" in text:
        text += "\n    @property\n    def first(self):\n        return self.layers[0]\n"
    if "self.asked" in text or "self.changing" in text:
        text += ASKED
    extra = " self.fc3 self.layers" if "self.first" in text else ""
    lines = attributes(rng, text.replace("this.", "self.") + extra, simple, simple or bool(base))
    parts = "self.parts = nn.ModuleList(parts)"
    start = f"super().__init__({'parts' if base else ''})"
    init = textwrap.indent("\n".join([start, *([] if base else [parts]), *lines]), " " * 8)
    head = f"class {name}({base or 'nn.Module'}):\n    def __init__(self, parts=()):\n"
    code = f"{head}{init}\n\n{text}"
    if not simple and rng.random() < 0.1 and "F.relu" in code:
        inner = textwrap.indent(code.replace("F.relu(", "function("), "    ")
        made = f"{name} = make_{name}(F.relu)\n"
        return f"def make_{name}(function):\n{inner}\n    return {name}\n\n\n{made}"
    return code


@functools.cache  # once for the plain one and the one that is fused
def write_library(seed: int, classes: int) -> str:
    rng = random.Random(f"library {seed}")
    names = [f"C{i}" for i in range(classes)]
    bodies = [write_class(rng, name, names[max(0, i - 5) : i]) for i, name in enumerate(names)]
    return "\n\n".join([HEADER, *bodies])


def has_its_file(library: ModuleType) -> bool:
    path = Path(library.__file__)
    return path.exists() and path.read_text() == library.text


def load_library(folder: Path, seed: int, classes: int = 40, plain: bool = False) -> ModuleType:
    """The module of this seed, from its file; of some the file changes afterwards, or is gone.

    The plain one has functions of its own, which fuse_ does not get to see.
    """
    name = f"tree_{'plain' if plain else 'library'}_{seed}"
    if name in sys.modules:
        return sys.modules[name]
    path = folder / f"{name}.py"
    text = write_library(seed, classes)
    module = module_of(path, text)
    module.text = text
    if plain:
        return module
    if seed % 8 == 6:
        path.write_text(text.replace("F.relu(", "torch.tanh(").replace("self.act(", "torch.abs("))
        linecache.checkcache(str(path))
    if seed % 8 == 7:
        path.unlink()
        linecache.checkcache(str(path))
    return module
