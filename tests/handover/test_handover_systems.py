"""Hand-over under torch's other systems: the compiler, compiled autograd, DDP, FSDP."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from helpers import one_thread  # noqa: F401
from stacks import Stack, assert_equal_plain, assert_same
from torch import nn

import torch_fused_linear as tfl


def network(device="cpu", dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(
        tfl.FusedLinearReLU(4, 5),
        tfl.FusedLinearGELU(5, 6),
        tfl.FusedLinearGELU(6, 7, approximate="none"),
        tfl.FusedLinear(7, 3),
    ).to(device=device, dtype=dtype)


def data(device="cpu", dtype=torch.float64):
    gen = torch.Generator().manual_seed(4)
    x = torch.randn(5, 4, generator=gen, dtype=torch.float64)
    return x.to(device=device, dtype=dtype).requires_grad_()


def step(model, x):
    model.zero_grad()
    x.grad = None
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def plain_step(device="cpu"):
    with tfl.handover(False):
        return step(network(device), data(device))


# --- compilers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(backend, device, fresh_compiler):
    model = network(device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with tfl.explain() as report:
        got = step(compiled, data(device))
    assert_same(got, plain_step(device))
    if backend == "eager":  # the graph is torch's own, of our nodes
        assert report.handed_over == 3
    assert_same(step(compiled, data(device)), plain_step(device))


def test_compiled_and_eager_layers_in_turn(device, fresh_compiler):
    model = network(device)
    model[1] = torch.compile(model[1], backend="aot_eager")
    with tfl.explain() as report:
        got = step(model, data(device))
    assert_same(got, plain_step(device))
    assert report.handed_over == 1, report  # between the last two, which are eager


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_autograd(backend, device, fresh_compiler):
    model = network(device)
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)),
        tfl.explain() as report,
    ):
        got = step(model, data(device))
    assert_same(got, plain_step(device))
    assert report.handed_over == 0, report


def test_compiled_autograd_of_a_compiled_model(device, fresh_compiler):
    model = network(device)
    compiled = torch.compile(model, backend="aot_eager")
    with torch._dynamo.config.patch(compiled_autograd=True):
        got = step(compiled, data(device))
    assert_same(got, plain_step(device))


def test_eager_again_after_compiled_autograd(device, fresh_compiler):
    model = network(device)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        step(model, data(device))
    with tfl.explain() as report:
        got = step(model, data(device))
    assert_same(got, plain_step(device))
    assert report.handed_over == 3


# --- distributed --------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path, device):
    """A process group of this process alone: the hooks are the same as of many."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    store = dist.FileStore(str(tmp_path / "store"), 1)
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
def test_ddp(options, device, one_process):
    """Its hooks sit on the parameters, where gradients arrive as they always do."""
    from torch.nn.parallel import DistributedDataParallel

    want = plain_step(device)
    model = DistributedDataParallel(network(device), bucket_cap_mb=0.0001, **options)
    for k in range(3):
        with tfl.explain() as report, model.no_sync() if k == 1 else contextlib.nullcontext():
            got = step(model, data(device))
        assert_same(got, want, f"step {k}")
        assert report.handed_over == 3, report


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("each", [True, False], ids=["layer by layer", "whole"])
def test_fully_shard(each, device, one_process):
    """FSDP2 puts hooks on what goes in and out of each module it is given."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
    want = plain_step(device)
    model = network(device)
    for layer in model if each else []:
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    for _ in range(2):
        with tfl.explain() as report:
            grads = step(model, data(device))
        got = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        assert_same(got, want)
        assert report.handed_over == (0 if each else 3), report


def test_checkpoint_wrapper(device):
    """What FSDP users wrap their layers in."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

    model = network(device)
    wrapped = nn.Sequential(*(wrapper.checkpoint_wrapper(layer) for layer in model))
    assert_same(step(wrapped, data(device)), plain_step(device))


def test_optimiser_in_the_backward(device):
    """Parameters change while the backward runs, each after its last use."""

    def scenario(stack):
        for leaf in stack.leaves:

            def update(p):
                with torch.no_grad():
                    p.sub_(p.grad, alpha=0.1)
                p.grad = None

            leaf.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            stack.backward(stack())
        return [leaf.detach() for leaf in stack.leaves]

    assert_equal_plain(scenario, 9, device=device)
    assert Stack(device=device).leaves
