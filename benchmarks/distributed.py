"""Training steps of transformer blocks on several GPUs: fused beside plain in the same arrangement.

    torchrun --nproc-per-node 2 benchmarks/distributed.py --json FILE
    python benchmarks/distributed.py --ranks 2 --tiny     starts the processes itself; on a CPU, too

A step is forward and backward with all gradients and the communication of the arrangement, without
optimizer. Every rank has its own tokens; under tensor parallelism all ranks work on those of all.
What is compared takes turns, in rounds, all ranks in the same order. A round's time is that of the
slowest rank. With four micro-batches only the last one's backward communicates; the weights'
gradients of the others are added up before: under FSDP2 in fp32, in ours by the products.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, where not installed

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import torch_fused_linear as tfl
from benchmarks.machine import header, warm_up
from benchmarks.memory import peak_bytes
from benchmarks.pages.tables import several_gpus
from benchmarks.results import result, write
from torch_fused_linear.timing import Call, Clock, Contender, clock_for, measure

MICRO_BATCHES = 4
IN_MICRO_BATCHES = tuple(f"{name}, {MICRO_BATCHES} micro-batches" for name in ("DDP", "FSDP2"))
ARRANGEMENTS = ("DDP", "FSDP2", "TP", "TP + sequence parallel", *IN_MICRO_BATCHES)
CONTENDERS = ("plain", "layers", "fuse_")
PARTS = ("feed-forward", "whole")


class FeedForward(nn.Module):
    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        up, down = (tfl.FusedLinearGELU, tfl.FusedLinear) if fused else (nn.Linear, nn.Linear)
        self.up, self.down = up(width, 4 * width), down(4 * width, width)
        self.act = nn.Identity() if fused else nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, part: str, fused: bool) -> None:
        super().__init__()
        self.attends = part == "whole"
        if self.attends:
            self.attention_norm = nn.LayerNorm(width)
            self.attention = Attention(width, min(128, width // 8))
        self.norm, self.mlp = nn.LayerNorm(width), FeedForward(width, fused)

    def forward(self, x: Tensor) -> Tensor:
        if self.attends:
            x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.norm(x))


# --- arrangements -----------------------------------------------------------------------------


def plan_of(block: Block, is_fused: bool, is_sequence: bool) -> dict:
    """By column, then by row, in both halves of the block."""
    layout = Shard(1) if is_sequence else Replicate()
    # A DTensor between the fused layers spares torch the way through ordinary tensors and back.
    up = ColwiseParallel(output_layouts=Shard(2), use_local_output=False)
    row = partial(RowwiseParallel, output_layouts=layout, use_local_output=not is_sequence)
    plan = {"mlp.up": up if is_fused else ColwiseParallel(), "mlp.down": row()}
    parts = ["mlp"]
    if block.attends:
        plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan["attention.out"] = row()
        parts.append("attention")
    if is_sequence:
        gather = partial(PrepareModuleInput, input_layouts=layout, use_local_output=False)
        plan |= {name: gather(desired_input_layouts=Replicate()) for name in parts}
        plan |= {"norm" if n == "mlp" else "attention_norm": SequenceParallel() for n in parts}
    return plan


def arranged(model: nn.Sequential, arrangement: str, mesh, is_fused: bool) -> nn.Module:
    if arrangement.startswith("DDP"):
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if arrangement.startswith("FSDP2"):
        options = {"mesh": mesh}
        if arrangement in IN_MICRO_BATCHES:
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for block in model:
            fully_shard(block, **options)
        return fully_shard(model, **options)
    is_sequence = arrangement != "TP"
    for block in model:
        parallelize_module(block, mesh, plan_of(block, is_fused, is_sequence))
    if is_sequence:
        whole = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False
        )
        parallelize_module(model[0], mesh, whole)
    return model


class Step:
    """One contender's training step."""

    def __init__(self, name: str, case: dict, shape: list[int], mesh, dtype) -> None:
        width, arrangement = case["width"], case["arrangement"]
        torch.manual_seed(0)
        device = torch.device(mesh.device_type)
        is_fused = name == "layers"
        with device:
            blocks = [Block(width, case["part"], is_fused) for _ in range(case["blocks"])]
            torch.manual_seed(1 + dist.get_rank() * arrangement.startswith(("DDP", "FSDP")))
            whole = torch.randn(2, *shape, width, dtype=dtype)
        if arrangement == "TP + sequence parallel":
            whole = whole.chunk(mesh.size(), 2)[mesh.get_local_rank()]
        self.x, self.grad = whole[0].clone().requires_grad_(), whole[1].clone()
        model = nn.Sequential(*blocks).to(dtype)
        if name == "fuse_":
            tfl.fuse_(model)
        self.model = arranged(model, arrangement, mesh, is_fused)
        self.micro_batches = MICRO_BATCHES if arrangement in IN_MICRO_BATCHES else 1
        if self.micro_batches > 1 and name != "plain":
            is_fsdp = arrangement.startswith("FSDP2")
            tfl.accumulate_gradients(self.model, dtype=torch.float32 if is_fsdp else None)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.model.parameters()]

    def __call__(self) -> Tensor:
        for leaf in self.leaves:
            leaf.grad = None
        for left in reversed(range(self.micro_batches)):
            with self.communicating(is_last=left == 0):
                output = self.model(self.x)
                output = output.to_local() if isinstance(output, DTensor) else output
                output.backward(self.grad)
        return output.detach()

    def communicating(self, is_last: bool) -> AbstractContextManager:
        """Only after the last micro-batch."""
        if isinstance(self.model, DistributedDataParallel) and not is_last:
            return self.model.no_sync()
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last)
        return nullcontext()


