"""Memory kept for a backward: never more than eager keeps, and the promised bytes."""

import copy
import itertools
import weakref

import operators as ops
import pytest
import torch
import torch.nn.functional as F
from layers import GatedBlock, sequential, step
from numerics import assert_same
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from watching import Calls, Storages, kept_bytes, saved_bytes

import torch_fused_linear as tfl
from torch_fused_linear.activations import NUMBERS

TOKENS, INPUTS, HIDDEN, OUTPUTS = 64, 128, 256, 128  # multiples of 128: no padding is measured
WIDTHS = (HIDDEN, 128, 384)  # of chains
BOTH = ("default", "low")
WIDE = [
    *ops.OPS,
    *ops.LOW,
    *(
        ops.gated(f, a, d, HIDDEN)
        for f, a, d in zip(ops.FORMS * 2, [*ops.ACTS, "silu", "relu", "silu"], [0, 1] * 4)
    ),
    *(ops.gated("apart", "silu", d, HIDDEN, memory="low") for d in (False, True)),
    *(ops.mlp(a, 4, WIDTHS, memory=m) for a, m in itertools.product(ops.ACTS, BOTH)),
    ops.stack("silu", 4, WIDTHS),
    ops.stack("relu", 4, WIDTHS),  # with low memory its bits come beside outputs that are kept
    ops.pair("apart", "silu"),
    ops.ODD["block"],
    ops.ODD["groups"],
]


def case_of(op: ops.Op, dtype=torch.float32, device="cpu", bias=True):
    return op.case((TOKENS,), INPUTS, OUTPUTS, dtype, device, bias)


# --- never more than eager -----------------------------------------------------------------------


