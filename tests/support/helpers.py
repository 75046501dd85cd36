"""What the tests share: devices, operators, inputs of any layout, fp64 references, accuracy."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_fused_linear

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]  # conftest skips the latter
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LOW_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# What TORCH_CHECK, TORCH_CHECK_VALUE, TORCH_CHECK_TYPE and TORCH_CHECK_NOT_IMPLEMENTED raise.
ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError)


# --- operators beside their definitions ------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """A public operator, its eager definition, and its name in the private operators."""

    name: str
    activation: str
    call: Callable[..., Tensor]
    act: Callable[[Tensor], Tensor]

    def eager(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return self.act(F.linear(x, w, b))

    def __repr__(self) -> str:
        return self.activation


def _gelu(approximate: str) -> Callable[..., Tensor]:
    def call(x: Tensor, w: Tensor, b: Tensor | None = None, memory: str = "default") -> Tensor:
        return torch.ops.fused.linear_gelu(x, w, b, approximate=approximate, memory=memory)

    return call


LINEAR = Op("linear", "none", torch.ops.fused.linear, lambda z: z)
RELU = Op("linear_relu", "relu", torch.ops.fused.linear_relu, F.relu)
GELU_TANH = Op("linear_gelu", "gelu_tanh", _gelu("tanh"), lambda z: F.gelu(z, approximate="tanh"))
GELU_ERF = Op("linear_gelu", "gelu_erf", _gelu("none"), F.gelu)
SILU = Op("linear_silu", "silu", torch.ops.fused.linear_silu, F.silu)
RELU2 = Op("linear_relu2", "relu2", torch.ops.fused.linear_relu2, lambda z: F.relu(z).square())
OPS = [LINEAR, RELU, GELU_TANH, GELU_ERF, SILU, RELU2]

device_param = pytest.mark.parametrize("device", DEVICES)
op_param = pytest.mark.parametrize("op", OPS, ids=repr)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For the files that import it: on tensors this small a second thread only costs, and on a
    busy machine it costs a hundredfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def policy(name: str) -> contextlib.AbstractContextManager:
    return torch_fused_linear.set_policy(name)


# --- inputs ----------------------------------------------------------------------------------


@dataclass
class Case:
    """The arguments of one call and the gradient that arrives for its output."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    g: Tensor

    @property
    def inputs(self) -> list[Tensor]:
        return [self.x, self.w] + ([] if self.b is None else [self.b])


def random_case(lead, i, o, dtype, device="cpu", bias=True, seed=0) -> Case:
    """Normal data, weights scaled so that z has magnitude 1, as in a trained layer."""
    gen = torch.Generator().manual_seed(seed)
    lead = (lead,) if isinstance(lead, int) else tuple(lead)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    x, w, b, g = normal(*lead, i), normal(o, i) / math.sqrt(max(i, 1)), normal(o), normal(*lead, o)
    x, w, b, g = (t.to(device=device, dtype=dtype) for t in (x, w, b, g))
    return Case(x, w, b if bias else None, g)


def exact_case(lead, i, o, dtype, device="cpu", bias=True, seed=0) -> Case:
    """Small integers (and half-integer biases, so that z is never 0 with a bias).

    Every sum is then exact in every dtype, TF32 too, in whatever order it is taken: linear and
    relu must equal the fp64 reference bit for bit, forward and backward.
    """
    gen = torch.Generator().manual_seed(seed)
    lead = (lead,) if isinstance(lead, int) else tuple(lead)

    def integers(low, high, *shape):
        t = torch.randint(low, high + 1, shape, generator=gen, dtype=torch.int64)
        return t.to(dtype=dtype).to(device)

    x, w, g = integers(-1, 1, *lead, i), integers(-1, 1, o, i), integers(-1, 1, *lead, o)
    b = integers(-3, 2, o) + 0.5
    return Case(x, w, b if bias else None, g)


# --- running and comparing -------------------------------------------------------------------


def run(fn, case: Case) -> list[Tensor]:
    """[output, grad_input, grad_weight(, grad_bias)] of fn; layouts of the inputs are kept."""
    leaves = [t.detach().requires_grad_() for t in case.inputs]
    y = fn(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, case.g)]


