"""Shared by the three examples: processes, a model, data, training, and the comparison."""

import os
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fused_linear import FusedMLP, explain

STEPS, BATCH, TOKENS, WIDTH = 5, 8, 16, 64


class FeedForward(nn.Module):
    """The feed-forward block of a transformer: two layers in one operator, and a sum around."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = FusedMLP(WIDTH, 4 * WIDTH, WIDTH, activation="gelu_tanh")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def start() -> torch.device:
    """Joins the processes that torchrun has started: on GPUs if each can have one, else on CPUs."""
    local = int(os.environ["LOCAL_RANK"])
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpus else "gloo")
    return device


def make_model(device: torch.device) -> nn.Module:
    """Two blocks, with the same parameters in every process."""
    torch.manual_seed(0)
    return nn.Sequential(FeedForward(), FeedForward()).to(device)


def batches(device: torch.device, part: int = 0, parts: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets, or one of several parts of each."""
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(2, BATCH, TOKENS, WIDTH, generator=generator) for _ in range(STEPS)]
    return [(x.chunk(parts)[part].to(device), y.chunk(parts)[part].to(device)) for x, y in whole]


def groups_of(parameters: Iterable) -> list[dict]:
    """Distributed parameters and plain ones in groups of their own.

    An optimizer updates each group by one kernel for many tensors (``foreach``, the default on a
    GPU), which takes no mixture of the two; tensor parallelism leaves norms plain.
    """
    every = list(parameters)
    distributed = [p for p in every if isinstance(p, DTensor)]
    plain = [p for p in every if not isinstance(p, DTensor)]
    return [{"params": group} for group in (distributed, plain) if group]


def train(model: Callable, parameters: Iterable, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The loss of every step."""
    optimizer = torch.optim.AdamW(groups_of(parameters), lr=1e-2)
    losses = []
    for x, y in data:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def say_what_ran(report: explain, steps: int) -> None:
    """Prints how many blocks ran as one operator, by the backwards of each step."""
    across = sum(call.operator == "_linear_backward_across" for call in report.calls)
    print(f"{across // steps} blocks were one operator each in {steps} steps")


def compare(name: str, losses: Tensor, device: torch.device) -> None:
    """Prints the losses beside those of a single process, and fails where they differ."""
    model = make_model(device)
    alone = train(model, model.parameters(), batches(device))
    if dist.get_rank() == 0:
        print(f"{name}, {dist.get_world_size()} processes on {device.type}")
        for step, (ours, single) in enumerate(zip(losses.tolist(), alone.tolist(), strict=True)):
            print(f"step {step}: loss {ours:.6f}, in a single process {single:.6f}")
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()
