"""``fuse_`` and ``unfuse_``: the fused layers put into a model that exists."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..modules import check_memory
from .classes import unfuse_class
from .plan import Plan, frozen_reason
from .report import Report

__all__ = ["fuse_", "unfuse_"]


def fuse_(
    model: nn.Module,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    memory: str = "default",
    dry_run: bool = False,
) -> Report:
    r"""Fuses, in place, linear layers and convolutions with the activation that follows each.

    Wherever the output of an ``nn.Linear`` goes straight to an ``nn.ReLU`` or GELU and nowhere
    else, the linear layer becomes a :class:`FusedLinearReLU` or :class:`FusedLinearGELU`, and the
    linear layer after the activation a :class:`FusedLinear` at least, so that in the backward
    gradients are handed over from layer to layer (:class:`torch_fused_linear.handover`). In the
    same way an ``nn.Conv2d`` with an ``nn.ReLU`` becomes a :class:`FusedConv2dReLU`; with a batch
    normalisation between them it is left alone. Neighbours in ``nn.Sequential`` are found, and
    modules whose ``forward``, which is read, says ``self.act(self.fc1(x))`` in this or in other
    words: among them timm's ``Mlp``, torchvision's ``MLPBlock``, ``nn.TransformerEncoderLayer``,
    and the blocks of BERT, RoBERTa, DistilBERT, ViT, OPT, GPT-2 (``Conv1D``), Phi, Whisper and
    T5 v1.0 in Hugging Face transformers.

    The function stays exactly the same: GELU by erf stays that, and activations of another kind are
    left alone. Parameters stay the same objects under the same names, and a linear layer stays the
    same object too, with a new class; the activation is replaced by one that returns its input and
    prints what it stands for. What is left alone, with a reason in the report: layers with hooks or
    parametrisations, those that are not exactly ``nn.Linear`` or ``nn.Conv2d`` (quantised, LoRA),
    those shared between places, and whatever cannot be proved to be used as described.

    Call it once the layers are what they are to be, and before ``torch.compile`` and sharding;
    call :func:`unfuse_` before exchanging or wrapping layers. A forward hook put on a fused layer
    afterwards sees the activation's output.

    Args:
        model: changed in place. It may be on any device, ``meta`` too.
        filter_fn: ``filter_fn(name, module)`` is asked for every layer that is to change,
            with its name in the model; one for which it returns ``False`` stays as it is.
        memory: ``'default'``, or ``'low'`` for layers of low memory where less is then kept: GELU
            with a fused layer straight after it, and ReLU with no module with parameters there,
            which would keep ReLU's output anyway.

    Returns:
        A report of what was fused and what was not, ``report.fused`` and ``report.skipped``. It
        can be printed, and drawn by ``report.save_picture(path)``.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``, or is one that is scripted, traced, exported
            or compiled already; ``filter_fn`` is not callable.
        ValueError: there is something to fuse, but ``filter_fn`` accepts none of it; ``memory`` is
            neither of these.

    Examples::

        >>> model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> print(fuse_(model))
        1 block fused, 0 places left alone
        ...
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse_: expected an nn.Module, got {type(model).__name__}")
    if reason := frozen_reason(model):
        raise TypeError(
            f"fuse_: expected a model before it is scripted, traced, exported or compiled, got "
            f"{type(model).__name__}, which {reason}; fuse the model that it was made from"
        )
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"fuse_: expected filter_fn(name, module) -> bool or None, got "
            f"{type(filter_fn).__name__}"
        )
    check_memory("fuse_", memory)
    plan = Plan(model, filter_fn)
    if plan.refused and not plan.layers and not plan.accepted:
        raise ValueError(
            f"fuse_: expected filter_fn to accept a layer, but it refused all {len(plan.refused)} "
            f"that could be fused: {', '.join(plan.refused[:3])}"
            + (" ..." if len(plan.refused) > 3 else "")
        )
    return plan.apply(memory, dry_run)


def unfuse_(model: nn.Module) -> None:
    """Undoes :func:`fuse_`, in place: classes and activations are again what they were.

    Layers that were not made by :func:`fuse_` stay as they are.

    Args:
        model: a model that :func:`fuse_` has changed, or part or a copy of one.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
        RuntimeError: something was done to a fused layer since that must be taken back first, such
            as a parametrisation.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unfuse_: expected an nn.Module, got {type(model).__name__}")
    for module in model.modules():
        unfuse_class(module)
