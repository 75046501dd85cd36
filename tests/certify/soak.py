"""Training with changing shapes in several threads, on streams of their own on a GPU.

A unit is a second. The models and their batches are drawn from the seed; each thread trains its own
model, and the same is trained again by one thread and by plain torch. Bits are equal to the serial
run's, losses equal to plain's up to rounding, and memory does not grow.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn

import torch_fused_linear as tfl
from certify import parts
from certify.parts import Found
from torch_fused_linear import plans

THREADS, STEPS = 4, 6
RATE = 0.01
CLOSE = 1e-4  # of a loss, after a few steps of fp32
GROWTH = 16 << 20  # bytes that may come on top between the first third of the run and its end


def plain_model(choice: random.Random) -> nn.Sequential:
    """Makes an `nn.Sequential` of linear layers and activations."""
    widths = [choice.randrange(1, 96) for _ in range(choice.randrange(2, 6))]
    layers: list[nn.Module] = []
    for k in range(len(widths) - 1):
        layers.append(nn.Linear(widths[k], widths[k + 1], bias=choice.random() < 0.8))
        layers.append(choice.choice([nn.ReLU(), nn.GELU(), nn.GELU(approximate="tanh")]))
    return nn.Sequential(*layers, nn.Linear(widths[-1], 8))


class Work:
    """A model and its batches."""

    def __init__(self, seed: str, device: str) -> None:
        choice = random.Random(seed)
        with torch.random.fork_rng():
            torch.manual_seed(choice.getrandbits(40))
            self.model = plain_model(choice).to(device)
            inner = self.model[0].in_features
            sizes = [choice.randrange(1, 200) for _ in range(STEPS)]
            self.batches = [torch.randn(n, inner).to(device) for n in sizes]
            self.targets = [torch.randn(n, 8).to(device) for n in sizes]
        self.memory = choice.choice(["default", "low"])

    def trained(self, fused: bool) -> tuple[list[float], list[torch.Tensor]]:
        """Losses of each step, and the parameters at the end."""
        model = copy.deepcopy(self.model)
        if fused:
            tfl.fuse_(model, memory=self.memory)
        losses = []
        for x, target in zip(self.batches, self.targets):
            loss = F.mse_loss(model(x), target)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= RATE * p.grad
                    p.grad = None
            losses.append(loss.detach())
        return torch.stack(losses).tolist(), [p.detach() for p in model.parameters()]


def resident(device: str) -> int:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


class Trial(parts.Trial):
    def __init__(self, device: str, measured: bool) -> None:
        super().__init__(device, measured)
        plans.budget(200 if measured else 0)

    def one(self, seed: int, unit: int) -> Found:
        end, found = time.monotonic() + 1.0, {"failures": [], "steps": 0, "rounds": 0}
        while time.monotonic() < end:
            name = f"{seed} {unit} {found['rounds']}"
            work = [Work(f"{name} {t}", self.device) for t in range(THREADS)]
            found["failures"] += self.compared(work)
            found["steps"] += 3 * THREADS * STEPS
            found["rounds"] += 1
        found["memory"] = [resident(self.device)]
        return found

    def compared(self, work: list[Work]) -> list[str]:
        together = self.in_threads(work)
        wrong = []
        for k, (one, result) in enumerate(zip(work, together)):
            if isinstance(result, Exception):
                wrong.append(f"thread {k}: {type(result).__name__}: {result}")
                continue
            losses, parameters = one.trained(fused=True)
            if losses != result[0] or not all(map(torch.equal, parameters, result[1])):
                wrong.append(f"thread {k}: other bits than in a serial run; {one.model}")
            plain, _ = one.trained(fused=False)
            if any(abs(a - b) > CLOSE * (1 + abs(b)) for a, b in zip(losses, plain)):
                wrong.append(f"thread {k}: losses {losses}, plain {plain}; {one.model}")
        return wrong

    def in_threads(self, work: list[Work]) -> list:
        barrier = threading.Barrier(len(work))

        def trained(one: Work):
            stream = contextlib.nullcontext()
            if self.device == "cuda":
                mine = torch.cuda.Stream()
                mine.wait_stream(torch.cuda.default_stream())
                stream = torch.cuda.stream(mine)
            with stream:
                barrier.wait()
                return one.trained(fused=True)

        with ThreadPoolExecutor(len(work)) as pool:
            futures = [pool.submit(trained, one) for one in work]
        if self.device == "cuda":
            torch.cuda.synchronize()
        return [future.exception() or future.result() for future in futures]

    @staticmethod
    def verdict(found: Found, device: str = "cpu") -> list[str]:
        """Memory of an interrupted run begins anew with each process, at a lower level."""
        memory = found.get("memory", [])
        early = memory[len(memory) // 4 : len(memory) // 2]
        late = memory[-max(1, len(memory) // 4) :]
        if len(memory) >= 20 and min(late) > max(early) + GROWTH:
            return [f"memory grew from {max(early) >> 20} to {min(late) >> 20} MiB"]
        return []
