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
            - ``"eager"``: the plain formula, operator by operator;
            - ``"batch_invariant"``: a row of a result, and of its input's gradient, has the same
              bits whatever other rows are in the call, or the call raises. See
              :doc:`invariance` for where it holds.

    Raises:
        NotImplementedError: raised by a call under ``"batch_invariant"`` that cannot hold it.
        ValueError: the name is not one of these.
        TypeError: it is no name.
    """

    _get, _set = "_policy", "_set_policy"
    _argument, _types = "policy", (str,)
    _expected = "'auto', 'cublaslt', 'eager' or 'batch_invariant'"

    def __init__(self, policy: str) -> None:
        super().__init__(policy)


def get_policy() -> str:
    """The policy in force, by :class:`set_policy`'s name of it."""
    return torch.ops.fused._policy()
