"""The part of a call's time that lies in what can be fused, as torch's profiler sees it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..policy import handover, set_policy
from ..timing import Contender

PRODUCT = re.compile(r"mm|linear|convolution")
BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Share:
    """Seconds of one call, the GPU's where there is one: in all, in what can be fused, and of that
    in its matrix products."""

    total: float
    fusable: float
    products: float

    @property
    def part(self) -> float:
        return self.fusable / self.total if self.total else 0.0

    @property
    def most(self) -> float:
        """How many times as fast the call would be if only the products took time there."""
        left = self.total - self.fusable + self.products
        return self.total / left if left else 1.0


def share_of(contender: Contender, device: torch.device) -> Share:
    """Profiles a fused model's call under the policy ``"eager"``: then each fused operator is
    eager's own operators, and the profiler has them under its name."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with set_policy("eager"), handover(False), contender.conditions():
        contender.call()
        with profile(activities=activities, acc_events=True) as seen:
            contender.call()
            if on_gpu:
                torch.cuda.synchronize(device)

    def seconds(event: Any) -> float:
        return (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6

    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CPU]
    fused = {e.id: e for root in events if root.name.startswith("fused::") for e in tree(root)}
    # A node of the backward has the number of the operator in the forward that made it.
    numbers = {e.sequence_nr for e in fused.values() if e.sequence_nr >= 0}
    for event in events:
        if event.name.startswith(BACKWARD) and event.sequence_nr in numbers:
            fused |= {e.id: e for e in tree(event)}
    products = [e for e in fused.values() if PRODUCT.search(e.name)]
    return Share(*(sum(map(seconds, those)) for those in (events, fused.values(), products)))


def tree(event: Any) -> Iterable[Any]:
    yield event
    for child in event.cpu_children:
        yield from tree(child)
