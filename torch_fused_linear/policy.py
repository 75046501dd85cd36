"""How the work is to be done: process-wide choices."""

from typing import Any

import torch
from typing_extensions import Self


class _Switch:
    """A process-wide setting: set by making the object, put back at the end of a ``with``."""

    _get: str
    _set: str

    def __init__(self, value: Any) -> None:
        self.previous = getattr(torch.ops.fused, self._get)()
        getattr(torch.ops.fused, self._set)(value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
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


class pack_weights(_Switch):
    """Switches on or off whether weights are kept as a CPU likes to multiply with them best.

    oneDNN multiplies with a weight in a layout of its own. With this switched on, a copy in that
    layout is made at the second call with a weight that has not changed since the first, and used
    from then on: in bf16, above all with few tokens, and in fp32 where oneDNN is used at all
    (processors with AVX-512 that are not Intel's, from about 128 tokens). It has no effect on GPUs,
    on the backward, or on parameters and ``state_dict``. It takes the memory of one more copy,
    which is freed when the next weight is met after the first has died, or on switching off.

    A weight that has changed is packed again: after ``optimizer.step()``, ``load_state_dict()``,
    ``.to()``, ``weight.data = ...`` and whatever is written in place. What leaves no trace is not
    noticed, and the old weight would be used: ``weight.data.copy_()`` and other writing through
    ``.data``, through NumPy, or by another process into shared memory. That is why it is off by
    default.

    A plain call sets it; as a context manager it is put back at the end. The environment variable
    ``TORCH_FUSED_LINEAR_PACK_WEIGHTS=1`` switches it on before the first call.

    Args:
        enabled: whether to pack.
    """

    _get, _set = "_pack_weights", "_set_pack_weights"

    def __init__(self, enabled: bool) -> None:
        super().__init__(enabled)
