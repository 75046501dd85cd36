"""The process-wide choice of how the work is done."""

import torch

from ._support.switch import Switch


class set_policy(Switch):
    """Sets how the fused operators do their work, for the whole process.

    A plain call sets it. As a context manager, which may be nested, or as a decorator, it restores
    the policy that was in force before.

    The environment variable ``TORCH_FUSED_LINEAR_POLICY`` sets it before the first call.

    Args:
        policy: one of

            - ``"auto"`` (default): the fastest known way that keeps PyTorch's semantics;
            - ``"cublaslt"``: cuBLASLt's own fused epilogues wherever they exist, with the library's
              rounding. ReLU's gradient then comes from the library's bit mask: it is 1 at a
              pre-activation of exactly 0, where PyTorch's is 0; in 16 bits on a GPU it is 0 at NaN,
              where PyTorch's is 1;
            - ``"eager"``: the plain formula, operator by operator;
            - ``"batch_invariant"``: a row of a result, and of its input's gradient, has the same
              bits whatever other rows are in the call, or the call raises. See
              :doc:`invariance` for the conditions.

    Raises:
        NotImplementedError: raised by a call under ``"batch_invariant"`` that cannot be
            batch-invariant.
        ValueError: ``policy`` is none of these.
        TypeError: ``policy`` is no string.

    Examples::

        >>> with set_policy("eager"):
        ...     get_policy()
        'eager'
        >>> get_policy()
        'auto'
    """

    _get, _set = "_policy", "_set_policy"
    _argument, _types = "policy", (str,)
    _expected = "'auto', 'cublaslt', 'eager' or 'batch_invariant'"

    def __init__(self, policy: str) -> None:
        super().__init__(policy)


def get_policy() -> str:
    """Returns the name of the policy in force.

    Returns:
        ``"auto"``, ``"cublaslt"``, ``"eager"`` or ``"batch_invariant"``; :class:`set_policy`
        explains them.

    Examples::

        >>> get_policy()
        'auto'
    """
    return torch.ops.fused._policy()
