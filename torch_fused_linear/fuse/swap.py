"""Changing a linear layer, or a convolution, and its activation in place, and back.

Such a layer changes its class and nothing else: the object stays, and with it the parameters,
their names and order, and whatever else refers to it. An activation may be shared, so it is
replaced, place by place, by a stand-in that keeps it.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from ..nn.conv import FusedConv2dReLU
from ..nn.linear import FusedLinear, FusedLinearGELU, FusedLinearReLU
from .families import CONV1D, FORGETS_ACTIVATION_MODULES, full_name

LAYERS = {
    "none": FusedLinear,
    "relu": FusedLinearReLU,
    "gelu_tanh": FusedLinearGELU,
    "gelu_erf": FusedLinearGELU,
}
CLASSES = (*LAYERS.values(), FusedConv2dReLU)
MARK = "_unfused_class"  # on a swapped layer: the class it had


class FusedActivation(nn.Module):
    """Stands where an activation stood that the linear layer before it now applies.

    It returns its input. Were that linear layer exchanged, the activation would be missing or be
    applied at the wrong place; that is an error here and never a silent one.

    Args:
        original: the activation, a module or a function. It is kept out of the module tree.
        owner: the module that holds the linear layer.
        linears: the linear layer's name in `owner`; several, where one activation followed each.
    """

    def __init__(self, original, owner: nn.Module, linears: tuple[str, ...]) -> None:
        super().__init__()
        self.__dict__["original"] = original
        self.linears = linears
        # A plain reference would close a cycle, and a deleted model would keep its memory until
        # the garbage collector comes round.
        self._owner = weakref.ref(owner)
        self.train(getattr(original, "training", owner.training))

    def forward(self, input: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            self._check()
        return input

    @torch.jit.unused
    def _check(self) -> None:
        owner = None if torch.compiler.is_compiling() else self._owner()
        if owner is None:
            return
        for name in self.linears:
            layer = owner._modules.get(name)
            if not is_swapped(layer):
                raise RuntimeError(
                    f"FusedActivation: expected {name!r} of {type(owner).__name__} to be the "
                    f"layer that fuse_ made, which applies {self._original_name()}; got "
                    f"{type(layer).__name__}. Call unfuse_ before exchanging or wrapping layers, "
                    "and fuse_ after it"
                )

    def _original_name(self) -> str:
        return getattr(self.original, "__name__", repr(self.original))

    def extra_repr(self) -> str:
        return f"{self._original_name()}, applied by {', '.join(map(repr, self.linears))}"

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_owner": self._owner()}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        owner = state["_owner"]
        self._owner = weakref.ref(owner) if owner is not None else _nobody


def _nobody() -> None:
    return None


def is_swapped(layer: object) -> bool:
    """Whether it is a linear layer that `swap_linear` made, and still is one."""
    return MARK in getattr(layer, "__dict__", ())


def swap_linear(linear: nn.Module, kind: str, memory: str = "default") -> None:
    """Makes the layer apply the activation `kind`, or none, in one operator; a convolution ReLU."""
    setattr(linear, MARK, type(linear))
    if memory != "default" and kind != "none" and not isinstance(linear, nn.Conv2d):
        linear.memory = memory
    if full_name(type(linear)) == CONV1D:
        from .conv1d import FusedConv1D  # needs transformers, which is there if its layer is

        linear.__class__ = FusedConv1D
        linear.activation = kind
        return
    if isinstance(linear, nn.Conv2d):
        linear.__class__ = FusedConv2dReLU
        return
    linear.__class__ = LAYERS[kind]
    if LAYERS[kind] is FusedLinearGELU:
        linear.approximate = kind.removeprefix("gelu_").replace("erf", "none")


def swap_activation(owner: nn.Module, name: str, linears: tuple[str, ...]) -> None:
    """Puts a stand-in at `owner.name` for the activation that the `linears` now apply."""
    held = vars(owner) if name in vars(owner) else owner._modules
    stand_in = FusedActivation(held[name], owner, linears)
    if held is owner._modules or full_name(type(owner)) == FORGETS_ACTIVATION_MODULES:
        held[name] = stand_in
    else:
        del held[name]
        owner._modules[name] = stand_in


def swap_back(model: nn.Module) -> None:
    """Undoes all of it in the model."""
    modules = list(model.modules())
    layers = [module for module in modules if is_swapped(module)]
    for layer in layers:  # all of them before the first is changed
        if type(layer) not in CLASSES and type(layer).__name__ != "FusedConv1D":
            raise RuntimeError(
                f"unfuse_: expected the layers as fuse_ left them, got a {type(layer).__name__}; "
                "take back first what was done to it since (a parametrisation, sharding)"
            )
    for module in modules:
        for held in (vars(module), module._modules):
            for name, stand_in in list(held.items()):
                if isinstance(stand_in, FusedActivation):
                    _put_back(module, name, stand_in, held)
    for layer in layers:
        vars(layer).pop("memory", None)
        if type(layer) is FusedLinearGELU:
            del layer.approximate
        elif type(layer) not in CLASSES:
            del layer.activation
        layer.__class__ = vars(layer).pop(MARK)


def _put_back(owner: nn.Module, name: str, stand_in: FusedActivation, held: dict) -> None:
    original = stand_in.original
    if isinstance(original, nn.Module):
        held[name] = original.train(stand_in.training)
    else:
        del held[name]
        vars(owner)[name] = original
