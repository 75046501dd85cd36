"""The layers: a row for each, beside the modules of torch that it stands for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from operators import ACTS
from torch import Tensor, nn
from watching import operators_of

import torch_fused_linear as tfl
from torch_fused_linear.activations import SquaredReLU

MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu_tanh": partial(nn.GELU, "tanh"),
    "gelu_erf": nn.GELU,
    "silu": nn.SiLU,
    "relu2": SquaredReLU,
}


class GatedBlock(nn.Module):
    """Written out, with the children's names of ours."""

    def __init__(self, i, hidden, o=None, bias=False, activation="silu", **options) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(i, hidden, bias, **options)
        self.up_proj = nn.Linear(i, hidden, bias, **options)
        self.down_proj = nn.Linear(hidden, o or i, bias, **options)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        hidden = ACTS[self.activation](self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden)


@dataclass(frozen=True)
class Layer:
    """One of our layers, in one of its forms.

    Attributes:
        label: what its tests are called by.
        cls: the class; `args` and `options`: what it is made with.
        plain: what is made with the same of torch's modules: `plain(**more)`, with parameters in
            the order of ours.
        width: of the input; None: it is an image of four channels.
    """

    label: str
    cls: type[nn.Module]
    args: tuple
    plain: Callable[..., nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    width: int | None = 6

    def __repr__(self) -> str:
        return self.label

    def make(self, **more) -> nn.Module:
        return self.cls(*self.args, **{**self.options, **more})

    def twin(self, layer: nn.Module) -> nn.Module:
        """torch's modules over the very parameters of a layer."""
        biased = any(name.endswith("bias") for name, _ in layer.named_parameters())
        twin = self.plain(bias=biased) if "bias" not in self.options else self.plain()
        holders = [m for m in twin.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        ours = [m for m in layer.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        for holder, own in zip(holders, ours, strict=True):
            holder.weight, holder.bias = own.weight, own.bias
        return twin.train(layer.training)

    def input(self, dtype=torch.float32, device="cpu", seed=3) -> Tensor:
        gen = torch.Generator().manual_seed(seed)
        shape = (2, 4, 9, 8) if self.width is None else (5, self.width)
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(device, dtype)


def _linear(kind: str) -> Layer:
    classes = {"none": tfl.FusedLinear, "relu": tfl.FusedLinearReLU}
    classes |= {"silu": tfl.FusedLinearSiLU, "relu2": tfl.FusedLinearReLU2}
    gelus = {"gelu_tanh": {"approximate": "tanh"}, "gelu_erf": {"approximate": "none"}}
    cls, options = classes.get(kind, tfl.FusedLinearGELU), gelus.get(kind, {})

    def plain(**more) -> nn.Module:
        linear = nn.Linear(6, 4, **more)
        return linear if kind == "none" else nn.Sequential(linear, MODULES[kind]())

    return Layer(f"linear {kind}", cls, (6, 4), plain, options)


def _conv(label: str, kernel=3, **options) -> Layer:
    def plain(**more) -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 6, kernel, **{**options, **more}), nn.ReLU())

    return Layer(f"conv {label}", tfl.FusedConv2dReLU, (4, 6, kernel), plain, options, width=None)


def sequential(*sizes: int, activation="relu", **options) -> nn.Sequential:
    modules: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise(sizes):
        modules += [nn.Linear(size_in, size_out, **options), MODULES[activation]()]
    return nn.Sequential(*modules[:-1])


def _chain(activation: str, *sizes: int) -> Layer:
    plain = partial(sequential, *sizes, activation=activation)
    label = f"chain {activation} of {len(sizes) - 1}"
    return Layer(label, tfl.FusedMLP, sizes, plain, {"activation": activation})


def _gated(activation: str, bias: bool, out: int | None = None) -> Layer:
    options = {"activation": activation, "bias": bias}
    plain = partial(GatedBlock, 6, 8, out, **options)
    label = f"gated {activation}{' bias' * bias}"
    return Layer(label, tfl.FusedGatedMLP, (6, 8, out), plain, options)


LINEAR = [_linear(kind) for kind in ("none", *MODULES)]
CONV = [
    _conv("plain"),
    _conv("no bias", bias=False),
    _conv("strided", stride=2, padding=1),
    _conv("pairs", stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
    _conv("same", padding="same"),
    _conv("same, even", kernel=(4, 2), padding="same"),
    _conv("same, dilated", padding="same", dilation=(2, 1)),
    _conv("valid", padding="valid", kernel=(1, 4)),
    _conv("groups", groups=2, padding=1),
    _conv("reflect", padding=1, padding_mode="reflect"),
    _conv("replicate", padding=(2, 1), padding_mode="replicate", stride=2),
    _conv("circular, same", padding="same", padding_mode="circular"),
]
CHAIN = [_chain(activation, 6, 5, 7, 3) for activation in MODULES] + [_chain("relu", 6, 3)]
GATED = [_gated(a, bias) for a, bias in zip(MODULES, (False, True, False, True, False))]
GATED += [_gated("silu", True, out=5)]
LAYERS = [*LINEAR, *CONV, *CHAIN, *GATED]


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """[output, gradients of the input and of every parameter]."""
    leaf = x.detach().clone().requires_grad_()
    y = model(leaf)
    wanted = [leaf, *(p for p in model.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]


def runs_as_one(model: nn.Module, x: Tensor) -> bool:
    """Returns whether a chain or a gated block runs as one operator."""
    with torch.no_grad():
        names = operators_of(lambda: model(x))
    return bool(names) and (set(names) == {"mlp"} or "_glu" in names)
