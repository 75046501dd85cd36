"""A rank that dies or hangs fails its test, and leaves nobody waiting."""

import parallel_checks as checks
import pytest
import torch.distributed as dist
from ranks import Ranks


@pytest.fixture
def two(tmp_path):
    if not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    ranks = Ranks(2, "gloo", tmp_path)
    yield ranks
    ranks.stop()


def test_a_dead_rank(two):
    with pytest.raises(AssertionError, match="rank 1: died"):
        two.run(checks.die, 1)
    assert two.processes == []
    two.run(dist.get_rank)  # starts them anew
    with pytest.raises(AssertionError, match=r"rank \d: no answer in 1 s"):
        two.run(checks.hang, 1, seconds=1)
    assert two.processes == []
