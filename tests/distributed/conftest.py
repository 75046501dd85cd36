"""Processes that the tests of this folder share."""

import pytest
import torch.distributed as dist
from ranks import Ranks


@pytest.fixture(scope="session")
def four(tmp_path_factory):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    ranks = Ranks(4, "gloo", tmp_path_factory.mktemp("gloo"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two_gpus(tmp_path_factory):
    ranks = Ranks(2, "nccl", tmp_path_factory.mktemp("nccl"))
    yield ranks
    ranks.stop()
