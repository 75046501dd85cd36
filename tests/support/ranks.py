"""A group of processes that lives for a session and runs what tests ask of all of its ranks."""

import datetime
import importlib
import os
import queue
import time
import traceback

import torch
import torch.multiprocessing as mp

# Longer than anything takes on a busy machine; a dead rank is seen at once.
SECONDS = 240
PRELOADED = ["torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch._dynamo"]


class Ranks:
    """``size`` processes, one process group. A failure ends them all; the next call starts anew."""

    def __init__(self, size: int, backend: str, folder) -> None:
        self.size, self.backend, self.folder = size, backend, folder
        self.starts = 0
        self.processes: list = []

    def run(self, function, *args, seconds: float = SECONDS) -> list:
        """Returns the results of `function(*args)`, from the top of a module, on each rank.

        Raises:
            AssertionError: a rank raised, died or did not answer.
        """
        if not self.processes:
            self._start()
        for tasks in self.tasks:
            tasks.put((function.__module__, function.__name__, args))
        results, errors = {}, {}
        end = time.monotonic() + seconds
        while len(results) < self.size and not errors:
            dead = [r for r, p in enumerate(self.processes) if not p.is_alive()]
            try:
                rank, ok, value = self.answers.get(timeout=0.5)
            except queue.Empty:
                if dead:
                    errors = dict.fromkeys(dead, "died")
                elif time.monotonic() > end:
                    late = set(range(self.size)) - set(results)
                    errors = dict.fromkeys(late, f"no answer in {seconds} s")
                continue
            (results if ok else errors)[rank] = value
        if errors:  # those that died tell why the others failed
            for process in self.processes:
                process.join(0.5)
            errors.update((r, "died") for r, p in enumerate(self.processes) if not p.is_alive())
            self.stop()
            raise AssertionError("\n".join(f"rank {r}: {text}" for r, text in errors.items()))
        return [results[rank] for rank in range(self.size)]

    def _start(self) -> None:
        self.starts += 1
        context = mp.get_context("forkserver")  # one import of torch for all
        context.set_forkserver_preload(PRELOADED)
        self.tasks = [context.Queue() for _ in range(self.size)]
        self.answers = context.Queue()
        store = str(self.folder / f"store{self.starts}")
        for rank, tasks in enumerate(self.tasks):
            args = (rank, self.size, self.backend, store, tasks, self.answers)
            self.processes.append(context.Process(target=_serve, args=args, daemon=True))
            self.processes[-1].start()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []


def _serve(rank: int, size: int, backend: str, store: str, tasks, answers) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    while True:
        module, name, args = tasks.get()
        try:
            answers.put((rank, True, getattr(importlib.import_module(module), name)(*args)))
        except Exception:
            answers.put((rank, False, traceback.format_exc()))
