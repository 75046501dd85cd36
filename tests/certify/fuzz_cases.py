"""Random calls of the fused operators, one after the other, with all that can vary about them.

The operators are rows of tests/support/operators.py. Their definition in torch is run as it is, in
fp64, and under modes that find out the scale of its errors and how near it comes to ReLU's kink.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import operators
import torch
import torch.nn.functional as F
from layouts import MATRIX_LAYOUTS, VECTOR_LAYOUTS
from operators import Op
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import torch_fused_linear as tfl

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SAFE = ("contiguous", "transposed", "row_strided", "column_strided", "offset")
TINY = (1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65)
SMOOTH = ("silu", "gelu_tanh", "gelu_erf")
GATED = ("linear_glu", "gated_mlp")
# The operators of vectors, with their activations.
OPERATORS = {
    "linear": ("none",),
    "linear_relu": ("relu",),
    "linear_gelu": ("gelu_tanh", "gelu_erf"),
    "linear_silu": ("silu",),
    "linear_relu2": ("relu2",),
    "mlp": ("relu", "relu2", *SMOOTH),
    # without ReLU: behind its product with the other half, its kink is not looked for
    "linear_glu": ("relu2", *SMOOTH),
    "gated_mlp": ("relu2", *SMOOTH),
}


def row(name: str, activation: str, memory: str, sizes: Sequence[int], form: str) -> Op:
    if name == "mlp":
        return operators.mlp(activation, len(sizes) - 1, sizes[1:-1], memory=memory)
    if name in GATED:
        return operators.gated(form, activation, name == "gated_mlp", sizes[1], memory=memory)
    options = {} if activation == "none" else {"memory": memory}
    return operators.linear(activation, f"{activation} {memory}", **options)


# --- modes ---------------------------------------------------------------------------------------

PRODUCTS, ACTIVATIONS = (F.linear, F.conv2d), (F.relu, F.gelu, F.silu)


class Bare(TorchFunctionMode):
    """Sums of absolute values, the errors' scale: without the activations, whose slope is about 1
    at most, but for the square."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func in ACTIVATIONS else func(*args, **(kwargs or {}))


