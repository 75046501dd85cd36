"""plans.broadcast: one rank's plans go to all."""

import plan_checks as checks
import pytest
import torch


def test_all_take_the_plans_of_one(four):
    own, taken = ["gpu rank 2"], ["gpu rank 2", "clear", "gpu rank 2"]
    assert four.run(checks.travels, None, 2) == [taken, taken, own, taken]


def test_within_a_group(four):
    """The source is counted within the group."""
    own, taken = ["gpu rank 3"], ["gpu rank 3", "clear", "gpu rank 3"]
    assert four.run(checks.travels, [1, 3], 1) == [None, taken, None, own]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_source_that_fails_leaves_nobody_waiting(four):
    said = four.run(checks.fails)
    assert len(set(said)) == 1
    assert said[0].startswith("plans.broadcast: rank 0 of the group failed: plans.save: plans are")
