"""Programs as people write them: a text each, with the operators that run once it is fused.

``# name (base): operators ~ | reason`` heads the body of a ``forward(self, x)``, or of a class. The
operators are those of one call in eval mode; the reason is one that the report gives. Where ``~``
stands TorchScript's graph shows others: a dropout in place, branches for layer and activation, gate
in the second half or in either, a layer that is called through a local name, layers whose inputs
are written to later, squares, which are left to torch.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from processes import module_at

TEXT = '''
# spellings: relu relu relu mlp ~
x = torch.relu(self.fc1(x))
x = self.fc2(x).relu_()
x = (self.fc3(x).relu)() * 2
x = F.gelu(input=self.fc1(input=x), approximate="tanh")
x = F.relu(self.fc2(x), inplace=True)
return self.fc2(F.relu(self.fc1(x), True))

# squares: mlp ~
x = F.relu(self.fc1(x)).square()
x = torch.relu(self.fc2(x)) ** 2
h = self.fc3(x).relu()
x = h.pow(2)
x = torch.square(self.relu(self.fc1(x)))
h = F.relu(self.fc2(x))
h = torch.pow(h, 2)
return self.fc3(h)

# square_under_a_guard: relu ~
h = self.relu(self.fc1(x))
if self.depth == 3:
    h = h.square()
return h

# square_of_another: gelu relu relu relu ~
x = self.act(self.fc1(x)).square()
x = self.nodrop(self.relu(self.fc2(x))) ** 2
x = F.relu(self.fc2(x)) ** 3
h = F.relu(self.fc3(x))
return self.fc1(h.square() + h) + self.fc2(x) ** 2

# dropouts_draw_before_others: - | something runs before its activation does
@property
def noise(self):
    return 0 * torch.rand(1)

def forward(self, x, *more):
    h = self.drop(self.fc1(x))
    noise = self.noise
    h = self.drop(self.fc2(F.relu(h) + noise))
    if len(self.noise) == 1:
        h = F.relu(h)
    h = self.drop(self.fc1(h))
    return self.noise + F.relu(h)

# whose_input_changes_before: - | straight to
def scaled(self, x):
    x.data.mul_(3)
    yield x

def product(self, *args, a):
    return args[0] * a

def forward(self, x):
    x = x * 1
    h = self.fc1(x)
    x = self.product(a=F.relu(h), *self.scaled(x))
    h, scaled = self.fc2(x), self.scaled(x)
    return (*scaled, F.relu(h))[1]

# nested: mlp
return x + self.fc2(self.nodrop(self.act(self.fc1(x))))

# statements: mlp
"""With a docstring."""
h = self.fc1(x)
y, scale = x, 2
h = F.relu(h)
return self.fc2(h) * scale + y.shape[0]

# attribute_of_an_argument_between: - ~ | something runs before its activation does
h = self.fc1(x)
shape, scale = x.shape, 2
h = F.relu(h)
return self.fc2(h) * scale + shape[0]

# annotated: mlp
h: torch.Tensor = self.fc1(x)
h = self.act(h)
h = F.dropout(h, p=self.drop.p, training=self.training)
h = self.fc2(h)
return h + x

# annotation_alone: - | what it returns is read elsewhere too
h = self.fc1(x)
y = self.relu(h)
h: torch.Tensor
return self.fc2(y) + h

# other_names: gelu
h = self.fc1(x)
y = self.act(h)
h = self.fc2(y)
return h + y

# conditional: relu relu ~
for i, layer in enumerate(self.layers):
    x = F.relu(layer(x)) if i < self.depth - 1 else layer(x)
return x

# guarded: - ~ | does not show
for i, layer in enumerate(self.layers):
    x = layer(x)
    if i != len(self.layers) - 1:
        x = F.relu(x)
return x

# nerf: relu relu relu
h = x
for i, _ in enumerate(self.layers):
    h = self.layers[i](h)
    h = F.relu(h)
    if i in self.skips:
        h = torch.cat([x[:, :3], h[:, :3]], -1)
return h

# alias: gelu gelu
x = F.gelu(self.fc1(x), approximate=self.form)
fc, act = self.fc1, self.act
return getattr(self, "fc2")(act(fc(x)))

# given_on: relu relu
def forward(self, x):
    return self.run(self.fc1, self.run(self.fc2, x))

def run(self, layer, x):
    return F.relu(layer(x))

# dropout_between: relu
return F.relu(self.drop(self.fc1(x)))

# dropout_function_between: relu ~
h = self.fc1(x)
h = F.dropout(h, 0.5, self.training, True)
return F.relu(h)

# comprehensions: relu relu relu relu relu relu relu
a = [F.relu(self.fc1(x)) for _ in range(2)]
b = {k: self.fc2(y).relu() for k, y in enumerate(a)}
return sum(b.values()) + sum(F.relu(layer(x)) for layer in self.layers)

# parents_forward (nested): mlp relu
return F.relu(self.fc3(super().forward(x)))

# grandchild (parents_forward): mlp relu
return super().forward(x) * 2

# mixed_in (Mixin, Base): relu
return self.mixed(x)

# decorated: mlp
@logged
def forward(self, x):
    x = self.fc1(x)
    return self.fc2(self.act(x))

# blocks: mlp mlp
for _ in range(2):
    if x.dim() == 2:
        with torch.autograd.profiler.record_function("block"):
            y = self.fc2(self.act(self.fc1(x)))
        try:
            x = x + y
        except TypeError:
            raise
    else:
        return x
return x

# branches: mlp mlp
try:
    raise TypeError
except TypeError:
    x = self.fc2(self.act(self.fc1(x)))
match x.dim():
    case 2:
        return self.fc2(self.act(self.fc1(x)))

# finally_block: - | does not show
try:
    h = self.fc1(x)
finally:
    h = F.relu(h)
return self.fc2(h)

# walrus: mlp
if (h := self.fc1(x)).shape[0] == 4:
    h = self.fc2(F.relu(self.fc3(h)))
return h

# formatted: relu relu
shape = f"{tuple(self.relu(self.fc1(x)).shape)!r:>{len('12345')}}"
return self.relu(self.fc1(x)) * len(shape)

# generator: relu relu relu
def forward(self, x):
    return sum(self.drawn(x))

def drawn(self, x):
    for layer in self.layers:
        h = layer(x)
        yield F.relu(h)

# coroutine: mlp
def forward(self, x):
    try:
        self.waited(x).send(None)
    except StopIteration as stop:
        return stop.value

async def waited(self, x):
    h = self.fc1(x)
    h = F.relu(h)
    return self.fc2(h)

# elsewhere_as_well: gelu
return self.fc2(self.act(self.fc1(x)) + self.fc1(x))

# beside_a_hidden_method (nested): mlp
@hidden
def features(self, x):
    return F.relu(self.fc1(x))

# inner_function: relu
def later(add, y):
    return y + add
h = self.fc1(x)
h = F.relu(h)
return later(1, h)

# inner_function_reads: - | does not show
h = self.fc1(x)
def later():
    return h
h = self.act(h)
return self.act(self.fc2(later(), **{}))

# loop_with_another_self: relu relu relu
def forward(this, x):
    for layer in this.layers:
        x = F.relu(layer(x))
    return this.fc2(x)

# all_locals: - | all_locals.forward takes all its local names together
h = F.relu(self.fc1(x))
return h * len(locals())

# its_frame: - | its_frame.forward takes all its local names together
h = F.relu(self.fc1(x))
return h * len(__import__("sys")._getframe().f_locals)

# own_locals: relu
h = F.relu(self.fc1(x))
return h * len(vars(self)["_modules"])

# condition_that_the_argument_takes_from: - ~ | does not show
xs, out = [x, x + 1], []
while xs:
    h = self.fc1(xs.pop())
    if xs:
        h = self.relu(h)
    out.append(h)
return out[0] - out[1]

# condition_that_counts: - ~ | does not show
for _ in range(3):
    h = self.fc1(x)
    if self.flag:
        h = self.relu(h)
    x = h + 1
return x

# condition_with_else: - ~ | does not show
for i in range(3):
    h = self.fc1(x)
    n = i % 2
    if n == 0:
        h = self.relu(h)
    else:
        h = h - 3
        x = x + 1
    x = h + x
return x

# property_as_condition: - ~ | does not show
h = self.fc1(x)
if self.is_odd:
    h = F.relu(h)
return self.fc2(h)

# read_elsewhere: - | does not show
h = self.fc1(x)
return self.fc2(self.act(h)) + h.sum()

# returned_too: - | what it returns is read elsewhere too
h = self.fc1(x)
y = self.act(h)
x = self.fc2(y) + h
z = self.fc3(x)
y = self.relu(z)
z += 1
return z + y

# read_in_the_next_turn: - ~ | what it returns is read elsewhere too
h = x
for layer in self.layers:
    y = h + x
    h = layer(x)
    x = F.relu(h) + y
return x

# read_by_a_handler: - | what it returns is read elsewhere too
h = x
try:
    h = self.fc1(x)
    h = self.act(h)
    raise TypeError
except TypeError:
    return h

# runs_before: - ~ | something runs before its activation does
y = x * 1
h = self.fixed(y)
x = y.mul_(2) + self.act(h)
y = x * 1
h = self.fixed(y)
y.mul_(2)
return self.act(h)

# not_in_any_case: - | something runs before its activation does
h = self.fc1(x)
y = self.act(h) if x.sum() > 0 else x
return y

# not_straight: - | does not show
y = x[:, :1] * torch.ones(6, dtype=x.dtype)
h = self.fc1(x)
h = self.act(y)
h = self.fc2(h)
h = h * 2
h = self.act(h)
return self.fc3(h)

# branch_that_calls: - | does not show
h = self.fc1(x)
if x.sum() > 0:
    h = self.act(h)
return self.fc2(h)

# overridden (nested): - | does not show
return self.fc2(self.fc1(x))

# gates: gated_mlp gated_mlp
x = self.fc3(self.silu(self.fc1(x)) * self.fc2(x))
return self.fc3(self.fc2(x) * self.silu(self.fc1(x)))

# gate_of_relu: gated_mlp
return self.fc3(self.fc1(x).relu() * self.fc2(x))

# gate_in_statements: gated_mlp gated_mlp ~
up = self.fc2(x)
gate = self.fc1(x)
gate = self.silu(gate)
hidden = self.nodrop(up * gate)
x = self.fc3(hidden)
if x.dim() == 2:
    inner = self.silu(self.fc1(x))
    x = self.fc3(inner * self.fc2(x))
return x

# gate_alone: linear_glu
gate = F.gelu(self.fc1(x), approximate="tanh")
return (gate * self.fc2(x)).tanh()

# gate_before_gelu: gated_mlp linear_glu gelu ~
up, gate = torch.chunk(self.both(x), 2, -1)
x = self.fc3(up * self.silu(gate))
return self.act(self.fc3(self.silu(self.fc1(x)) * self.fc2(x)))

# gates_in_a_loop: gated_mlp gated_mlp gated_mlp
for gate, up, down in zip(self.layers, self.layers, self.layers):
    x = x + down(self.silu(gate(x)) * up(x))
return x

# chunks: gated_mlp
gate, up = self.both(x).chunk(2, dim=-1)
return self.fc3(self.silu(gate) * up)

# chunks_up_first: gated_mlp ~
h = self.both(x)
up, h = h.chunk(2, self.axis)
h = up * self.silu(h)
h = self.fc3(h)
return h

# either_half: gated_mlp ~
a, b = self.both(x).chunk(2, self.axis)
h = a * self.silu(b) if self.training else self.silu(a) * b
return self.fc3(h)

# gates_apart: silu silu
gate = self.silu(self.fc1(x))
up = self.fc2(x)
y = self.fc3(gate * up) + gate.sum()
return self.fc3(self.silu(self.fc1(x)) * self.fc2(y))

# something_between_gates: - ~ | something runs before its activation does
x = x.detach() * 1
gate = self.fc1(x)
x.data.mul_(2)
x = F.relu(gate) * self.fc2(x)
other = self.fc1(x)
self.drop(x)
return self.fc3(self.silu(other) * self.fc2(x))

# gates_that_are_none: - ~ | something runs before
named = F.silu(input=self.fc1(input=x))
x = self.fc3(input=named * self.fc2(x))
layer = self.fc1
gate = layer(x)
layer = self.fc2
return self.fc3(self.silu(gate) * layer(x))

# gate_of_another_width: silu ~
return F.silu(self.narrow(x)) * self.fc2(x)

# slice_of_a_sequential (Sequential): mlp
return self.seq[:3](x)

# slices_of_a_sequential (Sequential): relu mlp ~
x = self.seq[:2](x)
part = x * 2
return self.seq[2:5](part)

# slice_by_a_name (Sequential): relu mlp ~
return self.seq[: self.depth + 2](x)

# slice_beside_an_activation (Sequential): mlp gelu ~
return F.gelu(self.seq[2](self.seq[0:3](x)))

# layers_of_a_slice (Sequential): relu relu relu ~
for layer in self.seq[::2]:
    x = F.relu(layer(x))
return x

# one_by_one (Sequential): - ~ | calls its layers one by one
for i, layer in enumerate(self.seq):
    x = layer(x)
for i in range(len(self.seq)):
    x = self.seq[i](x)
return x

# exchanged_layers: relu relu ~
self.fc1, self.fc2 = self.fc2, self.fc1
h = F.relu(self.fc1(x))
h = F.relu(self.fc2(h))
self.fc1, self.fc2 = self.fc2, self.fc1
return h

# no_halves: - | does not show
gate, up, rest = self.both(x).chunk(3, -1)
rest = self.silu(gate) * up + rest
gate, up = self.both(x).chunk(2, -1)
return self.fc3(self.silu(gate) * gate) + up.sum() + rest.sum()

# chunks_of_what_a_layer_reads: - | does not show
h = self.both(x)
y = self.fc1(h[:, :6])
gate, up = h.chunk(2, -1)
return self.fc3(self.silu(gate) * up) + y
'''

HEADER = '''"""Programs of a test."""
import functools

import torch
import torch.nn.functional as F
from torch import nn


def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


def hidden(function):
    return lambda *args: function(*args)


class Stateful:
    times = 0

    def __bool__(self):
        self.times += 1
        return self.times % 2 == 1


class Base(nn.Module):
    form: str = "tanh"
    axis: int = -1

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (nn.Linear(6, 6) for _ in range(3))
        self.act, self.relu, self.silu = nn.GELU(), nn.ReLU(), nn.SiLU()
        self.both, self.fixed = nn.Linear(6, 12), nn.Linear(6, 6).requires_grad_(False)
        self.drop, self.nodrop, self.narrow = nn.Dropout(0.5), nn.Dropout(0.0), nn.Linear(6, 1)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.depth, self.skips, self.times, self.flag = 3, (1,), 0, Stateful()

    @property
    def is_odd(self):
        self.times += 1
        return self.times % 2 == 1


class Sequential(Base):
    def __init__(self):
        super().__init__()
        fc1, fc2, fc3 = (nn.Linear(6, 6) for _ in range(3))
        self.seq = nn.Sequential(fc1, nn.ReLU(), fc2, nn.GELU(), fc3)


class Mixin:
    def mixed(self, x):
        h = self.fc3(x)
        return F.relu(h)
'''


class Program(NamedTuple):
    name: str
    bases: str
    operators: list[str]
    has_other_graph: bool
    reason: str
    body: str

    def source(self) -> str:
        body = self.body
        if body != "pass" and not re.search(r"^def \w+\((self|this)", body, re.MULTILINE):
            body = f"def forward(self, x):\n{textwrap.indent(body, '    ')}"
        return f"class {self.name}({self.bases}):\n{textwrap.indent(body, '    ')}\n"


SHORT = {name: f"linear_{name}" for name in ("relu", "relu2", "gelu", "silu")}


def parsed(text: str) -> list[Program]:
    found = []
    for head, body in re.findall(r"^# (.*)\n((?:(?!^# ).*\n)+)", text, re.MULTILINE):
        form = r"(\w+)(?: \((.*)\))?: (.*?)( ~)?(?: \| (.*))?$"
        name, bases, operators, other, reason = re.match(form, head).groups()
        names = [SHORT.get(word, word) for word in operators.split() if word != "-"]
        code = body.strip("\n")
        found.append(Program(name, bases or "Base", names, bool(other), reason or "", code))
    return found


PROGRAMS = {program.name: program for program in parsed(TEXT)}


def all_programs(folder: Path) -> ModuleType:
    """The module of all programs, from a file of their classes."""
    sources = [program.source() for program in PROGRAMS.values()]
    return module_of(folder / "all_programs.py", "\n\n".join([HEADER, *sources]))


def module_of(path: Path, text: str) -> ModuleType:
    """A module from a file that gets this text."""
    path.write_text(text)
    return module_at(path)
