"""Operators on sharded tensors beside the whole computation, in fp64, with all gradients.

Tensors are replicated, sharded by every dimension and partial sums, in all combinations on two
processes for the operators whose rules differ, and in a part of them elsewhere. Sizes that the
processes do not divide are among them, so that some have nothing at all.
"""

from functools import partial

import pytest
import strategy_checks as checks
import torch
from operators import conv, gated, mlp, pair
from strategy_checks import LAYERS
from torch.distributed.tensor import Replicate, Shard

from torch_fused_linear._torch import sharding

TWO, FOUR, TWO_BY_TWO = (2,), (4,), (2, 2)
ODD, EVEN, UNEVEN = ((4, 3), 6, 5), ((4, 3), 6, 8), ((6, 3), 6, 10)
WIDE, NARROW = ((4,), 6, 256), ((4,), 6, 8)
CHAIN_SIZES, IMAGES = ((3, 4), 6, 4), ((), 1, 1)  # images have the sizes of their row
LOW = {"hidden": 8, "memory": "low"}
block, low_block = partial(gated, hidden=8), partial(gated, down=True, **LOW)
chain = partial(mlp, layers=3, widths=(8, 5))
strided = partial(conv, out=8, stride=(2, 1), padding=(1, 1))
# A function that makes an operator, the mesh and the sizes. One placement in so many is tried, the
# fourth number; the fifth is how many placements that gives.
PLACED = [
    *((LAYERS[a], TWO, EVEN, 1, 5 * 4 * 3) for a in ("none", "relu")),
    *((LAYERS[a], TWO, EVEN, 7, 9) for a in LAYERS if a not in ("none", "relu")),
    *((LAYERS[a], FOUR, UNEVEN, 7, 9) for a in ("none", "gelu_tanh", "relu low")),
    *((LAYERS[a], TWO_BY_TWO, EVEN, 397, 10) for a in ("none", "relu")),
    (LAYERS["relu low"], TWO, WIDE, 5, 10),
    *((partial(chain, a), TWO, CHAIN_SIZES, 1009, 9) for a in ("relu", "gelu_erf", "silu")),
    (partial(chain, "gelu_tanh", memory="low"), FOUR, CHAIN_SIZES, 1009, 9),
    (partial(block, "apart", "gelu_erf", True), FOUR, ODD, 967, 9),
    (partial(block, "stacked", "gelu_tanh", True), TWO, ODD, 79, 10),
    (partial(low_block, "apart", "silu"), TWO, ODD, 1999, 5),
    (partial(low_block, "stacked", "silu"), TWO, ODD, 79, 10),
    (partial(pair, "apart", "silu", **LOW), TWO, ODD, 1999, 5),
    (partial(pair, "stacked", "silu", **LOW), TWO, ODD, 79, 10),
    *((partial(strided, batch=n), TWO, IMAGES, 11, 10) for n in (4, 3)),
    (partial(strided, batch=4, groups=2), FOUR, IMAGES, 19, 6),
    (partial(strided, batch=None), TWO, IMAGES, 11, 9),
]
WITHOUT_BIAS = [
    (LAYERS["relu"], TWO, ((5,), 8, 6), 1, 16),
    (LAYERS["none"], TWO, ((), 6, 8), 1, 12),
    (partial(chain, "relu"), TWO, CHAIN_SIZES, 41, 8),
    (partial(block, "apart", "silu"), TWO, EVEN, 1, 5 * 4 * 4),
    (partial(block, "apart", "silu", True), TWO, ODD, 23, 14),
    (partial(block, "apart", "relu"), TWO_BY_TWO, EVEN, 1601, 4),
    (partial(block, "stacked", "silu"), FOUR, EVEN, 3, 7),
]


def test_every_operator_has_a_rule(four):
    """Every operator that returns tensors has a rule; ``mlp`` is taken apart instead."""
    made = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace == "fused":
            schema = getattr(torch.ops.fused, operator).default._schema
            if any(str(result.type) == "Tensor" for result in schema.returns):
                made.add(operator)
    made.remove("_ensemble_linear")  # vmap makes it, which does not take sharded tensors
    # compiled graphs do, with what tensors hold
    made -= {"_accumulated_weight_gradient", "_storages"}
    # FP8 refuses sharded tensors: its scales are of the largest value on all devices.
    made -= {operator for operator in made if operator.lstrip("_").startswith("float8_")}
    assert made == {*sharding.RULES, "mlp"}
    assert four.run(checks.known_to_dtensor)[0] == made


@pytest.mark.parametrize(
    ("make", "mesh", "sizes", "every", "cases", "bias"),
    [*((*row, True) for row in PLACED), *((*row, False) for row in WITHOUT_BIAS)],
    ids=lambda value: value().label if callable(value) else None,
)
def test_placements(make, mesh, sizes, every, cases, bias, four):
    """Some sizes are not divided by the mesh; a width of 256 is cut between two groups of 128 bits
    of ReLU's mask, others are not cut."""
    assert four.run(checks.check, make, mesh, sizes, every, bias)[0] == cases


@pytest.mark.parametrize("sizes", [WIDE, NARROW])
def test_the_librarys_bits(sizes, four):
    assert four.run(checks.check, LAYERS["relu"], TWO, sizes, 5, True, "cublaslt")[0] == 10


@pytest.mark.parametrize("activation", ["none", "relu", "gelu_erf"])
def test_frozen_parameters(activation, four):
    four.run(checks.frozen, activation)


COLUMN, ROW, SAME = Shard(0), Shard(1), Replicate()
OF_A_BLOCK = (SAME, COLUMN, COLUMN, ROW, COLUMN, COLUMN, SAME)


@pytest.mark.parametrize(
    ("make", "sizes", "placements"),
    [
        *((LAYERS[a], ((3,), 6, 8), (SAME, COLUMN, COLUMN)) for a in ("none", "relu", "gelu_tanh")),
        (LAYERS["relu low"], ((3,), 6, 256), (SAME, COLUMN, COLUMN)),
        (partial(block, "apart", "silu", True), ODD, OF_A_BLOCK),
    ],
    ids=lambda value: value().label if callable(value) else None,
)
def test_derivatives(make, sizes, placements, four):
    four.run(checks.derivatives, make, sizes, placements)


CHAIN = [
    ("_linear_aux", "[2, 3, 8] x [4, 8]"),
    ("linear", "[2, 3, 4] x [8, 4]"),
    ("_linear_backward_across", "[2, 3, 4] x [8, 4]"),
    ("_linear_backward", "[2, 3, 8] x [4, 8]"),
]
APART = [(name.removesuffix("_across"), shapes) for name, shapes in CHAIN]
GATED = [
    ("linear", "[2, 3, 8] x [4, 8]"),
    ("linear", "[2, 3, 8] x [4, 8]"),
    ("_glu", "[2, 3, 4]"),
    ("linear", "[2, 3, 4] x [8, 4]"),
    ("_linear_backward", "[2, 3, 4] x [8, 4]"),
    ("_glu_backward", "[2, 3, 4]"),
    ("_linear_backward", "[2, 3, 4] x [8, 4]"),
    *[("_linear_backward", "[2, 3, 8] x [4, 8]")] * 3,
]


@pytest.mark.parametrize(("way", "ran"), [("mlp", CHAIN), ("layers", APART), ("gated", GATED)])
def test_hidden_activations_are_never_gathered(way, ran, four):
    """Column, then row parallel: a sum forward, and a sum backward for the input's gradient."""
    inference, training, calls = four.run(checks.communication)[0][way]
    assert inference == {"all_reduce": 1}
    assert training == {"all_reduce": 2}
    assert calls == ran
