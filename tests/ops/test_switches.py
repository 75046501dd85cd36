"""set_policy, handover, plans.budget: calls, blocks entered again, decorators."""

import pytest
import torch
from helpers import one_thread  # noqa: F401

import torch_fused_linear as tfl

# name: the switch, what is in force, three values, what is no value, what is expected
SWITCHES = {
    "set_policy": (
        tfl.set_policy,
        torch.ops.fused._policy,
        ("auto", "eager", "cublaslt"),
        (None, 1, b"auto", ["auto"], print),
        "policy must be 'auto', 'cublaslt' or 'eager'",
    ),
    "handover": (
        tfl.handover,
        torch.ops.fused._handover,
        (True, False, True),
        (None, 1, "off", print),
        "enabled must be True or False",
    ),
    "budget": (
        tfl.plans.budget,
        torch.ops.fused._plans_budget,
        (200.0, 0.1, 3),
        (None, True, "200", print),
        "milliseconds must be a number",
    ),
}


@pytest.fixture(params=SWITCHES)
def case(request):
    switch, now, values, wrong, expected = SWITCHES[request.param]
    before = now()
    switch(values[0])
    yield switch, now, values, wrong, expected
    switch(before)


def test_a_call_sets_it(case):
    switch, now, (_first, second, third), *_ = case
    switch(second)
    assert now() == second
    switch(third)
    assert now() == third


def test_a_block_puts_it_back_whatever_happens_inside(case):
    switch, now, (first, second, third), *_ = case
    with switch(second):
        switch(third)
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
    switch(third)
    with again:
        assert now() == second
    assert now() == third


def test_another_value_between_making_and_entering(case):
    switch, now, (_first, second, third), *_ = case
    kept = switch(second)
    switch(third)
    with kept:
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


def test_as_the_decorator_of_a_generator(case):
    switch, now, (first, second, _), *_ = case

    @switch(second)
    def values():
        yield now()
        yield now()

    for value in values():
        assert value == second and now() == first


def test_what_is_no_value_is_refused_and_changes_nothing(case):
    switch, now, (_first, second, _), wrong, expected = case
    switch(second)
    for value in wrong:
        with pytest.raises(TypeError) as error:
            switch(value)
        assert str(error.value) == f"{switch.__name__}: {expected}, got {value!r}"
    assert now() == second


def test_a_decorator_holds_where_the_function_runs():
    @tfl.set_policy("eager")
    def reference(x, w):
        return tfl.linear_relu(x, w)

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    assert reference(x, w).grad_fn.name() == "ReluBackward0"
    assert tfl.linear_relu(x, w).grad_fn.name() != "ReluBackward0"
