"""The report of fuse_: what it fused in a model, and what it left alone."""

import os
import re
from collections import Counter
from dataclasses import dataclass

from ..report import table


@dataclass(frozen=True)
class Block:
    """Linear layers, one after the other, that are now fused.

    Attributes:
        path: path of the module that holds the first of them; ``""`` is the model itself.
        kind: that module's class.
        layers: paths of the linear layers, in order.
        before: the operators that ran in the forward before.
        after: the operators that run now.
        place: file and line of the expression with the first of them; empty for nn.Sequential.
    """

    path: str
    kind: str
    layers: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    place: str = ""


@dataclass(frozen=True)
class Skipped:
    """A linear layer, or a module with some, that was left alone.

    Attributes:
        path: its path.
        reason: why it was left alone.
        place: file and line of its expression; empty if there is none.
    """

    path: str
    reason: str
    place: str = ""


@dataclass(frozen=True)
class Report:
    """The report of :func:`torch_fused_linear.fuse_`. Printed, it is a table.

    Attributes:
        fused: the blocks that were fused.
        skipped: the layers that might have been fused and were not, with the reason.
    """

    fused: tuple[Block, ...]
    skipped: tuple[Skipped, ...]

    def save_picture(self, path: str | os.PathLike) -> None:
        """Draws the operators before and after, once for each kind of block, with their number.

        Args:
            path: the file to write; its ending names the format, such as ``.svg`` or ``.png``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from .._support.picture import draw_blocks

        kinds: dict = {}
        for block in self.fused:
            kinds.setdefault((block.before, block.after), []).append(block)
        draw_blocks(path, kinds)

    def __str__(self) -> str:
        fused = [
            (numberless(b.layers[0]), b.kind, f"{' → '.join(b.before)}  ⇒  {' → '.join(b.after)}")
            for b in self.fused
        ]
        skipped = [
            (numberless(s.path) or "(the model)", s.reason, os.path.basename(s.place))
            for s in self.skipped
        ]
        tables = {
            ("", "first layer", "in", "before  ⇒  after"): fused,
            ("", "left alone", "because", "at"): skipped,
        }
        numbers = len(fused), "s" * (len(fused) != 1), len(skipped), "s" * (len(skipped) != 1)
        lines = ["{} block{} fused, {} place{} left alone".format(*numbers)]
        for head, rows in tables.items():
            counted = [(f"{count} ×", *row) for row, count in Counter(rows).items()]
            lines += ["", *table(head, counted)] if rows else []
        return "\n".join(lines)


def numberless(path: str) -> str:
    """Returns the path with a star for the number of a layer, because such layers are alike."""
    return re.sub(r"(?<=[._])\d+(?=\.)", "*", path)
