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