def names(case: Case) -> list[str]:
    return ["output", "grad_input", "grad_weight", "grad_bias"][: len(case.inputs) + 1]


def with_inference(results: list, case: Case, fn=None) -> list:
    """What run gave, and the output without gradients, which takes another path."""
    if fn is None:
        return [*results, results[0]]
    with torch.no_grad():
        return [*results, fn(*case.inputs)]


def plain(case: Case, dtype: torch.dtype | None = None) -> Case:
    """The same numbers, contiguous: eager itself cannot take every layout (gelu's backward in
    oneDNN refuses overlapping strides)."""
    parts = (case.x, case.w, case.b, case.g)
    return Case(*(None if t is None else t.to(dtype or t.dtype).contiguous() for t in parts))


def in_double(case: Case) -> Case:
    return plain(case, torch.float64)


def reference(op: Op, case: Case) -> list[Tensor]:
    return run(op.eager, in_double(case))


def preactivation(case: Case) -> Tensor:
    d = in_double(case)
    return F.linear(d.x, d.w, d.b)


def rows(t: Tensor) -> Tensor:
    """[*, n] as a matrix, for n or a leading dimension of 0 too."""
    return t.unsqueeze(0).flatten(0, -2)


def typical_sizes(op: Op, case: Case) -> list[float]:
    """How large each result is when nothing cancels: what a rounding error is to be held against
    where a result of few elements happens to be near 0."""
    d = in_double(case)
    z = F.linear(d.x, d.w, d.b).requires_grad_()
    (dz,) = torch.autograd.grad(op.act(z), z, d.g)
    dz, x, w = rows(dz).square(), rows(d.x).square(), d.w.square()
    z = x @ w.t() + (0 if d.b is None else d.b.square())
    sizes = [z, dz @ w, dz.t() @ x, dz.sum(0)][: len(case.inputs) + 1]
    return [float(s.max().sqrt()) if s.numel() else 0.0 for s in sizes]


def without_kinks(case: Case) -> Case:
    """The same case with a zero gradient where z is within rounding of 0.

    There the sign of z, and with it ReLU's derivative, is a matter of rounding and no error.
    """
    z = preactivation(case)
    near = z.abs() <= 4 * torch.finfo(case.x.dtype).eps * (1 + z.abs().mean())
    return Case(case.x, case.w, case.b, case.g.masked_fill(near, 0))


def ulp(dtype: torch.dtype, magnitude: float) -> float:
    """The distance between neighbouring numbers of this dtype at this magnitude."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(magnitude, info.tiny)))


class Tally:
    """Errors of one kind of result over many cases, in ulps of each case's magnitude."""

    def __init__(self) -> None:
        self.count, self.totals, self.worst = 0, [0.0, 0.0], [0.0, 0.0]

    def add(self, ours: Tensor, eager: Tensor, truth: Tensor, unit: float) -> None:
        self.count += truth.numel()
        for k, result in enumerate((ours, eager)):
            error = (result.double() - truth).abs() / unit
            self.totals[k] += float(error.sum())
            self.worst[k] = max(self.worst[k], float(error.max()))

    def check(self, label: str) -> None:
        if self.count:
            (ours, eager), (w_ours, w_eager) = self.totals, self.worst
            # the mean of so many elements is not a matter of luck: a quarter ulp will do there
            message = f"{label}: mean error {ours / self.count} ulp, eager's {eager / self.count}"
            assert ours <= 1.1 * eager + 0.25 * self.count, message
            # the worst of them is: a loose gate
            assert w_ours <= 2 * w_eager + 1, f"{label}: worst error {w_ours} ulp, {w_eager}"


