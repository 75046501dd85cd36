"""The operators that run, and the memory that a graph keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_fused_linear as tfl


def explained(call: Callable[[], object]) -> tuple:
    """A call's result, and explain's report of it."""
    with tfl.explain() as report:
        result = call()
    return result, report


def operators_of(call: Callable[[], object], *names: str) -> list:
    """The operators of explain's report of a call, or several fields of each row by their names."""
    _, report = explained(call)
    fields = names or ("operator",)
    rows = [tuple(getattr(row, field) for field in fields) for row in report.calls]
    return rows if len(fields) > 1 else [row[0] for row in rows]


class Calls(TorchDispatchMode):
    """The operators that run below autograd, by name, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.arguments: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        self.arguments.append(args)
        return func(*args, **(kwargs or {}))

    def shapes_of(self, name: str) -> list[tuple[int, ...]]:
        """The shape of the first argument in every call of that operator."""
        pairs = zip(self.names, self.arguments)
        return [tuple(args[0].shape) for called, args in pairs if called == name]


def saved_bytes(compute: Callable[[], Tensor], parameters=()) -> int:
    """Bytes of the distinct storages that a graph keeps, beside the parameters."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = compute()
    for p in parameters:
        kept.pop(p.untyped_storage().data_ptr(), None)
    del y
    return sum(kept.values())


class Storages(TorchDispatchMode):
    """Whatever operators allocate, and whether it is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0  # bytes at a time, seen after each operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        given = {ref.cdata for ref, _ in self.of((args, kwargs))}  # results may be views of it
        for ref, nbytes in self.of(results):
            if ref.cdata not in given:
                self.found[ref.cdata] = ref, nbytes
        self.most = max(self.most, self.alive())
        return results

    @staticmethod
    def of(tree) -> Iterator[tuple[StorageWeakRef, int]]:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                yield StorageWeakRef(storage), storage.nbytes()

    def alive(self) -> int:
        return sum(nbytes for ref, nbytes in self.found.values() if not ref.expired())


def kept_bytes(compute: Callable[[], Tensor]) -> int:
    """Bytes that a graph keeps alive, once its output has been let go, of what was allocated for
    it. No hooks are involved, which layers of low memory treat in a way of their own."""
    with Storages() as storages:
        y = compute()
    node = y.grad_fn
    before = storages.alive()
    del y
    kept = storages.alive()
    del node
    assert storages.alive() == 0 and kept <= before, "kept by something else than the graph"
    return kept
