"""How the work is to be done: process-wide choices."""

import torch

from ._switch import Switch


class set_policy(Switch):
    """Chooses how the fused operators do their work, for the whole process.

    A plain call sets it. As a context manager, which may be entered again and within itself, and as
    a decorator, what was in force before is put back at the end::

        set_policy("cublaslt")
        with set_policy("eager"):
            ...

    The environment variable ``TORCH_FUSED_LINEAR_POLICY`` sets it before the first call.

    Args:
        policy: one of

            - ``"auto"`` (default): the fastest way known that keeps torch's semantics;
            - ``"cublaslt"``: cuBLASLt's own fused epilogues wherever they exist, with the library's
              roundings. The gradient of ReLU is then that of the library's bit mask: at a
              pre-activation of exactly 0 it is 1, where torch's is 0; at NaN, in 16 bits on a GPU,
              it is 0, where torch's is 1;
            - ``"eager"``: the plain formula, operator by operator.

    Raises:
        ValueError: the name is not one of these.
        TypeError: it is no name.
    """

    _get, _set = "_policy", "_set_policy"
    _argument, _expected, _types = "policy", "'auto', 'cublaslt' or 'eager'", (str,)

    def __init__(self, policy: str) -> None:
        super().__init__(policy)


def get_policy() -> str:
    """The policy in force: ``"auto"``, ``"cublaslt"`` or ``"eager"``."""
    return torch.ops.fused._policy()


class handover(Switch):
    """Switches on or off whether separate fused layers hand gradients over to each other.

    In ``loss.backward()`` a fused layer whose input came straight from another fused layer applies
    that layer's activation derivative together with its own matrix product, and sums that layer's
    bias gradient on the way. It does not where the difference could be seen (hooks,
    ``retain_grad``, a second consumer, ``create_graph`` and others); :class:`explain` then names
    the reason. It is on by default; :func:`get_handover` says whether it is on.

    A plain call sets it; as a context manager or a decorator it is put back at the end, as with
    :class:`set_policy`. ``TORCH_FUSED_LINEAR_HANDOVER=0`` in the environment has it off at first.

    Args:
        enabled: whether to hand over.

    Raises:
        TypeError: it is neither ``True`` nor ``False``.
    """

    _get, _set = "_handover", "_set_handover"
    _argument, _expected, _types = "enabled", "True or False", (bool,)

    def __init__(self, enabled: bool) -> None:
        super().__init__(enabled)


def get_handover() -> bool:
    """Whether separate fused layers hand gradients over to each other."""
    return torch.ops.fused._handover()
