"""What all tests of fuse_ share."""

import gc

import pytest
from helpers import one_thread  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """unfuse_ looks through all objects of the process, of which the libraries have a million."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
