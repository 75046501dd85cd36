"""The report that ``explain`` makes: what ran in each call of an operator, and why."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One call of an operator's kernel.

    Attributes:
        operator: its name. ``_linear_backward_across`` is a backward in ``mlp`` that also computes
            the activation's derivative of the layer before.
        shapes: shapes of the input and the weight.
        dtype: dtype of both.
        device: device of both.
        path: what ran, step by step: names of cuBLASLt epilogues, "own ..." kernels, "ATen mm",
            "oneDNN ...", "PyTorch's own (not fused)". A step in parentheses was wanted but not
            possible; the reason follows.
    """

    operator: str
    shapes: str
    dtype: str
    device: str
    path: str


_DTYPES = {torch.float64: "Double", torch.float32: "Float", torch.float16: "Half"}
_DTYPES |= {torch.bfloat16: "BFloat16"}
_open_blocks = 0


def note(operator: str, input: Tensor, weight: Tensor, reason: str) -> None:
    """Adds a row for a call that torch's own functions ran, if any report is open."""
    if _open_blocks:
        path = f"{reason} + PyTorch's own (not fused)"
        shapes = f"{list(input.shape)} x {list(weight.shape)}"
        dtype = _DTYPES.get(input.dtype, str(input.dtype))
        row = Call(operator, shapes, dtype, str(input.device), path)
        torch.ops.fused._explain_note("\t".join(astuple(row)))


class explain:
    """Records what the fused operators do inside a ``with`` block.

    Attribute ``calls`` is a list of :class:`~torch_fused_linear.report.Call`. Printed, the report
    is a table. Recording is process-wide, and costs nothing outside of a block. Blocks may be
    nested and open in several threads; each has everything that ran while it was open. If an object
    is entered again, it has the calls of the last block. A call that is replayed from a CUDA graph,
    or compiled into one kernel with others, does not show.

    Examples::

        >>> with explain() as report:
        ...     y = FusedLinearReLU(8, 16)(torch.randn(4, 8))
        >>> report.calls[0].operator
        'linear_relu'
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._open: list[int] = []

    def __enter__(self) -> "explain":
        global _open_blocks
        _open_blocks += 1
        self._open.append(torch.ops.fused._explain_start())
        return self

    def __exit__(self, *exc_info: object) -> None:
        global _open_blocks
        _open_blocks -= 1
        rows = torch.ops.fused._explain_stop(self._open.pop())
        self.calls = [Call(*row.split("\t")) for row in rows]

    def __str__(self) -> str:
        return "\n".join(table([f.name for f in fields(Call)], list(map(astuple, self.calls))))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a text table."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
