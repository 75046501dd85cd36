"""The operators: a row for each, beside its definition in torch, and arguments to try it with.

A test of a property takes rows: `op.call`, `op.function` and `op.eager` take the same tensors,
which `op.case()` draws. A new operator, or a new form of one, joins all of these tests by its row.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from watching import Calls

import torch_fused_linear as tfl

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LOW_DTYPES = DTYPES[1:]
POLICIES = ["auto", "cublaslt", "eager"]
# The exceptions of TORCH_CHECK and its kin.
ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError)

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda z: F.relu(z),
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "gelu_erf": lambda z: F.gelu(z),
    "silu": lambda z: F.silu(z),
    "relu2": lambda z: F.relu(z).square(),
}

Shapes = list[tuple[int, ...]]


# --- arguments -----------------------------------------------------------------------------------


@dataclass
class Case:
    """The tensors of one call and the gradient that arrives for its output."""

    inputs: list[Tensor]
    g: Tensor

    @classmethod
    def of(cls, x: Tensor, w: Tensor, b: Tensor | None, g: Tensor) -> Case:
        return cls([x, w] + ([] if b is None else [b]), g)

    @property
    def x(self) -> Tensor:
        return self.inputs[0]

    @property
    def w(self) -> Tensor:
        return self.inputs[1]

    @property
    def b(self) -> Tensor | None:
        return self.inputs[2] if len(self.inputs) > 2 else None

    def leaves(self, wanted: Sequence[bool] | None = None) -> list[Tensor]:
        """Copies in the same layout, those that are `wanted` (by default all) with a gradient."""
        wanted = wanted or [True] * len(self.inputs)
        return [t.detach().clone().requires_grad_(r) for t, r in zip(self.inputs, wanted)]

    def map(self, change: Callable[[Tensor], Tensor]) -> Case:
        return Case([change(t) for t in self.inputs], change(self.g))


def subsets(count: int) -> list[tuple[bool, ...]]:
    """Every one of up to three tensors; of more none, each, all but one and all."""
    every = itertools.product([False, True], repeat=count)
    return [s for s in every if count <= 3 or sum(s) in (0, 1, count - 1, count)]


@dataclass(frozen=True, eq=False)
class Op:
    """An operator in one of its forms.

    Attributes:
        label: what its tests are called by.
        name: of ``torch.ops.fused``.
        activation: the one that it applies.
        call, function, eager: the operator, the function of the package, the definition in torch.
        shapes: of the tensors, from the leading dimensions and the sizes of input and output.
        biases: so many of the tensors, the last ones, may be left out.
        product: what the activation is applied to, of operators that are one layer.
    """

    label: str
    name: str
    activation: str
    call: Callable[..., Tensor]
    function: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    shapes: Callable[[tuple[int, ...], int, int], Shapes]
    biases: int = 1
    product: Callable[..., Tensor] | None = None

    def __repr__(self) -> str:
        return self.label

    def act(self, z: Tensor) -> Tensor:
        return z if self.activation == "none" else ACTS[self.activation](z)

    def _shapes(self, lead, i, o, bias) -> tuple[Shapes, int, tuple[int, ...]]:
        """The shapes of the tensors, how many are no biases, and the output's shape."""
        lead = (lead,) if isinstance(lead, int) else tuple(lead)
        shapes = self.shapes(lead, i, o)
        weights = len(shapes) - self.biases
        return shapes if bias else shapes[:weights], weights, _output(self, lead, i, o)

    def case(
        self, lead=(3,), i=4, o=5, dtype=torch.float64, device="cpu", bias=True, seed=0
    ) -> Case:
        """Normal data, weights scaled so that products have magnitude 1, as in a trained layer."""
        gen = torch.Generator().manual_seed(seed)

        def normal(shape, scale=1.0):
            values = torch.randn(shape, generator=gen, dtype=torch.float64) * scale
            return values.to(device=device, dtype=dtype)

        shapes, weights, output = self._shapes(lead, i, o, bias)
        scales = [1.0, *(1 / math.sqrt(max(math.prod(s[1:]), 1)) for s in shapes[1:weights])]
        scales += [1.0] * (len(shapes) - weights)
        return Case([normal(s, scale) for s, scale in zip(shapes, scales)], normal(output))

    def smooth_case(self, *args, **options) -> Case:
        """fp64 data that keeps clear of ReLU's kink, so that finite differences mean something."""
        for seed in itertools.count(options.pop("seed", 0)):
            case = self.case(*args, **options, seed=seed)
            if all(z.abs().min() > 1e-2 for z in _rectified(self, case) if z.numel()):
                return case

    def exact_case(self, lead, i, o, dtype, device="cpu", bias=True, seed=0) -> Case:
        """Small integers (and half-integer biases, so that no sum with a bias is 0).

        Every sum is then exact in every dtype, TF32 too, in whatever order it is taken: a layer
        without a smooth activation must equal the fp64 result bit for bit, forward and backward.
        """
        gen = torch.Generator().manual_seed(seed)

        def integers(low, high, shape):
            values = torch.randint(low, high + 1, shape, generator=gen, dtype=torch.int64)
            return values.to(dtype=dtype).to(device)

        shapes, weights, output = self._shapes(lead, i, o, bias)
        inputs = [integers(-1, 1, s) for s in shapes[:weights]]
        g = integers(-1, 1, output)
        return Case([*inputs, *(integers(-3, 2, s) + 0.5 for s in shapes[weights:])], g)


