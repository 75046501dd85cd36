"""torch's asynchronous tensor parallelism finds its products in graphs that our pass has seen."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes import micro_pipeline_tp as overlap
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

import torch_fused_linear as tfl


@pytest.fixture
def group():
    """Two processes, of which the other is only said to be there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def feed_forward(x, up, down, group):
    """A block of tensor and sequence parallelism, in functional collectives."""
    h = F.gelu(F.linear(all_gather_tensor(x, 0, group), up), approximate="tanh")
    return reduce_scatter_tensor(F.linear(h, down), "sum", 0, group)


def count(ours, function, *args):
    """How many products torch would overlap with a collective in the compiled forward."""
    found = []

    def capture(module, _):
        view_to_reshape(module)
        gathers = overlap.find_all_gather_patterns(module.graph)
        scatters = overlap.find_reduce_scatter_patterns(module.graph)
        before = sum(len(overlap._find_consumer_matmuls(g.res_node)) for g in gathers)
        after = sum(overlap._find_producer_matmul(s.input_node) is not None for s in scatters)
        found.append((before, after))
        return module.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=capture)
    if ours:
        backend = tfl.compile_backend(backend)
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return found, backend.replaced if ours else None


def and_layers(x, up, down, group):
    return F.linear(F.relu(F.linear(feed_forward(x, up, down, group) * 2, up)), down)


@pytest.mark.parametrize(
    ("function", "is_overlapped", "products", "replaced"),
    [
        (feed_forward, True, 1, {}),
        (feed_forward, False, 0, {"mlp": 1}),
        (and_layers, True, 1, {"mlp": 1}),
    ],
)
def test_products_beside_collectives_are_left(function, is_overlapped, products, replaced, group):
    """Where they are overlapped; other layers are still fused."""
    args = (function, torch.randn(4, 8), torch.randn(16, 8), torch.randn(8, 16), group)
    with torch._inductor.config.patch(_micro_pipeline_tp=is_overlapped):
        assert count(False, *args)[0] == [(1, 1)]
        assert count(True, *args) == ([(products, products)], replaced)
