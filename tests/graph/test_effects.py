"""Which nodes of a graph write: what torch declares, what it does not, and what that forbids."""

import math
import operator
import sys
import types
import unittest
import warnings
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from fusion import fresh_dynamo  # noqa: F401
from helpers import one_thread  # noqa: F401
from torch import nn
from torch.fx import Graph
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_fused_linear as tfl
from torch_fused_linear.graph import effects
from torch_fused_linear.graph.effects import may_write, switches_mode


def writes(target, *args, method=False, **kwargs):
    graph = Graph()
    nodes = {}

    def node(tensor):
        return nodes.setdefault(id(tensor), graph.placeholder("x"))

    args, kwargs = tree_map_only(torch.Tensor, node, (args, kwargs))
    return may_write((graph.call_method if method else graph.call_function)(target, args, kwargs))


x, w, s = torch.ones(2, 3), torch.ones(4, 3), torch.ones(3)
i = torch.tensor([0, 1])


def mutable_overloads():
    """Every overload of ATen that declares to write to a tensor."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            found = getattr(torch.ops.aten, packet, None)
            found = getattr(found, overload or "default", None)
            if found is not None and found._schema.is_mutable:
                yield packet, found


def test_every_operator_of_aten_that_declares_to_write():
    """As overload, as packet, as function and as method, with what it writes to given."""
    checked, missed = 0, []
    for name, overload in mutable_overloads():
        arguments = overload._schema.arguments
        args = [x for a in arguments if not a.kwarg_only]
        kwargs = {a.name: x for a in arguments if a.kwarg_only and a.alias_info}
        forms = [(overload, False), (getattr(torch.ops.aten, name), False)]
        if "out" in kwargs or not kwargs:  # several results are called out together
            found = [getattr(place, name, None) for place in (torch, F)]
            forms += [(function, False) for function in found if callable(function)]
        if hasattr(torch.Tensor, name) and not kwargs:
            forms += [(name, True), (getattr(torch.Tensor, name), False)]
        for target, method in forms:
            checked += 1
            if not writes(target, *args, method=method, **kwargs):
                missed.append(f"{overload} as {target}")
    assert checked > 2000 and not missed, missed


# As function, arguments, arguments by name: a row for each entry of the tables of effects.py, and
# for each argument that tells of a write, that would be answered otherwise without it.
WRITERS = {
    "inplace": (F.relu, (x,), {"inplace": True}),
    "inplace by position": (F.dropout, (x, 0.5, True, True), {}),
    "out of a function that is none of ATen's": (torch.lu, (x,), {"out": (x, i)}),
    "several results in out": (torch.sort, (x,), {"out": (x, i)}),
    "max_norm": (F.embedding_bag, (i, w, i), {"max_norm": 1.0}),
    "max_norm by position": (F.embedding, (i, w, None, 1.0), {}),
    "running statistics": (F.batch_norm, (x, s, s), {"training": True}),
    "the mean alone": (F.batch_norm, (x, s, None), {"training": True}),
    "the variance alone": (F.batch_norm, (x, None, s), {"training": True}),
    "no flag": (F.instance_norm, (x, s, s), {}),
    "torch.batch_norm": (torch.batch_norm, (x, *[s] * 4, True, 0.1, 1e-5, False), {}),
    "aten.batch_norm": (torch.ops.aten.batch_norm.default,
                        (x, *[s] * 4, True, 0.1, 1e-5, False), {}),
    "torch.instance_norm": (torch.instance_norm, (x, *[s] * 4, True, 0.1, 1e-5, False), {}),
    "native_batch_norm": (torch.native_batch_norm, (x, *[s] * 4, True, 0.1, 1e-5), {}),
    "setattr": (setattr, (x, "data", x), {}),
    "delattr": (delattr, (x, "grad"), {}),
    "old init": (nn.init.xavier_uniform, (x,), {}),
    "of others": (warnings.warn, ("",), {}),
    "a call that fails": (F.embedding, (), {"weigth": w}),
}  # fmt: skip
READERS = {
    "inplace=False": (F.relu, (x,), {"inplace": False}),
    "out=None": (torch.sort, (x,), {"out": None}),
    "no max_norm": (F.embedding, (i, w), {}),
    "no max_norm of bags": (F.embedding_bag, (i, w, i), {}),
    "training=False": (F.batch_norm, (x, s, s), {}),
    "no statistics": (F.batch_norm, (x, None, None), {"training": True}),
    "train=False": (torch.native_batch_norm_backward,
                    (x, x, *[s] * 5, False, 1e-5, [True] * 3), {}),
    "use_input_stats=False": (F.instance_norm, (x, s, s), {"use_input_stats": False}),
    "no statistics, no flag": (F.instance_norm, (x, None, None), {}),
    "torch.batch_norm": (torch.batch_norm, (x, *[s] * 4, False, 0.1, 1e-5, False), {}),
    "drawing numbers": (F.dropout, (x, 0.5, True), {}),
    "torch": (torch.sym_max, (1, 2), {}),
    "torch._C": (F.gelu, (x,), {}),
    "torch._C, a method": (torch.Tensor.add, (x, x), {}),
    "torch.functional": (torch.einsum, ("ij->i", x), {}),
    "torch.nn.functional": (F.silu, (x,), {}),
    "torch._tensor": (torch.Tensor.split, (x, 1), {}),
    "torch._lowrank": (torch.pca_lowrank, (x,), {}),
    "math": (math.sqrt, (2,), {}),
    "_operator": (operator.getitem, (x, 0), {}),
    "builtins": (getattr, (x, "T"), {}),
    "packet": (torch.ops.aten.add, (x, x), {}),
    "attention": (F.scaled_dot_product_attention, (x, x, x), {}),
}  # fmt: skip
# (a += b and the like, a + b and the like), of the module operator: their methods have the names.
IN_PLACE = ["setitem", "delitem", *(
    name[2:-2] for name in dir(operator) if name[:3] == "__i" and f"__{name[3:]}" in dir(operator)
)]  # fmt: skip
NOT_IN_PLACE = ["getitem", "invert", "index", *(name[1:] for name in IN_PLACE[2:])]


@pytest.mark.parametrize("name", WRITERS)
def test_writes(name):
    target, args, kwargs = WRITERS[name]
    assert writes(target, *args, **kwargs)


@pytest.mark.parametrize("name", READERS)
def test_only_reads(name):
    """Whatever is taken for a writer keeps products from being fused."""
    target, args, kwargs = READERS[name]
    assert not writes(target, *args, **kwargs)


@pytest.mark.parametrize("name", [*IN_PLACE, *NOT_IN_PLACE])
def test_operators_of_python(name):
    for target, method in ((getattr(operator, f"__{name}__"), False), (f"__{name}__", True)):
        assert writes(target, x, 1, method=method) == (name in IN_PLACE), target


@pytest.mark.parametrize("name", ["add_", "uniform_", "retain_grad"])
def test_methods_that_write(name):
    assert writes(name, x, 1, method=True)


@pytest.mark.parametrize("name", ["add", "float", "sort", "view"])
def test_methods_that_only_read(name):
    assert not writes(name, x, 1, method=True)


@pytest.mark.parametrize("entry", sorted({*effects._IN_PLACE, *effects._KNOWN}))
def test_every_entry_is_tried(entry, monkeypatch):
    """Without it a row above fails."""
    for table in ("_IN_PLACE", "_KNOWN"):
        entries = getattr(effects, table)
        monkeypatch.setattr(effects, table, type(entries)(e for e in entries if e != entry))
    missed = [name for name in IN_PLACE if not writes(getattr(operator, name), x, 1)]
    rows = READERS.values()
    assert missed or any(writes(target, *args, **kwargs) for target, args, kwargs in rows)


AUTOCAST = ("cpu", torch.bfloat16, True, False)


@pytest.mark.parametrize("target, args", [
    (torch.amp.autocast_mode._enter_autocast, AUTOCAST),
    (torch.amp.autocast_mode._exit_autocast, (None,)),
    (torch._C._set_grad_enabled, (False,)),
])  # fmt: skip
def test_switches_of_modes(target, args):
    """By name, or as something that is called for what it does."""
    graph = Graph()
    switch, other = graph.call_function(target, args), graph.call_function(operator.add, (1, 2))
    switch.meta["val"] = other.meta["val"] = 3
    assert switches_mode(switch) and not switches_mode(other)
    del other.meta["val"]
    assert switches_mode(other)
    graph.output(other)
    assert not switches_mode(other) and not switches_mode(graph.placeholder("x"))


def operators_of_torchs_tests():
    """torch's own list of operators with arguments to try them with."""
    if "expecttest" not in sys.modules:  # which its tests need and this list does not
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal import common_methods_invocations

    # its import keeps all later tests from setting what cuDNN and TF32 do
    flags = torch.backends.flags_frozen.__globals__
    flags["__allow_nonbracketed_mutation_flag"] = True
    assert not torch.backends.flags_frozen()
    return common_methods_invocations.op_db


