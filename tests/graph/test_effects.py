"""Which nodes of a graph write: what torch declares, what it does not, and what that forbids."""

import operator
import sys
import types
import unittest
import warnings
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from fusion import check, images, tensors
from torch import nn
from torch.fx import Graph
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_fused_linear.graph.effects import may_write


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


WRITERS = [
    (F.embedding, (i, w), {"max_norm": 1.0}),
    (F.embedding, (i, w, None, 1.0), {}),
    (F.embedding_bag, (i, w, i), {"max_norm": 1.0}),
    (F.batch_norm, (x, s, s), {"training": True}),
    (torch.batch_norm, (x, s, s, s, s, True, 0.1, 1e-5, False), {}),
    (torch.ops.aten.batch_norm.default, (x, s, s, s, s, True, 0.1, 1e-5, False), {}),
    (F.instance_norm, (x, s, s), {}),
    (torch.instance_norm, (x, s, s, s, s, True, 0.1, 1e-5, False), {}),
    (torch.native_batch_norm, (x, s, s, s, s, True, 0.1, 1e-5), {}),
    (F.normalize, (x,), {"out": x}),
    (F.relu, (x, True), {}),
    (F.dropout, (x, 0.5, True, True), {}),
    (operator.iadd, (x, x), {}),
    (operator.setitem, (x, 0, x), {}),
    (setattr, (x, "data", x), {}),
    (nn.init.xavier_uniform, (x,), {}),
    (warnings.warn, ("",), {}),
    *((name, (x, 1), {}) for name in ("add_", "__setitem__", "__iadd__", "uniform_")),
    ("retain_grad", (x,), {}),
]
READERS = [
    (F.embedding, (i, w), {}),
    (F.embedding_bag, (i, w, i), {}),
    (F.batch_norm, (x, s, s), {}),
    (F.batch_norm, (x, None, None), {"training": True}),
    (torch.batch_norm, (x, s, s, s, s, False, 0.1, 1e-5, False), {}),
    (F.instance_norm, (x, None, None), {}),
    (F.normalize, (x,), {}),
    (F.relu, (x,), {}),
    (F.dropout, (x, 0.5, True), {}),
    (torch.dropout, (x, 0.5, True), {}),
    (operator.add, (x, x), {}),
    (operator.invert, (x,), {}),
    (operator.getitem, (x, 0), {}),
    (torch.sort, (x,), {}),
    (torch.ops.aten.add, (x, x), {}),
    (getattr, (x, "T"), {}),
    (F.gelu, (x,), {}),
    (F.scaled_dot_product_attention, (x, x, x), {}),
    *((name, (x, 1), {}) for name in ("add", "__getitem__", "sort", "view")),
    *((name, (x,), {}) for name in ("__invert__", "float")),
]


@pytest.mark.parametrize("is_writer, calls", [(True, WRITERS), (False, READERS)])
def test_writes(is_writer, calls):
    """Whatever is taken for a writer keeps products from being fused."""
    for target, args, kwargs in calls:
        found = writes(target, *args, method=isinstance(target, str), **kwargs)
        assert found == is_writer, (target, kwargs)


def operators_of_torchs_tests():
    """torch's own list of operators with arguments to try them with."""
    if "expecttest" not in sys.modules:  # which its tests need and this list does not
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal import common_methods_invocations

    # its import keeps all later tests from setting what cuDNN and TF32 do
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    assert not torch.backends.flags_frozen()
    return common_methods_invocations.op_db


def same_bits(a, b):
    in_bytes = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(a, b) or torch.equal(*in_bytes)


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


# A value computed before a write and after it, and the operators that the two become.
AROUND = {
    "a chain": (
        lambda x, w, b, v, c: F.relu(F.linear(x, w, b)),
        lambda hidden, x, w, b, v, c: F.linear(hidden, v, c),
        {"linear_relu": 1},
    ),
    "a product and a bias": (
        lambda x, w, b, v, c: x @ w.t(),
        lambda product, x, w, b, v, c: F.relu(product + b),
        {},
    ),
    "gate and up": (
        lambda x, w, b, v, c: F.silu(F.linear(x, w, b)),
        lambda gate, x, w, b, v, c: F.linear(gate * F.linear(x, w), v),
        {"linear_silu": 1},
    ),
    "a convolution and ReLU": (  # in the place of the convolution
        lambda x, w, b: F.conv2d(x, w, b),
        lambda z, x, w, b: F.relu(z),
        {"conv2d_relu": 1},
    ),
}
WRITES = {
    "weight": lambda x, w: w.mul_(2),
    "input": lambda x, w: operator.iadd(x, 1),
    "a part": lambda x, w: x.__setitem__(0, 7),
    "rectified": lambda x, w: F.relu(x, inplace=True),
    "dropped": lambda x, w: F.dropout(x, 0.5, True, True),
    "embedding": lambda x, w: F.embedding(torch.tensor([0, 1, 2]), w.flatten(1), max_norm=0.1),
    "batch norm": lambda x, w: F.batch_norm(  # whose running mean is the weight's memory
        torch.ones(10, w.numel()), w.view(-1), torch.ones(w.numel()), training=True
    ),
}
# The writes differ in one chain, the places in two writes.
PAIRS = [("a chain", write) for write in WRITES]
PAIRS += [(around, write) for around in AROUND for write in ("weight", "input")][2:]


@pytest.mark.parametrize("around, write", PAIRS)
def test_a_value_written_between_two_nodes_is_read_before(around, write):
    before, after, replaced = AROUND[around]

    def function(x, w, *others):
        x, w = x * 1, w * 1
        first = before(x, w, *others)
        WRITES[write](x, w)
        return after(first, x, w, *others) + x.sum() + w.sum()

    conv = "convolution" in around
    args = [t.detach() for t in (images(2) if conv else tensors(5))]
    check(function, args, conv=conv, **replaced)
