"""Operators on sharded tensors beside the whole computation, in fp64, with all gradients.

Tensors are replicated, sharded by every dimension and partial sums, in all combinations on two
processes for the operators whose rules differ, and in a part of them elsewhere. Sizes that the
processes do not divide are among them, so that some have nothing at all.
"""

import pytest
import strategy_checks as checks
import torch

from torch_fused_linear import sharding

ALL = 5 * 4 * 3  # placements of an input of three dimensions, of a weight and of a bias


def test_every_operator_has_a_rule(four):
    """Of those that make tensors of tensors; ``mlp`` is taken apart instead."""
    made = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace == "fused":
            schema = getattr(torch.ops.fused, operator).default._schema
            if any(str(result.type) == "Tensor" for result in schema.returns):
                made.add(operator)
    made.remove("_ensemble_linear")  # vmap makes it, which does not take sharded tensors
    assert made == {*sharding.RULES, "mlp"}
    assert four.run(checks.known_to_dtensor)[0] == made


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_every_placement_on_two(activation, four):
    assert four.run(checks.layer, activation, (2,), (4, 3, 6, 8), True, 1)[0] == ALL


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf", "silu", "relu low", "gelu low"])
def test_other_activations_on_two(activation, four):
    assert four.run(checks.layer, activation, (2,), (4, 3, 6, 8), True, 7)[0] == 9


@pytest.mark.parametrize("activation", ["none", "gelu_tanh", "relu low"])
def test_on_four_which_do_not_divide_the_sizes(activation, four):
    assert four.run(checks.layer, activation, (4,), (6, 3, 6, 10), True, 7)[0] == 9


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_on_two_by_two(activation, four):
    assert four.run(checks.layer, activation, (2, 2), (4, 3, 6, 8), True, 397)[0] == 10


def test_matrices_without_bias(four):
    assert four.run(checks.layer, "relu", (2,), (5, 8, 6), False, 1)[0] == 16
    assert four.run(checks.layer, "none", (2,), (6, 8), False, 1)[0] == 12


def test_bits_are_sharded_by_whole_groups(four):
    """A width of 256 on two processes is cut between two groups of 128 bits, others are not."""
    assert four.run(checks.layer, "relu low", (2,), (4, 6, 256), True, 5)[0] == 10
    assert four.run(checks.under_policy, "cublaslt", "relu", (2,), (4, 6, 256), True, 5)[0] == 10
    assert four.run(checks.under_policy, "cublaslt", "relu", (2,), (4, 6, 8), True, 5)[0] == 10


@pytest.mark.parametrize(
    ("activation", "memory", "shape", "every"),
    [
        ("relu", "default", (2,), 67),
        ("gelu_tanh", "low", (4,), 67),
        ("gelu_erf", "default", (2,), 67),
        ("silu", "default", (2,), 67),
    ],
)
def test_chains(activation, memory, shape, every, four):
    assert four.run(checks.chain, activation, memory, shape, every)[0] == 9


@pytest.mark.parametrize(
    ("form", "out", "bias", "activation", "shape", "every", "cases"),
    [
        ("apart", None, False, "silu", (2,), 1, 5 * 4 * 4),
        ("apart", 5, False, "silu", (2,), 23, 14),
        ("apart", 5, True, "gelu_erf", (4,), 967, 9),
        ("apart", None, False, "relu", (2, 2), 1601, 4),
        ("stacked", 5, True, "gelu_tanh", (2,), 79, 10),
        ("stacked", None, False, "silu", (4,), 3, 7),
    ],
)
def test_gated_layers(form, out, bias, activation, shape, every, cases, four):
    assert four.run(checks.gated, form, out, bias, activation, shape, every)[0] == cases


@pytest.mark.parametrize("way", ["call", "apart"])
@pytest.mark.parametrize(("form", "every", "cases"), [("apart", 1999, 5), ("stacked", 79, 10)])
def test_gated_layers_that_keep_less(form, every, cases, way, four):
    found = four.run(checks.gated, form, 5, True, "silu", (2,), every, way, "low")
    assert found[0] == cases


def test_convolutions(four):
    assert four.run(checks.convolution, (2,), 1, (4,), 11)[0] == 10
    assert four.run(checks.convolution, (2,), 1, (3,), 11)[0] == 10
    assert four.run(checks.convolution, (4,), 2, (4,), 19)[0] == 6
    assert four.run(checks.convolution, (2,), 1, (), 11)[0] == 9  # one image


def test_frozen_parameters(four):
    assert four.run(checks.frozen, (2,))[0] == 63


def test_gated_layers_of_which_little_is_wanted(four):
    four.run(checks.gated_in_parts, (2,))


@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh"])
def test_second_derivatives(activation, four):
    four.run(checks.second_derivative, activation)


CHAIN = [
    ("_linear_aux", "[2, 3, 8] x [4, 8]"),
    ("linear", "[2, 3, 4] x [8, 4]"),
    ("_linear_backward_across", "[2, 3, 4] x [8, 4]"),
    ("_linear_backward", "[2, 3, 8] x [4, 8]"),
]
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


@pytest.mark.parametrize(("way", "ran"), [("mlp", CHAIN), ("layers", CHAIN), ("gated", GATED)])
def test_hidden_activations_are_never_gathered(way, ran, four):
    """Column, then row parallel: a sum forward, and a sum backward for the input's gradient."""
    inference, training, calls = four.run(checks.communication)[0][way]
    assert inference == {"all_reduce": 1}
    assert training == {"all_reduce": 2}
    assert [(name, shapes) for name, shapes, _ in calls] == ran
    if way == "layers":
        assert calls[2][2] == "handed over"
