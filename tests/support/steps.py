"""The operators under the public ones, with arguments: what is kept, and the backward's steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from operators import ACTS, LAST, LINEAR, RELU, Op, conv, gated, linear, mlp
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from torch_fused_linear.activations import NUMBERS

fused = torch.ops.fused


def decode_mask(mask: Tensor, width: int) -> Tensor:
    """Every bit of ReLU's saved mask [*, width / 8] as a bool [*, width]."""
    bits = (mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device)) & 1
    return bits.flatten(-2)[..., :width].bool()


def encode_mask(bits: Tensor) -> Tensor:
    """The library's mask layout: bit o & 7 of byte o >> 3, rows padded with 0 to 128 bits."""
    bits = F.pad(bits.to(torch.uint8), (0, -bits.shape[-1] % 128)).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1).to(torch.uint8)


def padded(z: Tensor) -> Tensor:
    """Pads rows to a multiple of 8 elements, as an epilogue does."""
    return F.pad(z, (0, -z.shape[-1] % 8))[..., : z.shape[-1]]


def saved_for(activation: str, z: Tensor) -> dict[str, Tensor]:
    """Every form in which a layer may have kept what its activation's derivative needs."""
    if activation == "none":
        return {}
    if activation == "relu":
        return {"output": F.relu(z), "mask": encode_mask(z >= 0)}
    return {"rows": z, "padded": padded(z)}


Args = tuple[tuple, dict]
SHAPES = [((5,), 7, 9), ((2, 3), 8, 16), ((), 4, 129), ((1,), 1, 1)]  # leading, in, out


def _aux(x, w, b, g) -> Iterator[Args]:
    for activation, bias in itertools.product(ACTS, (b, None)):
        yield (x, w, bias, NUMBERS[activation]), {}


def _glu_aux(x, w, b, g) -> Iterator[Args]:
    yield (x, w, w * 0.5, b, None, NUMBERS["silu"], True), {}
    yield (x, torch.cat([w, w * 0.5]), None, None, None, NUMBERS["gelu_erf"], True), {}
    yield (x, w, w * 0.5, None, b, NUMBERS["gelu_tanh"], False), {}


def _activation_backward(x, w, b, g) -> Iterator[Args]:
    for activation in ("none", *ACTS):
        for saved in saved_for(activation, g.cos()).values() or [g.cos()]:
            yield (g, saved, NUMBERS[activation], g.shape[-1] != 16), {}


def _backward(x, w, b, g) -> Iterator[Args]:
    for activation in ("none", *ACTS):
        for saved in saved_for(activation, g.cos()).values() or [None]:
            yield (g, x, w, saved, NUMBERS[activation], [True, True, g.shape[-1] != 16]), {}
    yield (g, x, w, F.relu(g), NUMBERS["relu"], [False, True, False]), {}


def _weight_gradient(x, w, b, g) -> Iterator[Args]:
    for input, into in ((x, w), (None, b)):
        yield from (((g, input, into.detach().clone(), adds), {}) for adds in (True, False))


def _ensemble(x, w, b, g) -> Iterator[Args]:
    rows = x.reshape(-1, x.shape[-1])
    stacked = [torch.stack([t, t.cos()]) for t in (rows, w, b)]
    for activation in ("none", *ACTS):
        yield (*stacked, NUMBERS[activation]), {}
    yield (*stacked[:2], None, NUMBERS["relu"]), {}


def _across(x, w, b, g) -> Iterator[Args]:
    bias = x.shape[-1] != 8
    for previous in ACTS:
        for kept in saved_for(previous, x.sin()).values():
            for own, saved in (("none", None), ("gelu_tanh", g.cos()), ("relu", g.relu())):
                wanted = [True, g.shape[-1] != 9, bias]
                layer = g, x, w, saved, NUMBERS[own], wanted
                yield (*layer, kept, NUMBERS[previous], bias), {}


def _halves(g) -> Iterator[tuple[Tensor, Tensor | None, int]]:
    yield g, g.cos(), NUMBERS["silu"]
    yield torch.cat([g, g.cos()], -1), None, NUMBERS["gelu_erf"]


def _glu(x, w, b, g) -> Iterator[Args]:
    yield from (((gate, up, activation), {}) for gate, up, activation in _halves(g))