def add_checked(
    tally: Tally, mine: Tensor, theirs: Tensor, truth: Tensor, size: float, where: str
) -> None:
    """Adds the errors of one result to the tally, held to the looser bound of one case at once;
    fp64 is held to its rounding level instead."""
    if not truth.numel():
        return
    unit = ulp(mine.dtype, max(float(truth.abs().max()), size))
    if mine.dtype == torch.float64:
        error = float((mine - truth).abs().max()) / unit
        assert error <= 64, f"{where}: error {error} ulp"
        return
    one = Tally()
    one.add(mine, theirs, truth, unit)
    # a handful of numbers says little: their largest error may be anywhere
    limit = 1.5 * one.worst[1] + (2.5 if truth.numel() >= 16 else 5)
    assert one.worst[0] <= limit, f"{where}: error {one.worst[0]} ulp, {one.worst[1]}"
    tally.add(mine, theirs, truth, unit)


def assert_contract(op: Op, cases: Iterable[tuple[str, Case]]) -> None:
    """docs/numerics.md for the output and every gradient: error against fp64 at most 1.1 times
    eager's plus one output ulp, worst case and mean.

    It is a statement about many numbers, so it is held against all cases together; for one case,
    where luck may have eager's few errors small, a looser bound keeps an outlier from drowning.
    fp64, for which no better reference is at hand, is held to its rounding level.
    """
    tallies: dict[str, Tally] = defaultdict(Tally)
    for label, case in cases:
        columns = (
            [*names(case), "inference"],
            with_inference(run(op.call, case), case, op.call),
            with_inference(run(op.eager, plain(case)), case),
            with_inference(reference(op, case), case),
            with_inference(typical_sizes(op, case), case),
        )
        for name, mine, theirs, truth, size in zip(*columns, strict=True):
            where = f"{op!r} {label} {name}"
            assert mine.dtype == theirs.dtype == case.x.dtype, f"{where}: dtype {mine.dtype}"
            assert mine.shape == theirs.shape, f"{where}: shape {mine.shape}"
            add_checked(tallies[name], mine, theirs, truth, size, where)
    for name, tally in tallies.items():
        tally.check(f"{op!r} {name}")


def assert_exact(op: Op, case: Case, label="") -> None:
    """Output and every gradient equal the fp64 reference exactly (for exact_case data)."""
    wide = in_double(case)
    truth = with_inference(run(op.eager, wide), wide)
    ours = with_inference(run(op.call, case), case, op.call)
    for name, mine, want in zip([*names(case), "inference"], ours, truth, strict=True):
        assert mine.dtype == case.x.dtype, f"{op!r} {label} {name}: dtype {mine.dtype}"
        assert torch.equal(want.to(mine.dtype).double(), want), "test data is not exact"
        assert torch.equal(mine.double(), want), f"{op!r} {label} {name} is not exact"


def assert_near(op: Op, case: Case, label="", ulps=32) -> None:
    """Output and every gradient within some ulps of fp64: for data whose rounding errors are not
    independent (repeated rows), where luck decides the comparison with eager."""
    columns = (
        [*names(case), "inference"],
        with_inference(run(op.call, case), case, op.call),
        with_inference(reference(op, case), case),
        with_inference(typical_sizes(op, case), case),
    )
    for name, mine, truth, size in zip(*columns, strict=True):
        tolerance = ulps * torch.finfo(mine.dtype).eps
        message = f"{op!r} {label} {name} is not near the fp64 result"
        torch.testing.assert_close(
            mine.double(), truth, rtol=tolerance, atol=tolerance * size, msg=message
        )


def assert_bits(got, want, label=""):
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"{label} result {k} differs"


def decode_mask(mask: Tensor, width: int) -> Tensor:
    """Every bit of ReLU's saved mask [*, width / 8] as a bool [*, width]."""
    bits = (mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device)) & 1
    return bits.flatten(-2)[..., :width].bool()


def encode_mask(bits: Tensor) -> Tensor:
    """The library's mask layout: bit o & 7 of byte o >> 3, rows padded with 0 to 128 bits."""
    bits = F.pad(bits.to(torch.uint8), (0, -bits.shape[-1] % 128)).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1).to(torch.uint8)


def saved_bytes(compute, parameters=()):
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


class Calls(TorchDispatchMode):
    """The names of the operators that run below autograd."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class CountCasts(TorchDispatchMode):
    """The shapes of the tensors that are converted to another dtype."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))
