"""Functions that the ranks run to compare arrangements of torch.distributed with one process."""

import contextlib
import os
import time
from functools import partial

import torch
import torch.distributed as dist
from layers import MODULES, GatedBlock
from meshes import device_type, full, mesh_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from watching import explained, operators_of

import torch_fused_linear as tfl
from torch_fused_linear.distributed import MLPParallel

WIDTH, HIDDEN = 8, 16


class Block(nn.Module):
    """A transformer's feed-forward block, of the layers that ``kind`` says."""

    def __init__(self, kind, activation="gelu_tanh"):
        super().__init__()
        self.norm, act = nn.LayerNorm(WIDTH), MODULES[activation]()
        self.is_mlp = kind.startswith(("mlp", "gated"))
        if kind.startswith("gated"):
            cls = GatedBlock if kind == "gated plain" else tfl.FusedGatedMLP
            self.mlp = cls(WIDTH, HIDDEN, bias=True)
        elif kind.startswith("mlp"):
            self.mlp = tfl.FusedMLP(WIDTH, HIDDEN, WIDTH, activation=activation)
        elif kind == "layers":
            cls = tfl.FusedLinearReLU if activation == "relu" else tfl.FusedLinearGELU
            self.up, self.act = cls(WIDTH, HIDDEN), nn.Identity()
            self.down = tfl.FusedLinear(HIDDEN, WIDTH)
        else:
            self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), act, nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        if self.is_mlp:
            return x + self.mlp(self.norm(x))
        return x + self.down(self.act(self.up(self.norm(x))))


def model_of(kind, blocks=2, dtype=torch.float64, activation="gelu_tanh"):
    """A model with equal parameters on every rank, whatever the kind."""
    torch.manual_seed(7)
    model = nn.Sequential(*(Block(kind, activation) for _ in range(blocks)))
    model = model.to(dtype=dtype, device=device_type())
    if kind == "fuse_":
        tfl.fuse_(model)
    return model


def batch(step, rank=None, ranks=1, dtype=torch.float64):
    """The batch of all ranks, or one rank's part."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(2, 8, 4, WIDTH, generator=generator, dtype=torch.float64)
    x, y = drawn.to(dtype=dtype, device=device_type())
    return (x, y) if rank is None else (x.chunk(ranks)[rank], y.chunk(ranks)[rank])


def named(model):
    """The parameters and gradients, whole, by the names of a block of layers."""
    names = {"mlp.0.": "up.", "mlp.2.": "down.", "_orig_mod.": "", "module.": ""}
    result = {}
    for name, parameter in model.named_parameters():
        for ours, plain in names.items():
            name = name.replace(ours, plain)
        result[name] = full(parameter.detach()).cpu().clone()
        result[name + ".grad"] = full(parameter.grad).cpu().clone()
    return result


def train(model, batches, accumulate=None):
    """SGD over the batches; losses, parameters, last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for k, (x, y) in enumerate(batches):
        last = accumulate is None or k % 2
        with contextlib.nullcontext() if last else accumulate():
            loss = (full(model(x)) - y).square().mean()
            loss.backward()
        losses.append(full(loss.detach()).item())
        if last:
            result = named(model)
            optimizer.step()
            optimizer.zero_grad()
    return losses, result


def single(kind, batches=2, accumulate=False, **options):
    """The plain model of the kind in one process, on the whole batch."""
    model = model_of("gated plain" if kind.startswith("gated") else "plain", **options)
    hold = contextlib.nullcontext if accumulate else None
    return train(model, [batch(k) for k in range(batches)], hold)


def assert_same(got, want, mean_losses=False, **tolerance):
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-10}
    losses = torch.tensor(got[0], dtype=torch.float64, device=device_type())
    if mean_losses:
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    found = {"losses": losses.cpu(), **got[1]}
    wanted = {"losses": torch.tensor(want[0], dtype=torch.float64), **want[1]}
    torch.testing.assert_close(found, wanted, check_dtype=False, **tolerance)


def ran(report):
    """The operators that ran on this rank's part, with shapes and paths."""
    return [(call.operator, call.shapes, call.path) for call in report.calls]


# --- tensor parallel ----------------------------------------------------------------------------

SEQUENCE = Shard(1)
CHILDREN = {
    "mlp children": ["mlp.0", "mlp.2"],
    "gated children": ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
}


def plan_of(kind, sequence, local):
    """How a block is spread: with sequence parallelism, or with whole activations between."""
    layout = SEQUENCE if sequence else Replicate()
    plan = {"norm": SequenceParallel()} if sequence else {}
    last = {"output_layouts": layout, "use_local_output": not sequence}
    if kind in CHILDREN:
        *columns, row = CHILDREN[kind]
        plan |= {name: ColwiseParallel(input_layouts=layout) for name in columns}
        plan[row] = RowwiseParallel(**last)
    elif kind in ("mlp", "gated"):
        plan["mlp"] = MLPParallel(input_layouts=layout, **last)
    else:
        hidden = Shard(-1 if local else 2)  # torch redistributes what it is called differently
        plan["up"] = ColwiseParallel(
            input_layouts=layout, output_layouts=hidden, use_local_output=local
        )
        plan["down"] = RowwiseParallel(**last)
    return plan