def _glu_backward(x, w, b, g) -> Iterator[Args]:
    n = g.shape[-1]
    for gate, up, activation in _halves(g):
        apart = up is not None
        yield (g, gate, up, activation, [True, apart, True, apart, n != 16]), {}
        yield (g, gate, up, activation, [False, apart, False, False, True]), {}
        down, dy = torch.ones(2 * n, n, dtype=g.dtype, device=g.device), torch.cat([g, g], -1)
        yield (dy, gate, up, activation, [True, apart, False, False, True], down), {}


def _channels_backward(x, w, b, g) -> Iterator[Args]:
    image = g.reshape(-1)[:1].repeat(24).cumsum(0).view(2, 3, 2, 2)
    for grad, y in itertools.product([image, image.to(memory_format=LAST)], repeat=2):
        yield (grad, y.relu(), g.shape[-1] != 16), {}


STEPS: dict[str, Callable[..., Iterator[Args]]] = {
    "_linear_aux": _aux,
    "_linear_relu_bits": lambda x, w, b, g: iter([((x, w, b), {}), ((x, w, None), {})]),
    "_relu_mask": lambda x, w, b, g: iter([((g,), {})]),
    "_activation_backward": _activation_backward,
    "_linear_backward": _backward,
    "_linear_backward_across": _across,
    "_weight_gradient": _weight_gradient,
    "_ensemble_linear": _ensemble,
    "_linear_glu_aux": _glu_aux,
    "_glu": _glu,
    "_glu_backward": _glu_backward,
    "_channels_relu_backward": _channels_backward,
}
# As they are called with tensors alone; conv2d_relu and mlp take lists besides.
PUBLIC = {
    "linear": [linear("none")],
    **{op.name: [op] for op in map(linear, ACTS)},
    "linear_gelu": [linear("gelu_tanh"), linear("gelu_erf"), linear("gelu_tanh", memory="low")],
    "linear_relu": [RELU, linear("relu", memory="low")],
    "linear_glu": [gated("apart", "silu"), gated("stacked", "gelu_tanh", memory="low")],
    "gated_mlp": [gated("apart", "relu2", True), gated("stacked", "silu", True, memory="low")],
    "mlp": [*(mlp(activation, 3) for activation in ACTS), mlp("gelu_tanh", 2, memory="low")],
    "conv2d_relu": [
        conv(size=(12, 11), groups=2, stride=(2, 1), padding=(2, 3), dilation=(2, 1)),
        conv(batch=None, padding=(1, 1)),
        conv(kernel=(1, 1)),
        conv(channels=6, groups=6, out=12, padding=(1, 1)),
    ],
}
ALL = [*PUBLIC, *STEPS]


class _Recorded(TorchFunctionMode):
    arguments: Args

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.arguments = args, kwargs or {}
        return func(*args, **(kwargs or {}))


def arguments_of(op: Op, tensors: list[Tensor]) -> Args:
    """With what torch.ops is called, which is given more than the row's tensors."""
    with torch.no_grad(), _Recorded() as mode:
        op.call(*tensors)
    return mode.arguments


def samples(name: str, device, dtype=torch.float32, layout=None, grad=False) -> Iterator[Args]:
    """Samples of an operator or a step: odd and even widths, several ranks, biases or none.

    layout: of what has tokens, where there are any; grad: whether all want a gradient.
    """

    grad = grad and name != "_weight_gradient"  # which writes to what it is given

    def leaf(value):
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().requires_grad_(grad) if is_float else value

    for lead, i, o in SHAPES:
        lay = layout if layout and lead else lambda t: t
        if name in STEPS:
            case = LINEAR.case(lead, i, o, dtype, device)
            found = STEPS[name](lay(case.x), case.w, case.b, lay(case.g))
        else:
            cases = ((op, op.case(lead, i, o, dtype, device, bias)) for op in PUBLIC[name]
                     for bias in (True, False))  # fmt: skip
            found = (
                arguments_of(op, [lay(case.x) if case.x.dim() > 1 else case.x, *case.inputs[1:]])
                for op, case in cases
            )
        yield from (tree_map(leaf, arguments) for arguments in found)