@ops.rows(WIDE)
@ops.policy_param
def test_no_more_than_eager(policy, op, device):
    """For every subset of wanted gradients: a frozen weight needs no input kept, and so on. Also as
    hooks on saved tensors see it. The library's bits of ReLU come beside the outputs of a chain."""
    for dtype in (torch.float32, torch.bfloat16) if policy == "auto" else (torch.float32,):
        case = case_of(op, dtype, device)
        is_chain = op.activation == "relu" and policy == "cublaslt" and op.name != "conv2d_relu"
        bits = sum(TOKENS * n // 8 for n in WIDTHS) if is_chain and op.product is None else 0
        is_thorough = policy == "auto" or op.product is not None
        for wanted in ops.subsets(len(case.inputs))[1 if is_thorough else -1 :]:
            leaves = case.leaves(wanted)
            for measure in (lambda call, t=leaves: saved_bytes(lambda: call(*t), t[1:]),
                            lambda call, t=leaves: kept_bytes(lambda: call(*t))):  # fmt: skip
                with tfl.set_policy(policy):
                    ours = measure(op.call)
                assert ours <= measure(op.eager) + bits, f"{op!r} {dtype} {wanted}"


@ops.op_param
def test_no_more_memory_than_eager_under_autocast(op, device):
    leaves = case_of(op, device=device).leaves()

    def compute(call):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return call(*leaves)

    ours, eager = (saved_bytes(lambda c=call: compute(c), leaves) for call in (op.call, op.eager))
    assert ours <= eager


@ops.every_op
@ops.policy_param
def test_nothing_without_a_gradient(policy, op, device):
    """No gradient wanted: what keeps something does not run, and the output has no history."""
    case = op.case((5,), 16, 24, torch.float32, device)
    leaves = case.leaves()
    with tfl.set_policy(policy):
        with torch.no_grad(), Calls() as without_grad:
            y = op.call(*leaves)
        assert y.grad_fn is None and not y.requires_grad
        with Calls() as frozen:
            assert op.call(*case.inputs).grad_fn is None
        assert saved_bytes(lambda: op.call(*case.inputs)) == 0
    for calls in (without_grad, frozen):
        assert not [name for name in calls.names if "aux" in name or "backward" in name]


@ops.every_op
def test_a_backward_frees_what_was_kept(op, device):
    """A leak would show as growth over steps."""
    case = op.case((5,), 16, 24, torch.float32, device)
    y = op.call(*case.leaves())
    watch = weakref.ref(y)
    y.backward(case.g)
    del y
    assert watch() is None, "the output is part of a reference cycle"


@ops.rows([ops.gated(form, "silu", True, 192, memory=m) for form in ops.FORMS for m in BOTH])
def test_a_step_takes_no_more_than_eagers_at_its_peak(op, device):
    """The pre-activations go before the weights' gradients come, unless the graph is kept."""
    case = op.case((96,), 64, 64, torch.float32, device)

    def peak(call, **options):
        leaves = case.leaves()
        with Storages() as storages:
            torch.autograd.grad(call(*leaves), leaves, case.g, **options)
        return storages.most

    ours = peak(op.call)
    assert ours <= peak(op.eager)
    if "low" not in op.label:  # with low memory the peak comes before
        assert ours < peak(op.call, retain_graph=True)


ROWS, WIDE_HIDDEN = 1024, 512  # hidden tensors of 2 MiB: large ones are freed first
HIDDEN_BYTES, NARROW_BYTES = 4 * ROWS * WIDE_HIDDEN, 4 * ROWS * 64
WEIGHT_BYTES = 4 * 64 * WIDE_HIDDEN


def peak_of(op, device, **options):
    """The most bytes in a step of a chain, beside its inputs."""
    case = op.case((ROWS,), 64, 64, torch.float32, device)
    leaves = case.leaves()
    with Storages() as storages:
        torch.autograd.grad(op.call(*leaves), leaves, case.g, **options)
    return storages.most


@pytest.mark.parametrize("memory", BOTH)
@pytest.mark.parametrize("activation", ops.ACTS)
def test_peak_of_a_blocks_step(activation, memory, device):
    """Two hidden tensors at a time, the output and the gradient of one weight: a layer's input is
    freed before there is dz of the layer below, and what dz is made of right after."""
    widths = (WIDE_HIDDEN,)
    block = ops.mlp(activation, 2, widths, memory=memory)
    most = 2 * HIDDEN_BYTES + NARROW_BYTES + WEIGHT_BYTES
    ours, small = peak_of(block, device), 4 * 4 * (WIDE_HIDDEN + 64)
    assert ours <= most + small
    assert ours <= peak_of(ops.stack(activation, 2, widths), device)
    kept = peak_of(block, device, retain_graph=True)
    tensors = 2 if activation == "relu" else 3
    assert kept >= tensors * HIDDEN_BYTES + NARROW_BYTES


@pytest.mark.parametrize("activation", ops.ACTS)
def test_peak_of_a_deep_chains_step(activation, device):
    """At most what the forward keeps, and one hidden tensor for ReLU, whose output act' reads."""
    widths = (WIDE_HIDDEN,) * 3
    chain = ops.mlp(activation, 4, widths)
    kept = 3 * HIDDEN_BYTES * (1 if activation == "relu" else 2)
    weights = 4 * WIDE_HIDDEN * (64 + WIDE_HIDDEN)
    most = kept + HIDDEN_BYTES * (activation == "relu") + NARROW_BYTES + weights
    ours = peak_of(chain, device)
    assert ours <= most + 64 * WIDE_HIDDEN
    assert ours <= peak_of(ops.stack(activation, 4, widths), device)


# --- in bytes ------------------------------------------------------------------------------------

H, W = TOKENS * HIDDEN, TOKENS * OUTPUTS
C = TOKENS * sum(WIDTHS)
# The operator, and how many elements and how many bits are kept of what it allocates.
EXACT = [
    *((op, W, 0) for op in ops.OPS[1:]),
    (ops.LINEAR, 0, 0),
    (ops.LOW[0], 0, W),  # ReLU's bits
    *((op, W, 0) for op in ops.LOW[1:]),
    *((ops.gated(f, "silu", True, HIDDEN), 2 * H, 0) for f in ops.FORMS),
    *(
        (ops.gated(f, "silu", True, HIDDEN, memory="low"), (1 + (f == "stacked")) * H, 0)
        for f in ops.FORMS
    ),
    *((ops.gated(f, "silu"), 2 * W, 0) for f in ops.FORMS),
    *((ops.mlp(a, 4, WIDTHS), (1 + (a != "relu")) * C, 0) for a in ops.ACTS),
    *((ops.mlp(a, 4, WIDTHS, memory="low"), C, 0) for a in ops.ACTS),
    *((ops.stack(a, 4, WIDTHS), (1 + (a != "relu")) * C, 0) for a in ops.ACTS),
    *((ops.stack(a, 4, WIDTHS, memory="low"), 2 * C, 0) for a in ops.ACTS if a != "relu"),
    (ops.stack("relu", 4, WIDTHS, memory="low"), C, C),  # which the next layers keep anyway
    (ops.ODD["block"], 4 * 16 * 8 * 8, 0),
]


@pytest.mark.parametrize("op, elements, bits", EXACT, ids=[repr(row[0]) for row in EXACT])
def test_bytes(op, elements, bits, device):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        leaves = case_of(op, dtype, device).leaves()
        assert kept_bytes(lambda t=leaves: op.call(*t)) == elements * dtype.itemsize + bits // 8


def test_bytes_of_a_chain_under_hooks(device):
    """The operator for a chain keeps its promise where hooks are asked as well."""
    op = ops.mlp("silu", 4, WIDTHS, memory="low")
    leaves = case_of(op, device=device).leaves()
    assert saved_bytes(lambda: op.call(*leaves), leaves[1:]) == (C + TOKENS * INPUTS) * 4


def test_the_librarys_bits_and_bits_of_narrow_rows(device):
    leaves = case_of(ops.RELU, device=device).leaves()
    with tfl.set_policy("cublaslt"):
        assert saved_bytes(lambda: ops.RELU.call(*leaves), leaves) == W // 8
    for dtype in ops.DTYPES:  # a row of bits takes 16 bytes at least
        leaves = ops.RELU.case((TOKENS,), 8, 4, dtype, device).leaves()
        kept = kept_bytes(lambda t=leaves: ops.LOW[0].call(*t))
        assert kept == TOKENS * min(16, 4 * dtype.itemsize)


def test_relu_in_a_chain_keeps_bits_beside_frozen_weights_only(device):
    op, default = (ops.mlp("relu", 4, WIDTHS, memory=m) for m in ("low", "default"))
    case = case_of(op, device=device)
    leaves = case.leaves([k != 3 for k in range(9)])
    with tfl.plans.budget(0):  # a mask and an output have plans of their own
        assert kept_bytes(lambda: op.call(*leaves)) == 4 * (C - TOKENS * 128) + TOKENS * 128 // 8
        wanted = [t for t in leaves if t.requires_grad]
        got, want = (torch.autograd.grad(o.call(*leaves), wanted, case.g) for o in (op, default))
    torch.testing.assert_close(got, want)


# --- no product is done twice --------------------------------------------------------------------


@ops.rows([*ops.EVERY, *ops.ODD.values()])
def test_flops_are_eagers(op, device):
    """By torch's count, whatever is wanted: what low memory computes again is no product, but up's
    of a block."""
    case = op.case((5,), 8, 16, torch.float32, device)

    def count(call, wanted):
        with FlopCounterMode(display=False) as counter:
            y = call(*case.leaves(wanted))
            if y.requires_grad:
                y.backward(case.g)
        return counter.get_total_flops()

    for wanted in ops.subsets(len(case.inputs)):
        ours, eager = count(op.call, wanted), count(op.eager, wanted)
        again = 2 * 5 * 8 * 17 if op.label == "block apart silu low" and any(wanted[:6]) else 0
        assert eager <= ours <= eager + again and eager > 0, f"{op!r} {wanted}"


NONE, RELU, SILU = (NUMBERS[name] for name in ("none", "relu", "silu"))


def test_flops_of_steps_under_the_operators():
    x, w, b = ops.LINEAR.case((10,), 8, 16).inputs
    y, mask, fused = x @ w.t(), [False, False, False], torch.ops.fused
    for products, operator, *args in (
        (1, fused._linear_aux, x, w, b, RELU),
        (1, fused._linear_backward_across, y, x, w, None, NONE, mask, x, RELU, True),
        (0, fused._glu_backward, x, x, x, SILU, [True] * 5),
        (1, fused._glu_backward, y, x, x, SILU, [True] * 5, w),  # with the layer after
    ):
        with FlopCounterMode(display=False) as counter:
            operator(*args)
        assert counter.get_total_flops() == products * 2 * 10 * 8 * 16


# --- fuse_ ---------------------------------------------------------------------------------------


class Gated(GatedBlock):
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AndOn(Gated):
    """With an activation after it, so that the layer is one call with that."""

    def forward(self, x):
        return super().forward(x).relu()


class Chunked(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(128, 256), nn.Linear(128, 128)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(up * F.gelu(gate))


class Subclass(nn.Linear):
    """Left alone by fuse_, as layers of LoRA are."""


def relu_and(*after):
    return lambda: nn.Sequential(nn.Linear(128, 256), nn.ReLU(), *after)


def block():
    """The feed-forward block of a transformer, and ReLU with dropout after it."""
    ends = nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128)
    return nn.Sequential(
        *sequential(128, 256, 128, activation="gelu_erf"), *relu_and(nn.Dropout(0.0), *ends)()
    )


# Kept, in bytes a row: by eager, once fused, and with low memory. ReLU's output is kept by a
# normalisation or a linear layer after it, bits or no bits.
H4, BITS = 4 * 256, 256 // 8
FUSED = {
    "block": (block, 4 * H4 + 512, 4 * H4 + 512, 3 * H4 + 512),
    "gated": (lambda: Gated(128, 256), 4 * H4, 2 * H4, H4),
    "chunked": (Chunked, 2 * H4, H4, H4),
    "gated and on": (lambda: AndOn(128, 256), 4 * H4 + 512, 2 * H4 + 512, H4 + 512),
    "alone": (relu_and(), H4, H4, BITS),
    "dropout": (relu_and(nn.Dropout(0.5)), 2 * H4, 2 * H4, H4 + BITS),
    "sigmoid": (relu_and(nn.Sigmoid()), 2 * H4, 2 * H4, H4 + BITS),
    "layer norm": (relu_and(nn.LayerNorm(256)), H4 + 8, H4 + 8, H4 + 8),
    "batch norm": (relu_and(nn.BatchNorm1d(256)), H4 + 32, H4 + 32, H4 + 32),
    "subclass": (relu_and(Subclass(256, 128)), H4, H4, H4),
    "dropout, subclass": (relu_and(nn.Dropout(0.0), Subclass(256, 128)), H4, H4, H4),
}


@pytest.mark.parametrize("name", FUSED)
def test_fuse_takes_low_memory_where_it_pays(name):
    """And never keeps more than eager; copies keep what they were told."""
    make, *want = FUSED[name]
    plain = make()
    default, low = copy.deepcopy(plain), copy.deepcopy(plain)
    assert len(tfl.fuse_(default).fused) == len(tfl.fuse_(low, memory="low").fused)
    x = torch.randn(64, 128)
    models = (plain, default, low, copy.deepcopy(low))
    assert [kept_bytes(lambda m=m: m(x)) // 64 for m in models] == [*want, want[-1]]
    if not any(isinstance(m, nn.Dropout) and m.p for m in plain.modules()):
        steps = [step(m, x) for m in models]
        for other in steps[1:]:
            assert_same(other, steps[0])
    tfl.unfuse_(low)
    assert kept_bytes(lambda: low(x)) // 64 == want[0]