@functools.cache  # torch takes milliseconds to foretell one
def _output(op: Op, lead: tuple[int, ...], i: int, o: int) -> tuple[int, ...]:
    return op.eager(*(torch.empty(s, device="meta") for s in op.shapes(lead, i, o))).shape


def _rectified(op: Op, case: Case) -> list[Tensor]:
    """ReLU's inputs, in fp64."""
    with torch.no_grad(), Calls() as calls:
        op.eager(*(t.double() for t in case.inputs))
    pairs = zip(calls.names, calls.arguments)
    return [args[0] for name, args in pairs if name == "aten::relu"]


def without_kinks(op: Op, case: Case) -> Case:
    """Returns the case with a zero gradient where ReLU's input is within rounding of 0.

    There the sign, and with it ReLU's derivative, is a matter of rounding and no error.
    """
    g = case.g
    for z in _rectified(op, case):
        near = z.abs() <= 4 * torch.finfo(g.dtype).eps * (1 + z.abs().mean())
        g = g.masked_fill(near if near.shape == g.shape else near.any(-1, keepdim=True), 0)
    return Case(case.inputs, g)


# --- the rows ------------------------------------------------------------------------------------


def _row(label, name, activation, call, eager, shapes, **fields) -> Op:
    """`call` is given the functions of a namespace first: of the operators, or of the package."""

    def of(functions):
        return lambda *tensors, **more: call(functions, *tensors, **more)

    return Op(label, name, activation, of(torch.ops.fused), of(tfl), eager, shapes, **fields)


def linear(activation: str, label: str = "", **options) -> Op:
    """A linear layer with its activation; options: those of the operator."""
    name = "linear" if activation == "none" else f"linear_{activation.partition('_')[0]}"
    if name == "linear_gelu":
        options["approximate"] = {"gelu_tanh": "tanh", "gelu_erf": "none"}[activation]
    act = ACTS.get(activation, lambda z: z)

    def call(functions, x, w, b=None, **more):
        return getattr(functions, name)(x, w, b, **options, **more)

    def eager(x, w, b=None):
        return act(F.linear(x, w, b))

    def shapes(lead, i, o):
        return [(*lead, i), (o, i), (o,)]

    return _row(label or activation, name, activation, call, eager, shapes, product=F.linear)


# How gate and up are given. "halves" are two views of one weight, gate first.
FORMS = ("apart", "stacked", "halves", "up first")