# --- measuring --------------------------------------------------------------------------------


def slowest(value: float, device: torch.device) -> float:
    """The largest of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def slowest_clock(device: torch.device) -> Clock:
    """As all ranks read the same time, they decide alike how many calls and rounds there are."""
    clock = clock_for(device)

    def seconds(call: Call, times: int) -> float:
        dist.barrier()
        return slowest(clock(call, times), device)

    return seconds


def check(outputs: dict[str, Tensor]) -> None:
    """All contenders compute the same."""
    want = outputs["plain"].float()
    for name, output in outputs.items():
        error = ((output.float() - want).norm() / want.norm()).item()
        if not error < 0.02:
            raise RuntimeError(f"{name} is not what plain is: relative difference {error:.3g}")


def measured(case: dict, shape: list[int], mesh, seconds: float, dtype: torch.dtype) -> dict:
    device = torch.device(mesh.device_type)
    steps = {name: Step(name, case, shape, mesh, dtype) for name in CONTENDERS}
    check({name: step() for name, step in steps.items()})
    if device.type == "cuda":
        tfl.plans.broadcast()
    contenders = [Contender(name, step) for name, step in steps.items()]
    numbers, failed = measure(contenders, slowest_clock(device), seconds)
    if failed:
        raise RuntimeError(str(failed))
    found = result(case, "us", numbers)
    if device.type == "cuda":  # MiB
        found["memory"] = {
            name: slowest(peak_bytes(step, step.leaves) / 2**20, device)
            for name, step in steps.items()
        }
    return found


# --- the command ------------------------------------------------------------------------------


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--ranks", type=int, default=2, help="processes, without torchrun")
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--blocks", type=int, default=4, help="of a model")
    parser.add_argument("--seconds", type=float, default=3, help="for the rounds of a case")
    parser.add_argument("--only", nargs="+", default=ARRANGEMENTS, choices=ARRANGEMENTS)
    parser.add_argument("--tiny", action="store_true", help="does it run?")
    return parser.parse_args(arguments)


def start() -> torch.device:
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def main(arguments: list[str]) -> None:
    given = parsed(arguments)
    if "LOCAL_RANK" not in os.environ:
        from torch.distributed.run import main as torchrun

        torchrun(["--standalone", f"--nproc-per-node={given.ranks}", __file__, *arguments])
        return
    device = start()
    warm_up(device)
    about = header(device, arguments)
    about["machine"] = f"{dist.get_world_size()} x {about['machine']}"
    results = all_results(given, device, about)
    if dist.get_rank() == 0:
        print("\n".join(["", about["machine"], "", *several_gpus(results)]))
    dist.destroy_process_group()


def all_results(given: argparse.Namespace, device: torch.device, about: dict) -> list[dict]:
    """They are written as they come, so that an interrupted run loses none."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    sequences, tokens = (2, 8) if given.tiny else (8, 1024)
    widths, seconds = ([32], 0) if given.tiny else (given.widths, given.seconds)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    results = []
    for width, part, arrangement in itertools.product(widths, PARTS, given.only):
        case = {
            "suite": "distributed",
            "part": part,
            "width": width,
            "blocks": given.blocks,
            "tokens": sequences * tokens,
            "dtype": "bf16" if dtype == torch.bfloat16 else "fp32",
            "activation": "gelu",
            "mode": "step",
            "arrangement": arrangement,
            "ranks": ranks,
        }
        count = sequences * (ranks if arrangement.startswith("TP") else 1)
        results.append(measured(case, [count, tokens], mesh, seconds, dtype))
        gc.collect()
        torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            medians = {n: f"{v['median']:.0f}" for n, v in results[-1]["numbers"].items()}
            print(f"{part}, {width}, {arrangement}: us {medians}", flush=True)
            if given.json:
                write(given.json, about, results)
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
