"""Checks that a layer of torch's and one of ours can replace each other without loss."""

from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._support.torch_internals import HOOKS, added_behaviour

Layer = TypeVar("Layer", bound=nn.Module)
_HOOKS = (*HOOKS, "_state_dict_hooks", "_state_dict_pre_hooks")
_HOOKS += ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def check_plain(function: str, layer: object, classes: tuple[type, ...]) -> None:
    """Raises ``TypeError``, naming the caller, if something of the layer would be lost when it is
    taken over. The layer must be exactly one of the classes; the error names the first as
    expected.
    """
    if objection := _objection(layer, classes):
        expected = classes[0].__name__
        article = f"an nn.{expected}" if hasattr(nn, expected) else f"a {expected}"
        raise TypeError(
            f"{function}: expected exactly {article} with nothing added to it, got {objection}"
        )


def check_given_back(method: str, layer: nn.Module, classes: tuple[type, ...]) -> None:
    """Raises ``TypeError`` if something of our layer would be lost when it becomes torch's. Its
    class is one of these or a child of one.
    """
    cls = next(base for base in type(layer).__mro__ if base in classes)
    check_plain(f"{type(layer).__name__}.{method}", layer, (cls,))


def _objection(layer: object, classes: tuple[type, ...]) -> str | None:
    name = type(layer).__name__
    if not isinstance(layer, classes):
        return name
    if any(is_lazy(parameter) for parameter in layer._parameters.values()):
        return f"{name} with lazy parameters: run it once to give them their sizes"
    if hasattr(layer, "parametrizations"):  # says which, and what to do
        names = ", ".join(layer.parametrizations)
        return f"{name} with a parametrisation of {names}: torch.nn.utils.parametrize removes it"
    if type(layer) not in classes:
        return f"{name}, a subclass, which may compute something else"
    if reason := added_behaviour(layer, _HOOKS):
        advice = ": take it over first, and compile the result" if reason == "was compiled" else ""
        return f"{name}, which {reason}{advice}"
    chain = isinstance(layer, nn.Sequential)
    expected = set() if chain else {"weight", "bias"}
    if layer._parameters.keys() != expected:
        return f"{name} with the parameters {', '.join(layer._parameters) or 'none'}"
    more = [*layer._buffers, *(() if chain else layer._modules)]
    return f"{name} with more in it: {', '.join(more)}" if more else None


def made_like(layer: nn.Module, cls: type[Layer], *sizes, device=None, dtype=None, **how) -> Layer:
    """A layer of another class with the parameters of the first, and in its mode; where they are of
    another device or dtype than is asked for, with copies."""
    # No memory for parameters that are replaced at once.
    made = cls(*sizes, bias=layer.bias is not None, device="meta", **how)
    made.weight = _converted(layer.weight, device, dtype)
    made.bias = _converted(layer.bias, device, dtype)
    return made.train(layer.training)


def _converted(parameter: Tensor | None, device, dtype) -> Tensor | None:
    """The parameter itself where it is of that device and dtype already, else one like it."""
    if parameter is None or (device is None and dtype is None):
        return parameter
    moved = parameter.detach().to(device=device, dtype=dtype)
    if moved.dtype == parameter.dtype and moved.device == parameter.device:
        return parameter
    return nn.Parameter(moved, requires_grad=parameter.requires_grad)
