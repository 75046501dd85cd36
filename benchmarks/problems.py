"""The problems of the suite `first-calls`, drawn by a seed: layers and blocks of two."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

COUNT, QUICK_COUNT = 60, 2
SEED = 1
# The least and the most of tokens, inputs and outputs; the two of these are multiples of 8.
BOUNDS = ((64, 65536), (64, 4096), (64, 16384))
QUICK_BOUNDS = ((4, 32), (8, 16), (8, 32))


def drawn(draw: random.Random, bounds: tuple[int, int], multiple: int = 8) -> int:
    """Between `bounds`, each doubling as likely as another."""
    value = math.exp(draw.uniform(*map(math.log, bounds)))
    return min(bounds[1], max(bounds[0], round(value / multiple) * multiple))


def problems(
    quick: bool, dtypes: Sequence[str], activations: Sequence[str]
) -> Iterator[tuple[tuple[int, ...], int, str, str]]:
    """Sizes, tokens, dtype and activation of each; the same at every call."""
    draw = random.Random(SEED)
    tokens, inputs, outputs = QUICK_BOUNDS if quick else BOUNDS
    for index in range(QUICK_COUNT if quick else COUNT):
        i, o = drawn(draw, inputs), drawn(draw, outputs)
        sizes = (i, o, i) if index % 2 else (i, o)
        kind = activations[0] if quick else draw.choice(activations)
        yield sizes, drawn(draw, tokens, 1), draw.choice(dtypes), kind