def same_bits(a, b):
    return torch.equal(a, b) or torch.equal(
        *(t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    )


def test_nothing_that_is_taken_for_a_reader_writes():
    """Every operator is run on samples: what changes an argument has to be known as a writer."""
    tried, unknown, silent = 0, [], set()
    named = {"nn.functional.embedding", "nn.functional.batch_norm", "nn.functional.instance_norm"}
    for op in operators_of_torchs_tests():
        if torch.float32 not in op.dtypes or "jiterator" in op.name:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # not sample_inputs, which seeds before each, with the stack as text: slow under pytest
            samples = op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=False)
            for sample in islice(samples, 40 if op.name in named else 4):
                leaves = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs))
                          if isinstance(t, torch.Tensor)]  # fmt: skip
                if any(t.layout != torch.strided or t.numel() > 1000 for t in leaves):
                    continue
                before = [t.clone() for t in leaves]
                try:
                    op.op(sample.input, *sample.args, **sample.kwargs)
                except (RuntimeError, TypeError, ValueError, IndexError):
                    continue
                tried += 1
                if all(map(same_bits, leaves, before)):
                    continue
                silent.add(op.name)
                if not writes(op.op, sample.input, *sample.args, **sample.kwargs):
                    unknown.append(op.name)
    assert tried > 1000 and not unknown, unknown
    assert named <= silent, "the samples do not write"


