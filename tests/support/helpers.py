"""Devices, CUDA graphs, threads and settings of tests."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]  # conftest skips the latter
device_param = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For the files that import it: on tensors this small a second thread only costs, and on a
    busy machine it costs a hundredfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """For files whose tests look through all objects, of which the libraries have a million."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@contextlib.contextmanager
def setting(function: Callable[[object], object], value, afterwards) -> Iterator[None]:
    """Calls a setter for the block alone."""
    function(value)
    try:
        yield
    finally:
        function(afterwards)


def captured(step):
    """A CUDA graph of the step, and its results, which each replay writes anew."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
