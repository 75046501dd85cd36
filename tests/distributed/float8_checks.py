"""Functions that the ranks run to train models in FP8 under FSDP2 and DDP."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from meshes import full, mesh_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from watching import explained

import torch_fused_linear as tfl

WIDTH, HIDDEN = 32, 64


class Block(nn.Module):
    """A feed-forward block, gated or not, with a norm and a residual: of layers, or our module."""

    def __init__(self, gated, is_ours):
        super().__init__()
        self.norm, self.gated, self.mlp = nn.LayerNorm(WIDTH), gated, None
        if is_ours and gated:
            self.mlp = tfl.FusedGatedMLP(WIDTH, HIDDEN, precision="float8")
        elif is_ours:
            sizes = WIDTH, HIDDEN, WIDTH
            self.mlp = tfl.FusedMLP(*sizes, activation="gelu_erf", precision="float8")
        else:
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
            self.gate = nn.Linear(WIDTH, HIDDEN) if gated else None

    def forward(self, x):
        h = self.norm(x)
        if self.mlp is not None:
            return x + self.mlp(h)
        if self.gated:
            return x + self.down(F.silu(self.gate(h)) * self.up(h))
        return x + self.down(F.gelu(self.up(h)))


def model_of(kind, dtype):
    """A model with equal parameters on every rank, of torchao's fused layers or of our modules."""
    from torchao.float8 import convert_to_float8_training

    torch.manual_seed(3)
    model = nn.Sequential(*(Block(gated, kind == "modules") for gated in (False, True))).to(dtype)
    if kind == "fuse_":
        tfl.fuse_(convert_to_float8_training(model))
    return model


def batch(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 16, WIDTH, generator=generator).to(dtype)


def gradients(model, x):
    model(x).square().mean().backward()
    found = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    return {n: full(grad).float() for n, grad in found.items()}


def trained(kind, how, dtype):
    """Compares each gradient with the mean of those that single processes compute of the ranks'
    batches, as each rank has scales of its own; returns the steps that ran."""
    x = batch(dist.get_rank(), dtype)
    single = [gradients(model_of(kind, dtype), batch(r, dtype)) for r in range(4)]
    wanted = {name: sum(one[name] for one in single) / 4 for name in single[0]}
    master = torch.float32 if how == "fsdp, master weights" else dtype
    model = model_of(kind, dtype).to(master)
    if how == "ddp":
        model = DistributedDataParallel(model)
    else:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        options = {"mp_policy": policy} if master != dtype else {}
        for block in model:
            fully_shard(block, mesh=mesh_of((4,)), **options)
        fully_shard(model, mesh=mesh_of((4,)), **options)
    found, report = explained(lambda: gradients(model, x))
    rounding = torch.finfo(dtype).eps  # of a gradient before the sum over ranks, and of the sum
    torch.testing.assert_close(found, wanted, rtol=2 * rounding, atol=2 * rounding)
    return [call.operator for call in report.calls]