def _gate_and_up(form: str, weights: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    if form == "apart":
        return tuple(weights) or (None, None)
    if not weights or weights[0] is None or form == "stacked":
        return (weights[0] if weights else None), None
    halves = weights[0].chunk(2)
    return halves if form == "halves" else halves[::-1]


def gated(
    form: str, activation: str, down: bool = False, hidden: int | None = None, **options
) -> Op:
    """linear_glu, or with `down` gated_mlp; `hidden`: the block's inner size, by default one more
    than its output's."""
    name, each = "gated_mlp" if down else "linear_glu", 2 if form == "apart" else 1

    def split(tensors):
        x, tensors = tensors[0], tensors[1:]
        weights, tensors = tensors[:each], tensors[each:]
        ends = tensors[:1] if down else ()
        biases = tensors[len(ends) :]
        last = biases[each] if down and biases else None
        return x, weights, ends, biases[:each], last

    def call(functions, *tensors, **more):
        x, weights, ends, biases, last = split(tensors)
        given = (*_gate_and_up(form, weights), *ends, *_gate_and_up(form, biases))
        given += (last,) if down else ()
        how = {"activation": activation, **options, **more}
        return getattr(functions, name)(x, *given, **how)

    def eager(*tensors):
        x, weights, ends, biases, last = split(tensors)
        (gate, up), (gate_bias, up_bias) = (_gate_and_up(form, t) for t in (weights, biases))
        z = F.linear(x, gate, gate_bias)
        first, second = z.chunk(2, -1) if up is None else (z, F.linear(x, up, up_bias))
        y = ACTS[activation](first) * second
        return F.linear(y, ends[0], last) if down else y

    def shapes(lead, i, o):
        inner = (o + 1 if hidden is None else hidden) if down else o
        rows = [inner] * 2 if form == "apart" else [2 * inner]
        weights, biases = [(n, i) for n in rows], [(n,) for n in rows]
        if down:
            weights, biases = [*weights, (o, inner)], [*biases, (o,)]
        return [(*lead, i), *weights, *biases]

    label = f"{'block' if down else 'glu'} {form} {activation}{_suffix(options)}"
    return _row(label, name, activation, call, eager, shapes, biases=each + down)


def mlp(activation: str, layers: int, widths: Sequence[int] = (), **options) -> Op:
    """A chain; `widths`: of its hidden layers, by default all different."""

    def split(tensors):
        weights = tensors[1 : layers + 1]
        return tensors[0], list(weights), list(tensors[layers + 1 :]) or [None] * layers

    def call(functions, *tensors, **more):
        return functions.mlp(*split(tensors), activation, **options, **more)

    def eager(*tensors):
        x, weights, biases = split(tensors)
        for w, b in zip(weights[:-1], biases[:-1]):
            x = ACTS[activation](F.linear(x, w, b))
        return F.linear(x, weights[-1], biases[-1])

    def shapes(lead, i, o):
        sizes = [i, *(widths or range(i + 1, i + layers)), o]
        weights = [(b, a) for a, b in itertools.pairwise(sizes)]
        return [(*lead, i), *weights, *((n,) for n in sizes[1:])]

    label = f"mlp {activation} of {layers}{_suffix(options)}"
    return _row(label, "mlp", activation, call, eager, shapes, biases=layers)


def stack(activation: str, layers: int, widths: Sequence[int] = (), **options) -> Op:
    """A chain of layers, each an operator of its own."""
    chain, layer = mlp(activation, layers, widths), linear(activation, **options)

    def call(functions, x, *parameters):
        hidden = layer.call if functions is torch.ops.fused else layer.function
        weights, biases = parameters[:layers], parameters[layers:] or [None] * layers
        for w, b in zip(weights[:-1], biases[:-1]):
            x = hidden(x, w, b)
        return functions.linear(x, weights[-1], biases[-1])

    label = f"stack {activation} of {layers}{_suffix(options)}"
    return _row(label, layer.name, activation, call, chain.eager, chain.shapes, biases=layers)


def pair(form: str, activation: str, hidden: int | None = None, **options) -> Op:
    """linear_glu, and a linear layer of its own after it."""
    block, first = gated(form, activation, True, hidden), gated(form, activation, **options)
    each = first.biases

    def call(functions, x, *tensors):
        glu = first.call if functions is torch.ops.fused else first.function
        weights, down, biases = tensors[:each], tensors[each], tensors[each + 1 :]
        return functions.linear(glu(x, *weights, *biases[:each]), down, *biases[each:])

    label = f"pair {form} {activation}{_suffix(options)}"
    return _row(label, first.name, activation, call, block.eager, block.shapes, biases=each + 1)


def conv(
    label: str = "conv",
    batch: int | None = 2,  # None: an image without a batch
    channels: int = 4,
    out: int = 6,
    size: tuple[int, int] = (7, 6),
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Op:
    """A convolution, whose sizes are those of the row."""
    geometry = (stride, padding, dilation, groups)

    def call(functions, x, w, b=None):
        return functions.conv2d_relu(x, w, b, *geometry)

    def product(x, w, b=None):
        return F.conv2d(x, w, b, *geometry)

    def eager(x, w, b=None):
        return F.relu(product(x, w, b))

    def shapes(lead, i, o):
        images = () if batch is None else (batch,)
        return [(*images, channels, *size), (out, channels // groups, *kernel), (out,)]

    return _row(label, "conv2d_relu", "relu", call, eager, shapes, product=product)


def _suffix(options: dict) -> str:
    return "".join(f" {value}" for value in options.values())


LINEAR, RELU, GELU_TANH, GELU_ERF, SILU, RELU2 = OPS = [linear(a) for a in ("none", *ACTS)]
SMOOTH = [op for op in OPS if op not in (LINEAR, RELU)]  # not exact on integers
LOW = [linear(a, f"{a} low", memory="low") for a in ("relu", "gelu_tanh", "silu")]
# Every form of a gated layer and block, and every activation.
GATED = [
    gated(form, activation, down)
    for down in (False, True)
    for form, activation in zip(FORMS, ("silu", "gelu_tanh", "gelu_erf", "relu"))
]
GATED += [gated("apart", "relu2"), gated("apart", "relu2", down=True)]
GATED += [gated("apart", "silu", down, memory="low") for down in (False, True)]
CHAINS = [mlp(activation, layers) for activation, layers in zip(ACTS, (3, 3, 4, 3, 2))]
CHAINS += [mlp("relu", 1), mlp("gelu_tanh", 3, memory="low"), mlp("relu", 3, memory="low")]
CONV = conv(channels=4, out=4, size=(4, 3), kernel=(2, 2), padding=(1, 0), groups=2)
STACKS = [stack("relu", 3), *(stack(a, 3, memory="low") for a in ("relu", "gelu_tanh"))]
STACKS += [pair("apart", "silu"), pair("halves", "gelu_erf", memory="low")]
EVERY = [*OPS, *LOW, *GATED, *CHAINS, *STACKS, CONV]

# Each way in which a convolution can be odd; the last ones as they stand in ResNets, but small.
ODD = {
    op.label: op
    for op in (
        conv("plain"),
        conv("padded", padding=(1, 2)),
        conv("strided", size=(9, 8), stride=(2, 3), padding=(1, 1)),
        conv("stride beyond the kernel", size=(11, 12), kernel=(2, 3), stride=(4, 5)),
        conv("dilated", size=(9, 10), dilation=(2, 3)),
        conv("1x1", kernel=(1, 1)),
        conv("1x1 strided", kernel=(1, 1), stride=(2, 2)),
        conv("kernel as large as the image", kernel=(7, 6)),
        conv("uneven kernel", kernel=(1, 4), padding=(0, 2)),
        conv("padding beyond the kernel", kernel=(2, 2), padding=(3, 3)),
        conv("groups", channels=6, groups=3),
        conv("depthwise", channels=6, groups=6, out=12, padding=(1, 1)),
        conv("one channel", channels=1, out=1),
        conv("odd channels", channels=3, out=7),
        conv("one pixel", size=(1, 1), kernel=(1, 1)),
        conv("one image", batch=1, padding=(1, 1)),
        conv("no batch", batch=None, padding=(1, 1)),
        conv(
            "groups, strided, dilated",
            size=(12, 11),
            groups=2,
            stride=(2, 1),
            padding=(2, 3),
            dilation=(2, 1),
        ),
        conv(
            "stem", channels=3, out=16, size=(16, 16), kernel=(7, 7), stride=(2, 2), padding=(3, 3)
        ),
        conv("block", batch=4, channels=16, out=16, size=(8, 8), padding=(1, 1)),
        conv("wide", batch=3, channels=32, out=64, size=(7, 7), kernel=(1, 1)),
    )
}
LAST = torch.channels_last


def channels_last(case: Case, which: str) -> Case:
    """With those of "x", "w" and "g" in that memory format, as far as they are images."""

    def laid(letter: str, tensor: Tensor) -> Tensor:
        is_last = letter in which and tensor.dim() == 4
        return tensor.to(memory_format=LAST) if is_last else tensor

    x, w, *bias = case.inputs
    return Case([laid("x", x), laid("w", w), *bias], laid("g", case.g))


def rows(ops: Sequence[Op]):
    return pytest.mark.parametrize("op", ops, ids=repr)


op_param, every_op = rows(OPS), rows(EVERY)
dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
policy_param = pytest.mark.parametrize("policy", POLICIES)
