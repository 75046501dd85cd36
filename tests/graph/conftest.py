"""Every test of this folder begins with a fresh compiler, and runs on one thread."""

import pytest
import torch
from helpers import one_thread  # noqa: F401


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