# --- what it is for -----------------------------------------------------------------------------


def test_a_product_is_not_moved_past_an_embedding_that_renormalises_its_weight():
    """The layers' weight is the embedding's, which is written between product and sum."""
    weight = (torch.randn(6, 6) * 10).requires_grad_(False)

    def function(x, b):
        product = x @ weight.t()
        rows = F.embedding(torch.tensor([0, 1, 2]), weight, max_norm=1.0)
        return F.relu(product + b) + rows.sum()

    kept = weight.clone()
    backend = tfl.compile_backend("eager")
    args = torch.randn(5, 6), torch.randn(6)
    got = torch.compile(function, backend=backend)(*args)
    weight.copy_(kept)
    torch.testing.assert_close(got, function(*args))


def test_a_product_is_not_moved_past_a_batch_norm_in_training():
    """The running mean is the weight's memory."""
    mean, variance = torch.randn(48), torch.ones(48)

    def function(x, b, z):
        product = x @ mean.view(8, 6).t()
        normed = F.batch_norm(z, mean, variance, training=True)
        return F.relu(product + b) + normed.sum()

    args = torch.randn(5, 6), torch.randn(8), torch.randn(10, 48) + 5
    kept = mean.clone()
    got = torch.compile(function, backend=tfl.compile_backend("eager"))(*args)
    mean.copy_(kept)
    torch.testing.assert_close(got, function(*args))
