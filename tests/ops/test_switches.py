"""Switches of the process: as calls, blocks and decorators; what policies change and what not."""

import pytest
import torch
from numerics import assert_same, run
from operators import POLICIES, mlp
from stacks import MIXED, Stack
from watching import operators_of

import torch_fused_linear as tfl

# name: the switch, what is in force, three values, what is no value, what is expected
SWITCHES = {
    "set_policy": (
        tfl.set_policy,
        tfl.get_policy,
        ("auto", "eager", "cublaslt"),
        (None, 1, b"auto", ["auto"], print),
        "policy must be 'auto', 'cublaslt', 'eager' or 'batch_invariant'",
    ),
    "budget": (
        tfl.plans.budget,
        tfl.plans.get_budget,
        (200.0, 0.1, 3),
        (None, True, "200", print),
        "milliseconds must be a number",
    ),
    "patience": (
        tfl.plans.patience,
        tfl.plans.get_patience,
        (256, 0, 3),
        (None, True, 0.5, "3", print),
        "calls must be an integer",
    ),
}


@pytest.fixture(params=SWITCHES)
def case(request):
    switch, now, values, wrong, expected = SWITCHES[request.param]
    before = now()
    switch(values[0])
    yield switch, now, values, wrong, expected
    switch(before)


def test_a_call_sets_it_and_a_block_puts_it_back(case):
    switch, now, (first, second, third), *_ = case
    with switch(second):
        assert now() == second
        switch(third)
        assert now() == third
    assert now() == first
    with pytest.raises(KeyError), switch(second):
        raise KeyError
    assert now() == first


def test_the_same_object_entered_again(case):
    """It is set in the block, not only where the object was made."""
    switch, now, (first, second, third), *_ = case
    again = switch(second)
    for _ in range(3):
        with again:
            assert now() == second
        assert now() == first
    for later in (again, switch(second)):
        switch(third)
        with later:
            assert now() == second
        assert now() == third


def test_within_itself(case):
    switch, now, (first, second, third), *_ = case
    outer = switch(second)
    with outer:
        with switch(third):
            with outer:
                assert now() == second
            assert now() == third
        assert now() == second
        with outer:
            assert now() == second
        assert now() == second
    assert now() == first


def test_as_a_decorator(case):
    """Nothing is set until the function runs; a function that calls itself is no exception."""
    switch, now, (first, second, third), *_ = case
    seen = []

    @switch(second)
    def count(n):
        """Its words."""
        seen.append(now())
        if n:
            switch(third)
            count(n - 1)
            seen.append(now())

    assert now() == first, "decorating switched"
    assert count.__name__ == "count" and count.__doc__ == "Its words."
    for _ in range(2):
        seen.clear()
        count(2)
        assert seen == [second, second, second, third, third]
        assert now() == first
    switch(third)
    count(0)
    assert now() == third

    @switch(second)
    def values():
        yield now()
        yield now()

    for value in values():
        assert value == second and now() == third


def test_an_invalid_value_raises_and_changes_nothing(case):
    switch, now, (_first, second, _), wrong, expected = case
    switch(second)
    for value in wrong:
        with pytest.raises(TypeError, match=expected):
            switch(value)
    assert now() == second


def test_operators_called_under_each_policy(device):
    """In a layer's forward for training."""

    def called(policy, activation):
        with tfl.set_policy(policy):
            return operators_of(Stack((activation,), widths=[4, 8], device=device))

    assert called("auto", "relu") == ["linear_relu"]
    assert called("cublaslt", "relu") == ["_linear_aux"]
    assert called("auto", "gelu_tanh") == called("cublaslt", "gelu_tanh") == ["_linear_aux"]
    # Under eager, torch's own graph runs the backward, so explain has rows of the forward alone.
    stack = Stack(device=device)
    with tfl.set_policy("eager"):
        ran = operators_of(lambda: stack.backward(stack()), "operator", "path")
    names = ["linear_relu", "linear_gelu", "linear_gelu", "linear"]
    assert ran == [(name, "PyTorch's own (not fused)") for name in names]


@pytest.mark.parametrize("second", POLICIES)
@pytest.mark.parametrize("first", POLICIES)
def test_changed_between_layers_and_before_the_backward(first, second, device):
    """A saved tensor decides, not the policy of the moment: a mask that one layer has saved is read
    by whichever layer follows."""
    for activations in (MIXED, ("relu",) * 3, ("relu", "relu", "gelu_tanh", "none")):
        lead = {"lead": (2, 3), "device": device}
        want, stack = (Stack(activations, **lead, fused=fused) for fused in (False, True))
        want.backward(want())
        y = stack.x
        for k in range(len(activations)):
            with tfl.set_policy((first, second)[k % 2]):
                y = stack.layer(k, y)
        with tfl.set_policy(second):
            stack.backward(y)
        assert_same(stack.grads(), want.grads())


@pytest.mark.parametrize("second", POLICIES)
@pytest.mark.parametrize("first", POLICIES)
@pytest.mark.parametrize("memory", ["default", "low"])
def test_a_block_whose_policy_changes_before_the_backward(memory, first, second, device):
    for activation in ("relu", "gelu_tanh", "silu"):
        op = mlp(activation, 3, memory=memory)
        case = op.case((5,), device=device)
        leaves = case.leaves()
        with tfl.set_policy(first):
            y = op.call(*leaves)
        with tfl.set_policy(second):
            assert_same([y, *torch.autograd.grad(y, leaves, case.g)], run(op.eager, case))


def test_eager_holds_for_mlp_without_gradients(device):
    """Below autograd too, where oneDNN or cuBLASLt would otherwise take over."""
    mlp = tfl.FusedMLP(64, 256, 64, activation="gelu_tanh", device=device)
    x = torch.randn(512, 64, device=device)
    with tfl.set_policy("eager"), torch.inference_mode():
        steps = set(operators_of(lambda: mlp(x), "path", "operator"))
        assert steps == {("PyTorch's own (not fused)", "mlp")}
