"""``fuse_`` and ``unfuse_``: one call for ``act(linear(x))`` in an existing model."""

import gc
import sys
from collections.abc import Callable
from types import ModuleType

from torch import nn

from .._support import library as _library
from .._support.arguments import Memory, check, check_module
from .._support.torch_internals import forget_compiled
from .model import frozen_reason, named
from .plain import MARK
from .plan import Plan
from .report import Report
from .rewrite import put_back

__all__ = ["fuse_", "is_fused", "unfuse_"]


def fuse_(
    model: nn.Module,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    *,
    memory: Memory = "default",
    linear: bool = False,
    dry_run: bool = False,
) -> Report:
    """Replaces linear layers and their activations in a model by fused operators, in place.

    Wherever the model's code calls layers one after the other, such as ``fc2(act(fc1(x)))``, the
    calls become one. Each time it runs, that call checks its modules and its tensor. Plain
    ``nn.Linear`` layers with ReLU, its square, GELU or SiLU between them run as
    :func:`torch_fused_linear.mlp`, a layer with its activation as one operator, ``nn.Conv2d`` and
    ReLU likewise, and ``act(gate(x)) * up(x)`` with the layer after it as
    :func:`torch_fused_linear.gated_mlp`. Layers that torchao's ``convert_to_float8_training`` has
    made by its recipe ``tensorwise`` run as the operators in FP8; docs/float8.md says which.
    Anything else runs the code as it was written.

    Modules stay the same objects of the same classes, and the model computes the same function
    whatever is done to it before or after. The function that holds the calls gets other code, once
    for the process; an attribute of each layer marks the layers that may be fused.

    With ``linear=True`` a layer without an activation that is called alone, such as a projection of
    an attention or a head, runs as :func:`torch_fused_linear.linear`, or in FP8 as
    :func:`torch_fused_linear.float8_linear`. That gains no time. Under the policy
    ``"batch_invariant"`` it makes these products batch-invariant too.

    ``torch.compile`` and ``torch.export`` get the operators. ``torch.jit.script`` compiles the text
    of functions, so a scripted model is the plain one until :func:`fuse_script_` fuses it.

    Args:
        model: the model, changed in place. It may be on any device, including ``meta``.
        filter_fn: ``filter_fn(name, module)`` is called for every layer that would be fused, with
            its name in the model. A layer for which it returns ``False`` is called as before.
        memory: ``'default'``, or ``'low'`` to keep less for the backward where that pays.
            docs/memory.md says where, and which writes go unnoticed then.
        linear: also take linear layers that are called alone. The report then names every linear
            layer that is left alone, with the reason.
        dry_run: only report. This works without the compiled library.

    Returns:
        A report with the blocks that were fused, ``fused``, and the layers that were not,
        ``skipped``. It can be printed, and drawn by ``save_picture(path)``.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``, or was scripted, traced or exported; or
            ``filter_fn`` is not callable.
        ValueError: ``memory`` is neither ``'default'`` nor ``'low'``.
        ImportError: the compiled library is missing.

    Examples::

        >>> model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> print(fuse_(model))
        1 block fused, 0 places left alone
        ...
        >>> fuse_(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), linear=True).fused[0].after
        ('linear',)
    """
    check_module("fuse_", model)
    if reason := frozen_reason(model):
        raise TypeError(
            f"fuse_: expected a model before it is scripted, traced or exported, got "
            f"{type(model).__name__}, which {reason}; fuse the model that it was made from, or "
            "call fuse_script_"
        )
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"fuse_: filter_fn must be a function, got {type(filter_fn).__name__}")
    check("fuse_", memory=memory)
    if not dry_run:
        _library.require()
    return Plan(model, filter_fn, linear).apply(memory, dry_run)


def is_fused(module: nn.Module) -> bool:
    """Returns whether :func:`fuse_` has changed the module or one in it.

    Args:
        module: a model, or a part or copy of one.

    Returns:
        True if a layer is marked. Each call decides whether it runs fused; see
        :class:`torch_fused_linear.explain`.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``.

    Examples::

        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        >>> is_fused(model)
        False
        >>> report = fuse_(model)
        >>> is_fused(model)
        True
    """
    check_module("is_fused", module)
    return any(MARK in vars(m) for _, m in named(module))


def unfuse_(model: nn.Module) -> None:
    """Undoes :func:`fuse_`, in place.

    It removes the mark of each layer. When no layer in the process is marked any more, the
    functions get back the code that they had. Models behind ``gc.freeze()`` are not found.

    Args:
        model: a model that :func:`fuse_` has changed, or a part or copy of one.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.

    Examples::

        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        >>> report = fuse_(model)
        >>> unfuse_(model)
        >>> is_fused(model)
        False
    """
    check_module("unfuse_", model)
    marks = [vars(module).pop(MARK, None) for _, module in named(model)]
    modules = (found for found in gc.get_objects() if issubclass(type(found), nn.Module))
    if not any(MARK in vars(module) for module in modules):  # copies share them: no list would do
        put_back()
    if any(mark is not None for mark in marks):
        forget_compiled()


class _Package(ModuleType):
    def __call__(self, *args: object, **kwargs: object) -> None:
        raise TypeError(
            "torch_fused_linear.fuse is the package that fuse_ is in; call "
            "torch_fused_linear.fuse_(model), with an underscore, as it changes the model"
        )


sys.modules[__name__].__class__ = _Package