class Kinks(TorchFunctionMode):
    """Runs in fp64 and keeps ReLU's inputs away from 0.

    Near 0 the sign of a pre-activation, and with it ReLU's derivative, is a matter of rounding and
    no error. Channels of a hidden layer that come near are cut off in the next weight; `near` is
    where the inputs of a ReLU do, by its result.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.near: dict[int, Tensor] = {}
        self.products_near: dict[int, Tensor] = {}
        self.variances: dict[int, Tensor] = {}
        self.alive: list[Tensor] = []  # so that no id is given twice

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            return self.product(func, *args)
        h = func(*args, **(kwargs or {}))
        of_args = [self.variances.get(id(t)) for t in args]
        if func in ACTIVATIONS:
            self.keep(h, of_args[0])
        elif func == Tensor.square:
            self.keep(h, of_args[0] * (2 * args[0]).square() + 2 * h.square())
        elif func == Tensor.mul:
            of_gate, of_up = (v * t.square() for v, t in zip(of_args, reversed(args)))
            self.keep(h, of_gate + of_up + 2 * h.square())
        elif func == Tensor.chunk:
            for half, variance in zip(h, of_args[0].chunk(2, -1)):
                self.keep(half, variance)
        if func == F.relu and (near := self.products_near.get(id(args[0]))) is not None:
            self.near[id(h)] = near
        return h

    def keep(self, t: Tensor, variance: Tensor) -> None:
        self.variances[id(t)] = variance
        self.alive.append(t)

    def product(self, func, given: Tensor, weight: Tensor, bias: Tensor | None, *geometry):
        def product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            return func(x, w, b, *geometry)

        is_conv = func == F.conv2d
        if (near := self.near.get(id(given))) is not None and near.any():
            near = near.movedim(-3 if is_conv else -1, 0)
            weight[:, near.reshape(len(near), near[:1].numel()).any(1)] = 0
        u = torch.finfo(self.dtype).eps / 2
        wide, x = weight.double(), given.double()
        z = product(x, wide, None if bias is None else bias.double())
        # of the operand's roundings, and of a sum in fp32
        squares, sums = wide.square(), min(1.0, 2.0**-24 / u) ** 2 * self.roundings(weight)
        before = self.variances.get(id(given), torch.zeros_like(x))
        variance = product(1.3 * before + sums * x.square(), squares, None)
        near = z.abs() <= 6 * u * variance.sqrt()
        # Eager adds some biases to a rounded product, on a GPU that of every convolution.
        rounds_first = bias is not None and is_conv
        if not is_conv:
            differs = product(given.to(self.dtype), weight, bias).sign() != z.sign()
            rounds_first = bias is not None and bool((differs & ~near).any())
            near |= differs
        if rounds_first:
            near |= z.abs() <= u * product(x, wide, None).abs()
        self.products_near[id(z)] = near
        self.keep(z, variance + 2 * z.square())
        return z

    def roundings(self, weight: Tensor) -> float:
        """How many a sum's variance is of. Tensor cores always cut off towards 0: there they add up
        instead of cancelling each other."""
        n = max(1, weight[:1].numel())
        return n + (n / 8) ** 2 if weight.is_cuda and self.dtype.itemsize == 2 else n


# --- cases ---------------------------------------------------------------------------------------


@dataclass
class Layer:
    """One call of an operator."""

    op: Op
    tensors: list[Tensor | None]  # weights and biases


@dataclass
class Case:
    """A chain of layers, what it is called with, and under which settings."""

    x: Tensor
    layers: list[Layer]
    grad: Tensor
    wanted: list[bool]  # of x and every parameter, whether it requires a gradient
    mode: str
    policy: str
    through_ops: bool
    deterministic: bool
    calls_backward: bool
    words: str  # of how the operands lie, for the report
    is_finite: bool = True
    keeping: str = "as it is"  # what is saved for the backward: so, by checkpoints, through hooks
    added_to: str = ""  # the dtype of a gradient that is there, to which backward() adds

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x, *(t for layer in self.layers for t in layer.tensors if t is not None)]

    @property
    def is_systematic(self) -> bool:
        """Returns whether each sum has equal terms, whose roundings are alike: no statistics."""
        words = re.findall(r"(x|weight) same_(?:columns|everywhere)", self.words)
        return {"x", "weight"} <= set(words)

    @property
    def longest_sum(self) -> int:
        return max((w[:1].numel() for w in self.tensors[1:]), default=1)

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Layer]]:
        """Returns the same calls on other tensors."""
        left = iter(tensors)
        return next(left), [
            Layer(layer.op, [None if t is None else next(left) for t in layer.tensors])
            for layer in self.layers
        ]

    def __str__(self) -> str:
        layers = []
        for layer in self.layers:
            shapes = [None if t is None else tuple(t.shape) for t in layer.tensors]
            layers.append(f"{layer.op.name}({layer.op!r}, {shapes})")
        wanted = "".join("1" if w else "0" for w in self.wanted)
        flags = [self.mode, self.policy, "torch.ops" if self.through_ops else "functions"]
        flags += ["deterministic"] if self.deterministic else []
        flags += ["backward()"] if self.calls_backward else []
        flags += [] if self.keeping == "as it is" else [self.keeping]
        flags += [f"added to {self.added_to}"] if self.added_to else []
        return (
            f"{str(self.x.dtype)[6:]} {tuple(self.x.shape)} {' '.join(layers)} wanted {wanted}, "
            f"{', '.join(flags)}; {self.words}"
        )


def plain(x: Tensor, layers: Sequence[Layer]) -> Tensor:
    for layer in layers:
        x = layer.op.eager(x, *layer.tensors)
    return x


def one_of_ours(x: Tensor, layer: Layer, through_ops: bool) -> Tensor:
    return (layer.op.call if through_ops else layer.op.function)(x, *layer.tensors)


def ours(case: Case, x: Tensor, layers: Sequence[Layer]) -> Tensor:
    def call(x: Tensor, layers: Sequence[Layer]) -> Tensor:
        for layer in layers:
            x = one_of_ours(x, layer, case.through_ops)
        return x

    if case.keeping == "as it is":
        return call(x, layers)
    if case.keeping == "offloaded":
        with saved_tensors_hooks(lambda saved: [saved.clone()], lambda kept: kept[0]):
            return call(x, layers)
    parts = [layers] if case.keeping == "one checkpoint" else [[layer] for layer in layers]
    for part in parts:
        x = checkpoint(call, x, part, use_reentrant=False, preserve_rng_state=False)
    return x


class Draw:
    """Draws one case; the same seed and number give the same one on every machine."""

    def __init__(self, seed: int, unit: int, device: str) -> None:
        self.choice = random.Random(f"{seed} {unit}")
        self.gen = torch.Generator().manual_seed(self.choice.getrandbits(48))
        self.device = device
        self.dtype = self.choice.choices(DTYPES, (40, 25, 25, 10))[0]
        self.words: list[str] = []

    def chance(self, part: float) -> bool:
        return self.choice.random() < part

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, generator=self.gen) * scale
        return values.to(device=self.device, dtype=self.dtype)

    def laid_out(self, t: Tensor, name: str, layouts: Sequence[str], table: dict) -> Tensor:
        if t.numel() == 0 or t.dim() == 0 or self.chance(0.5):
            return t
        layout = self.choice.choice(layouts)
        self.words.append(f"{name} {layout}")
        return table[layout](t)

    def matrix(self, t: Tensor, name: str, keeps_values: bool = False) -> Tensor:
        if t.dim() < 2:
            return self.laid_out(t, name, list(VECTOR_LAYOUTS), VECTOR_LAYOUTS)
        layouts = SAFE if keeps_values else list(MATRIX_LAYOUTS)
        return self.laid_out(t, name, layouts, MATRIX_LAYOUTS)

    # --- sizes -----------------------------------------------------------------------------------

    def sizes(self) -> tuple[tuple[int, ...], list[int]]:
        """The leading sizes of the input and the widths of what may follow."""
        kind = self.choice.random()
        if kind < 0.0002:  # so large that a CPU's gradients are taken block by block
            return (2048,), [3, 2100]
        if kind < 0.01:  # so large that a CPU's products may go to oneDNN, a GPU's to its kernels
            widths = [self.choice.randrange(128, 520) for _ in range(3)]
            return (self.choice.randrange(128, 400),), widths
        if kind < 0.15:
            lead = (self.choice.randrange(1, 100),)
            widths = [self.choice.randrange(1, 200) for _ in range(6)]
        else:
            lead = tuple(
                self.choice.choice(TINY[:16]) for _ in range(self.choice.choice((0, 1, 1, 1, 2)))
            )
            widths = [self.choice.choice(TINY) for _ in range(6)]
        if lead and self.chance(0.03):
            lead = (*lead[:-1], 0)
        if self.chance(0.03):
            widths[self.choice.randrange(len(widths))] = 0
        return lead, widths

    # --- layers ----------------------------------------------------------------------------------

    def bias(self, out: int) -> Tensor | None:
        if self.chance(0.25):
            return None
        t = self.normal(out, scale=self.choice.choice((1.0, 1.0, 0.1)))
        return self.laid_out(t, "bias", list(VECTOR_LAYOUTS), VECTOR_LAYOUTS)

    def weight(self, out: int, inner: int, first: bool) -> Tensor:
        t = self.normal(out, inner, scale=1 / math.sqrt(max(inner, 1)))
        return self.matrix(t, "weight", keeps_values=not first)

    def linear_layers(self, widths: list[int]) -> list[Layer]:
        layers, inner = [], widths.pop(0)
        for number in range(self.choice.choice((1, 1, 1, 2, 2, 3))):
            if not widths:
                break
            name = self.choice.choice(list(OPERATORS))
            is_gated = name in GATED
            form = "stacked" if is_gated and self.chance(0.4) else "apart"
            count = {"mlp": self.choice.choice((1, 2, 2, 3)), "gated_mlp": 2}.get(name, 1)
            if len(widths) < count:
                break
            sizes, widths[:count] = [inner, *widths[:count]], []
            any_row = row(name, OPERATORS[name][0], "default", sizes, form)
            tensors = [
                self.bias(*shape)
                if len(shape) == 1
                else self.weight(*shape, first=number == 0 and (k == 0 or is_gated))
                for k, shape in enumerate(any_row.shapes((), inner, sizes[-1])[1:])
            ]
            inner = sizes[-1]
            activation = self.choice.choice(OPERATORS[name])
            memory = self.choice.choice(("default", "default", "low"))
            layers.append(Layer(row(name, activation, memory, sizes, form), tensors))
        return layers

    def convolution(self) -> tuple[Tensor, list[Layer]]:
        choice = self.choice
        batch, channels = choice.choice((1, 2, 3, 5)), choice.choice((1, 2, 3, 4, 6, 8, 16))
        size = [choice.randrange(1, 15) for _ in range(2)]
        images = self.normal(batch, channels, *size)
        if self.chance(0.1):
            images = images[0]
        layers = []
        for number in range(choice.choice((1, 1, 2))):
            kernel = [choice.choice((1, 1, 2, 3, 3, 5)) for _ in range(2)]
            padding, dilation, stride = [], [], []
            for k in range(2):
                dilation.append(choice.choice((1, 1, 1, 2)))
                reach = dilation[k] * (kernel[k] - 1) + 1
                padding.append(max(choice.randrange(0, 3), -(-(reach - size[k]) // 2)))
                stride.append(choice.choice((1, 1, 2, 3)))
                size[k] = (size[k] + 2 * padding[k] - reach) // stride[k] + 1
            groups = choice.choice([g for g in (1, 1, 1, 2, channels) if channels % g == 0])
            groups = 1 if number else groups  # whose channels can be cut off
            out = groups * choice.choice((1, 2, 3, 4, 8))
            inner = channels // groups
            scale = 1 / math.sqrt(inner * math.prod(kernel))
            weight = self.image(self.normal(out, inner, *kernel, scale=scale), "weight")
            geometry = {"stride": stride, "padding": padding, "dilation": dilation}
            op = operators.conv(f"{geometry}", **geometry, groups=groups)
            layers.append(Layer(op, [weight, self.bias(out)]))
            channels = out
        return self.image(images, "x"), layers

    def image(self, t: Tensor, name: str) -> Tensor:
        if t.dim() == 4 and self.chance(0.4):
            self.words.append(f"{name} channels-last")
            return t.to(memory_format=torch.channels_last)
        return self.matrix(t, name, keeps_values=True)

    # --- the whole -------------------------------------------------------------------------------

    def case(self) -> Case:
        choice = self.choice
        if self.chance(0.12):
            x, layers = self.convolution()
        else:
            lead, widths = self.sizes()
            x = self.matrix(self.normal(*lead, widths[0]), "x")
            layers = self.linear_layers(widths)
        with torch.no_grad(), Kinks(self.dtype) as kinks:
            result = plain(x, layers)
        g = self.normal(*result.shape)
        if (near := kinks.near.get(id(result))) is not None and near.any():
            g = g.masked_fill(near, 0)
        else:
            keeps = bool(layers and layers[0].op.name == "conv2d_relu")
            g = self.image(g, "grad") if keeps else self.matrix(g, "grad")
        count = 1 + sum(t is not None for layer in layers for t in layer.tensors)
        case = Case(
            x,
            layers,
            g,
            wanted=[self.chance(0.8) for _ in range(count)],
            mode=choice.choices(("grad", "no_grad", "inference_mode"), (8, 1, 1))[0],
            policy=choice.choices(("auto", "cublaslt", "eager"), (6, 3, 1))[0],
            through_ops=self.chance(0.4),
            deterministic=self.chance(0.1),
            calls_backward=self.chance(0.5),
            words=", ".join(self.words),
        )
        if self.chance(0.02) and x.numel() and "x" not in case.words.replace("expand", ""):
            value = choice.choice((math.nan, math.inf, -math.inf))
            case.x.view(-1)[choice.randrange(x.numel())] = value
            case.words += f"; {value} in x"
            case.is_finite = False
        if self.chance(0.3):
            case.keeping = choice.choice(("checkpoints", "one checkpoint", "offloaded"))
        if case.calls_backward and self.chance(0.3):
            case.added_to = choice.choice(("its dtype", "float32"))
        return case


@contextlib.contextmanager
def settings(case: Case):
    """The settings of a case, put back at the end."""
    before = torch.are_deterministic_algorithms_enabled()
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    mode = modes.get(case.mode, contextlib.nullcontext)
    torch.use_deterministic_algorithms(case.deterministic, warn_only=True)
    try:
        with tfl.set_policy(case.policy), mode():
            yield
    finally:
        torch.use_deterministic_algorithms(before)
