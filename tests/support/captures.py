"""CUDA graphs."""

import torch


def captured(step):
    """A graph of the step, and its results, which each replay writes anew."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
