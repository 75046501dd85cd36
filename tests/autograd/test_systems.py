"""Layers and blocks under torch's other systems: the compiler, compiled autograd, DDP, FSDP."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import one_thread  # noqa: F401
from stacks import assert_same, network
from torch.nn.parallel import DistributedDataParallel
from watching import explained


def data(device):
    gen = torch.Generator().manual_seed(4)
    return torch.randn(5, 4, generator=gen, dtype=torch.float64).to(device).requires_grad_()


def step(model, x):
    model.zero_grad()
    x.grad = None
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def check(model, form, device, operator="_linear_backward", label=""):
    """A step has the gradients of torch's own modules, by fused operators."""
    want = step(network(form, device, fused=False), data(device))
    grads, report = explained(lambda: step(model, data(device)))
    got = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
    assert_same(got, want, label)
    assert any(call.operator.startswith(operator) for call in report.calls), f"{label} {report}"


def whole(model, backend):
    return torch.compile(model, fullgraph=True, backend=backend)


def second_layer(model, backend):
    model[1] = torch.compile(model[1], backend=backend)
    return model


@pytest.mark.parametrize("form", ["layers", "blocks"])
@pytest.mark.parametrize(
    "compiled, backend",
    [(whole, "eager"), (whole, "aot_eager"), (second_layer, "aot_eager")],
)
def test_torch_compile(compiled, backend, form, device, fresh_compiler):
    model = compiled(network(form, device), backend)
    check(model, form, device)
    check(model, form, device, label="again")


@pytest.mark.parametrize("form", ["layers", "blocks"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_autograd(backend, form, device, fresh_compiler):
    """Compares eager layers, then a compiled model, then layers without compiled autograd."""
    model = network(form, device)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        check(model, form, device)
    with torch._dynamo.config.patch(compiled_autograd=True):
        check(torch.compile(model, backend=backend), form, device)
    check(model, form, device)


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


def ddp(model, device, **options):
    """Its hooks sit on the parameters, where gradients arrive as they always do."""
    return DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)


def fsdp(model, device, each):
    """FSDP2 puts hooks on what goes in and out of each module it is given."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
    for layer in [*model, model] if each else [model]:
        fsdp.fully_shard(layer, mesh=mesh)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["layers", "blocks"])
@pytest.mark.parametrize(
    "arranged",
    [
        ddp,
        partial(ddp, static_graph=True),
        partial(ddp, gradient_as_bucket_view=True),
        partial(fsdp, each=True),
        partial(fsdp, each=False),
    ],
    ids=["ddp", "static graph", "bucket views", "fsdp of layers", "fsdp of the whole"],
)
def test_data_parallel(arranged, form, device, one_process):
    model = arranged(network(form, device), device)
    for k in range(3):
        held = k == 1 and hasattr(model, "no_sync")
        operator = "_linear_backward_across" if form == "blocks" else "_linear_backward"
        with model.no_sync() if held else contextlib.nullcontext():
            check(model, form, device, operator, f"step {k}")
