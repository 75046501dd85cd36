"""How the work is to be done: process-wide choices."""

from typing import Any

import torch


class _Switch:
    """A process-wide setting: set by making the object, put back at the end of a ``with``."""

    _get: str
    _set: str

    def __init__(self, value: Any) -> None:
        self.previous = getattr(torch.ops.fused, self._get)()
        getattr(torch.ops.fused, self._set)(value)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        getattr(torch.ops.fused, self._set)(self.previous)


class set_policy(_Switch):
    """Chooses how the fused operators do their work, for the whole process.

    A plain call sets it; as a context manager it is put back at the end::

        set_policy("cublaslt")
        with set_policy("eager"):
            ...

    The environment variable ``TORCH_FUSED_LINEAR_POLICY`` sets it before the first call.

    Args:
        policy: one of

            - ``"auto"`` (default): the fastest way known that keeps torch's semantics;
            - ``"cublaslt"``: cuBLASLt's own fused epilogues wherever they exist. ReLU then saves
              the library's bit mask, whose gradient at a pre-activation of exactly 0 is 1, where
              torch's is 0;
            - ``"eager"``: the plain formula, operator by operator.

    Raises:
        ValueError: the name is not one of these.
    """

    _get, _set = "_policy", "_set_policy"

    def __init__(self, policy: str) -> None:
        super().__init__(policy)


def get_policy() -> str:
    """The policy in force: ``"auto"``, ``"cublaslt"`` or ``"eager"``."""
    return torch.ops.fused._policy()


class handover(_Switch):
    """Switches on or off whether separate fused layers hand gradients over to each other.

    In ``loss.backward()`` a fused layer whose input came straight from another fused layer applies
    that layer's activation derivative together with its own matrix product, and sums that layer's
    bias gradient on the way. It does so only where nobody can tell the difference: no hook,
    ``retain_grad``, second consumer, ``create_graph`` and so on; :class:`explain` names the reason
    where it does not. It is on by default.

    A plain call sets it; as a context manager it is put back at the end. The environment variable
    ``TORCH_FUSED_LINEAR_HANDOVER=0`` switches it off before the first call.

    Args:
        enabled: whether to hand over.
    """

    _get, _set = "_handover", "_set_handover"

    def __init__(self, enabled: bool) -> None:
        super().__init__(enabled)
