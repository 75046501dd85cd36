"""Plants faults in ``fuse_``, one at a time, and counts the generated trees that then fail.

    python tests/fuse/tree_faults.py [NAME ...]

Every fault is planted in a process of its own, since fusing keeps the code that it has made.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
import tree_compare  # noqa: E402
import tree_parts  # noqa: E402
from torch import nn  # noqa: E402
from trees import grow  # noqa: E402

from torch_fused_linear import functional  # noqa: E402
from torch_fused_linear.fuse import (  # noqa: E402
    call,
    in_code,
    plain,
    rewrite,
    runs,
    source,
    syntax,
)

MOST_TREES = 600  # within which a fault must show


def in_python() -> None:
    """Decisions are made by the Python code alone, where faults can be planted."""
    for name in in_code.IN_C:
        setattr(in_code, name, getattr(call, name))


def hooks_ignored() -> None:
    plain.hooks_objection = lambda module: None


def global_hooks_ignored() -> None:
    plain.has_any_global_hook = lambda: False


def patched_forward_ignored() -> None:
    original = plain.hooks_objection

    def without(module):
        reason = original(module)
        return None if reason and "of its own" in reason else reason

    plain.hooks_objection = without


def patched_class_ignored() -> None:
    plain.is_untouched = lambda *args: True


def guard_without_end() -> None:
    rewrite._Rewriter.visit_If = ast.NodeTransformer.generic_visit


def subclass_taken() -> None:
    plain.LAYERS[tree_parts.Lora] = tree_parts.Lora.forward


def activation_subclass_taken() -> None:
    plain.MODULES[tree_parts.LoudReLU] = "relu", tree_parts.LoudReLU.forward


def exchanged_activation_ignored() -> None:
    original = plain.activation_kind
    plain.activation_kind = lambda function, options=None: original(function, options) or "relu"


def approximate_ignored() -> None:
    plain.name_of_gelu = lambda approximate: "gelu_tanh"


def training_dropout_ignored() -> None:
    original = call.dropped_share
    call.dropped_share = lambda *args: None if original(*args) is None else 0


def bias_dropped() -> None:
    original = functional.linear_relu
    functional.linear_relu = lambda x, weight, bias, memory: original(x, weight, None, memory)


def bias_dropped_for_wide_inputs() -> None:
    original = functional.linear_gelu

    def gelu(x, weight, bias, *more):
        return original(x, weight, None if x.dim() > 2 else bias, *more)

    functional.linear_gelu = gelu


def later_read_ignored() -> None:
    original = runs.replace

    def replace(step, **given):
        return original(step, **{k: v if k == "guard" else True for k, v in given.items()})

    runs.replace = replace


def statement_between_ignored() -> None:
    syntax.passes = lambda statement: True


class Trusted(dict):
    """Any code is in the file."""

    def get(self, key, default=None):
        return self

    def __contains__(self, code):
        return True


def stale_source_trusted() -> None:
    original = source.index
    source.index = lambda *file: (original(*file)[0], Trusted())


def unfuse_does_nothing() -> None:
    tree_compare.tfl.unfuse_ = lambda model: None


def other_half_gated() -> None:
    original = call.halves

    def swapped(*args, **kwargs):
        first, second = original(*args, **kwargs)
        return (second, first) if call.is_a(call.Half, first) else (first, second)

    in_code.halves = swapped


def one_input_for_both_factors() -> None:
    original = call.product

    def product(left, right):
        if call.is_a(call.Begun, left) and call.is_a(call.Begun, right):
            right = (*right[:2], left[2], *right[3:])
        return original(left, right)

    in_code.product, in_code.last_product = product, lambda *both: call.end(product(*both))


def read_of_a_factor_ignored() -> None:
    syntax.Scope.is_read_by = lambda *args: True


def children_remembered() -> None:
    """A Sequential runs what it held when it was fused."""
    fuse, kept = tree_compare.tfl.fuse_, {}

    def fuse_and_keep(model, **options):
        report = fuse(model, **options)
        kept.update((m, list(m)) for m in model.modules() if isinstance(m, nn.Sequential))
        return report

    def run(self, x):
        for child in kept.get(self, self):
            x = child(x)
        return x

    tree_compare.tfl.fuse_, in_code.run_sequential = fuse_and_keep, run


FAULTS: dict[str, Callable[[], None]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and name not in ("in_python", "Trusted")
}


def failure(seeds: range, folder: Path) -> tuple[int, str] | None:
    """The first tree that fails, and what was noticed."""
    for seed in seeds:
        try:
            tree_compare.check(grow(seed, folder))
        except Exception as error:
            return seed, str(error).split("\n")[0][:120]
    return None


def planted(name: str | None, seeds: range) -> tuple[int, str] | None:
    """The first failure with this fault, found in a child of this process."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        in_python()
        if name is not None:
            FAULTS[name]()
        with tempfile.TemporaryDirectory() as folder, os.fdopen(write, "w") as out:
            out.write(json.dumps(failure(seeds, Path(folder))))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as out:
        text = out.read()
    os.wait()
    return json.loads(text)


def noticed(name: str, seeds: range) -> tuple[int, str] | None:
    """The first tree that fails with this fault and holds without it."""
    while (found := planted(name, seeds)) is not None:
        if planted(None, range(found[0], found[0] + 1)) is None:
            break
        seeds = range(found[0] + 1, seeds.stop)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, start in zip(sys.argv[1:] or FAULTS, itertools.count(40_000, MOST_TREES)):
        found = noticed(name, range(start, start + MOST_TREES))
        print(json.dumps({"fault": name, "noticed": found}), flush=True)


if __name__ == "__main__":
    main()