def tensor_parallel(model, mesh, kind, sequence=False, local=True):
    for block in model:
        parallelize_module(block, mesh, plan_of(kind, sequence, local))
    if sequence:
        whole = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=SEQUENCE, use_local_output=False
        )
        parallelize_module(model[0], mesh, whole)
    return model


def tp(kind, ranks, sequence, local, compiled=False, activation="gelu_tanh"):
    """Two steps of tensor parallelism; what ran in the last."""
    mesh = mesh_of((ranks,))
    if dist.get_rank() >= ranks:  # another mesh, of which the processors are better used here
        return None
    model = model_of("plain" if kind == "fuse_ after" else kind, activation=activation)
    tensor_parallel(model, mesh, kind, sequence, local)
    if kind == "fuse_ after":
        tfl.fuse_(model)
    if compiled:
        model.compile(backend="aot_eager", fullgraph=not sequence)
    got, report = explained(lambda: train(model, [batch(k) for k in range(2)]))
    assert_same(got, single(kind, activation=activation))
    return ran(report)[len(report.calls) // 2 :]


# --- data parallel ------------------------------------------------------------------------------


def mine(count, mesh=None, **options):
    rank = dist.get_rank() if mesh is None else mesh.get_local_rank()
    ranks = dist.get_world_size() if mesh is None else mesh.size()
    return [batch(k, rank, ranks, **options) for k in range(count)]


def shard(model, mesh, by="block", **options):
    for block in model:
        if by == "layer":
            for child in [block.mlp] if block.is_mlp else [block.up, block.down]:
                fully_shard(child, mesh=mesh, **options)
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def unsynchronised(model):
    """A context in which FSDP2 keeps gradients where they are."""

    @contextlib.contextmanager
    def accumulate():
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return accumulate


# Options of DDP and FSDP2.
DDP = {
    "ddp": {},
    "ddp views": {"gradient_as_bucket_view": True},
    "ddp static": {"static_graph": True},
    "ddp compiled": {"bucket_cap_mb": 25},
}
FSDP = {
    "fsdp": {},
    "fsdp by layer": {"by": "layer"},
    "fsdp mixed": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


def arranged(model, how):
    """A model in an arrangement, and the context in which it keeps gradients where they are."""
    if how in DDP:
        model = DistributedDataParallel(model, **{"bucket_cap_mb": 0.001, **DDP[how]})
        return model, model.no_sync
    shard(model, mesh_of((dist.get_world_size(),)), **FSDP[how])
    return model, unsynchronised(model)


def data_parallel(kind, how, accumulate=False, checkpoints=False):
    """Two steps, or with `accumulate` of two batches each; the operators that ran."""
    model, batches = model_of(kind), 4 if accumulate else 2
    if checkpoints:
        for block in model:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    model, hold = arranged(model, how)
    run = torch.compile(model, backend="aot_eager") if how == "ddp compiled" else model
    got, report = explained(lambda: train(run, mine(batches), hold if accumulate else None))
    assert_same(got, single(kind, batches, accumulate), mean_losses=True)
    return [call.operator for call in report.calls]


def adding(kind, how, compiled=False):
    """Two micro-batches a step, whose gradients the products add; how often they did."""
    mixed = how == "fsdp mixed"
    dtype = torch.float32 if mixed else torch.float64
    results = []
    for each in (kind, "plain") if mixed else (kind,):
        model, hold = arranged(model_of(each, dtype=dtype), how)
        with contextlib.ExitStack() as stack:
            if compiled:
                for block in model.module if how in DDP else model:
                    block.compile(options=tfl.compile_options())
            if each != "plain":
                wide = torch.float32 if mixed else None
                stack.enter_context(tfl.accumulate_gradients(model, dtype=wide))
                report = stack.enter_context(tfl.explain())
            results.append(train(model, mine(4, dtype=dtype), hold))
    if mixed:
        assert_same(*results, rtol=0.02, atol=2e-3)
    else:
        assert_same(results[0], single(kind, 4, accumulate=True), mean_losses=True)
    added = [call.shapes for call in report.calls if call.operator == "_weight_gradient"]
    return sum("," in shapes.partition(" x ")[2] for shapes in added)  # a bias's has none


def mixed_precision(kind):
    """Parameters in fp32, products in bf16, beside the plain layers in the same arrangement."""
    results = []
    for each in (kind, "plain"):
        model, _ = arranged(model_of(each, dtype=torch.float32), "fsdp mixed")
        with tfl.explain() as report:
            results.append(train(model, mine(2, dtype=torch.float32)))
        assert {call.dtype for call in report.calls} <= {"BFloat16"}
        assert bool(report.calls) == (each != "plain")
    assert_same(*results, rtol=0.02, atol=2e-3)


def two_dimensions(kind, sequence):
    """FSDP2 over one dimension of the mesh, tensor parallel over the other."""
    mesh = mesh_of((2, 2))
    model = tensor_parallel(model_of(kind), mesh["tp"], kind, sequence, local=not sequence)
    shard(model, mesh["dp"])
    got, report = explained(lambda: train(model, mine(2, mesh["dp"])))
    assert_same(got, single(kind), mean_losses=True)
    return ran(report)[len(report.calls) // 2 :]


def checkpoint_across(folder):
    """A checkpoint of one arrangement, read by another, and by a plain model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    mesh = mesh_of((2, 2))
    model = tensor_parallel(model_of("layers"), mesh["tp"], "layers")
    shard(model, mesh["dp"])
    train(model, mine(1, mesh["dp"]))
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    want = {name: full(value).clone() for name, value in model.state_dict().items()}

    for each in (shard(model_of("layers"), mesh_of((4,)), "layer"), model_of("plain")):
        state = get_model_state_dict(each)
        assert any(not torch.equal(full(v), want[k]) for k, v in state.items())
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(each, state)
        for name, value in each.state_dict().items():
            torch.testing.assert_close(full(value), want[name], rtol=0, atol=0)


def pipeline():
    """Two stages, cut between two fused layers, four micro-batches."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, device = dist.get_rank(), torch.device(device_type())
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    plain = model_of("plain")
    whole = model_of("layers")
    layers = [layer for block in whole for layer in (block.norm, block.up, block.down)]
    parts = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
    stage = PipelineStage(parts[rank % 2], rank % 2, 2, device, group=groups[rank // 2])

    def loss(output, target):
        return (output - target).square().mean()

    x, y = batch(0)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss)
    schedule.step(x) if rank % 2 == 0 else schedule.step(target=y)

    modules = [m for b in plain for m in (b.norm, nn.Sequential(b.up, b.act), b.down)]
    loss(nn.Sequential(*modules)(x), y).backward()
    want = dict(plain.named_parameters())
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, want[name].grad, rtol=1e-9, atol=1e-10)
    held = {id(p) for p in parts[rank % 2].parameters()}
    assert all((p.grad is not None) == (id(p) in held) for p in whole.parameters())


def warmed_up(how):
    """Training that begins with ``plans.warmup``, and what that ran."""
    model = model_of("layers")
    if how == "tp":
        tensor_parallel(model, mesh_of((4,)), "layers")
    else:
        model, _ = arranged(model, how)
    batches = [batch(k) for k in range(2)] if how == "tp" else mine(2)
    ran = operators_of(lambda: tfl.plans.warmup(model, batches[0][0]))
    assert_same(train(model, batches), single("layers"), mean_losses=how != "tp")
    return ran


# --- where fuse_ leaves layers under torch's plans as they are -----------------------------------


class Own(ColwiseParallel):
    """A plan with a hook that an activation must not pass."""

    @staticmethod
    def _prepare_output_fn(layouts, use_local, module, output, mesh):
        return ColwiseParallel._prepare_output_fn(layouts, use_local, module, output, mesh) - 1


def hooks_around_layers():
    """The operators that a layer and ReLU run after ``fuse_``; the results are those before it."""
    mesh = mesh_of((4,))
    whole = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    by_column = ("fused", "watched before", "watched after", "with keywords")
    ways = {how: ColwiseParallel(**whole) for how in by_column}
    ways |= {"a sum to make": RowwiseParallel(**whole), "a style of its own": Own()}
    found = {}
    for how, plan in ways.items():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(device_type(), torch.float64)
        parallelize_module(model, mesh, {"0": plan})
        tfl.fuse_(model)
        if how == "watched before":
            model[0].register_forward_pre_hook(lambda _, given: (2 * given[0],))
        if how == "watched after":
            model[0].register_forward_hook(lambda _, given, output: output - 1)
        if how == "with keywords":
            model[0].register_forward_pre_hook(lambda *given: None, with_kwargs=True)
        x = batch(0)[0]
        want = model[1](model[0](x))
        with torch.no_grad(), tfl.explain() as report:
            got = model(x)
        torch.testing.assert_close(got, want.detach())
        found[how] = [call.operator for call in report.calls if call.operator != "linear"]
    return found


# --- when a rank dies ---------------------------------------------------------------------------


def die(rank):
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def hang(rank):
    if dist.get_rank() != rank:
        dist.barrier()
    else:
        time.sleep(1000)
