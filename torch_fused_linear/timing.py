"""Times several contenders against each other, in rounds.

Clocks and temperature drift, and whoever runs first finds another machine than whoever runs last.
So every round times every contender once, in a new random order, and medians over rounds are
compared: what drifts, drifts for all.
"""

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

Call = Callable[[], object]
Clock = Callable[[Call, int], float]  # seconds that so many calls take

# Long enough that starting to launch into an idle GPU, some 10 us, is below 1 %.
BATCH_SECONDS = 3e-3
MIN_CALLS, MAX_CALLS = 3, 2000
SLOW_SECONDS = 0.1  # a call that takes so long is a batch by itself
MIN_ROUNDS, MAX_ROUNDS = 9, 41


@dataclass(frozen=True)
class Contender:
    """One way to do the work; `conditions` are in force around its calls, outside the clock."""

    name: str
    call: Call
    conditions: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True)
class Number:
    """The median over rounds and the quartiles; what was measured once has no spread."""

    median: float
    q1: float
    q3: float
    rounds: int = 1
    calls: int = 1

    @classmethod
    def once(cls, value: float) -> "Number":
        return cls(value, value, value)

    @classmethod
    def over(cls, samples: Sequence[float], calls: int) -> "Number":
        if len(samples) == 1:
            return cls.once(samples[0])
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, q1, q3, len(samples), calls)


def wall_clock(call: Call, times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - begin


def event_clock(call: Call, times: int) -> float:
    """Returns the time between events around the calls, including the GPU's wait for the CPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def clock_for(device: torch.device) -> Clock:
    return event_clock if device.type == "cuda" else wall_clock


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def calls_per_batch(contender: Contender, clock: Clock) -> int:
    """Warms `contender` up; how many of its calls make a batch."""

    def batch(seconds: float) -> int:
        least = MIN_CALLS if seconds < SLOW_SECONDS else 1
        return min(MAX_CALLS, max(least, round(BATCH_SECONDS / max(seconds, 1e-9))))

    with contender.conditions():
        # The first call chooses plans and compiles, and the second may record a graph.
        clock(contender.call, 2)
        calls = batch(clock(contender.call, 1))
        # One short call says little about how long many take.
        return batch(clock(contender.call, calls) / calls) if calls > MIN_CALLS else calls


def measure(
    contenders: Sequence[Contender], clock: Clock, seconds: float, seed: int = 0
) -> tuple[dict[str, Number], dict[str, str]]:
    """Microseconds per call by name, and in words what became of those that failed.

    At least MIN_ROUNDS rounds are run, and more until the clock has read `seconds` in all or there
    are MAX_ROUNDS: whoever reads the same clock runs the same rounds.
    A contender may fail (a baseline that does not compile, too little memory): it is left out.
    """
    calls, failed = {}, {}
    for contender in contenders:
        try:
            calls[contender.name] = calls_per_batch(contender, clock)
        except Exception as failure:
            failed[contender.name] = in_one_line(failure)
    order = [contender for contender in contenders if contender.name in calls]
    samples: Mapping[str, list[float]] = {contender.name: [] for contender in order}

    shuffle = random.Random(seed).shuffle
    with no_garbage_collection():
        spent = 0.0
        for finished in range(MAX_ROUNDS if order else 0):
            if finished >= MIN_ROUNDS and spent > seconds:
                break
            shuffle(order)
            for contender in order:
                times = calls[contender.name]
                with contender.conditions():
                    took = clock(contender.call, times)
                samples[contender.name].append(took / times * 1e6)
                spent += took
    return {name: Number.over(values, calls[name]) for name, values in samples.items()}, failed


def in_one_line(failure: BaseException) -> str:
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
