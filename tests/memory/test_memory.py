"""What a layer keeps for its backward: nothing without a gradient, never more than eager."""

import itertools

import pytest
import torch
from helpers import (
    DTYPES,
    GELU_ERF,
    GELU_TANH,
    OPS,
    RELU,
    SILU,
    Calls,
    device_param,
    op_param,
    policy,
    random_case,
    saved_bytes,
)
from torch.utils._python_dispatch import TorchDispatchMode

import torch_fused_linear as tfl

policy_param = pytest.mark.parametrize("policy_name", ["auto", "cublaslt", "eager"])
SUBSETS = [s for s in itertools.product([False, True], repeat=3) if any(s)]


@device_param
@op_param
@policy_param
@pytest.mark.parametrize("wanted", SUBSETS, ids=lambda s: "".join("FT"[v] for v in s))
def test_one_layer_keeps_no_more_than_eager(wanted, policy_name, op, device):
    """For every subset of wanted gradients: a frozen weight needs no input kept, and so on.

    Widths are multiples of 8, so that padding of rows is not what is measured.
    """
    for dtype in DTYPES:
        case = random_case((64,), 96, 128, dtype, device)
        leaves = [t.clone().requires_grad_(r) for t, r in zip(case.inputs, wanted)]
        with policy(policy_name):
            ours = saved_bytes(lambda a=leaves: op.call(*a), leaves[1:])
        eager = saved_bytes(lambda a=leaves: op.eager(*a), leaves[1:])
        assert ours <= eager, f"{dtype}: keeps {ours} bytes, eager {eager}"


@device_param
@op_param
def test_nor_under_autocast(op, device):
    case = random_case((64,), 96, 128, torch.float32, device)
    leaves = [t.clone().requires_grad_() for t in case.inputs]

    def compute(fn):
        with torch.autocast(device, dtype=torch.bfloat16):
            return fn(*leaves)

    ours = saved_bytes(lambda: compute(op.call), leaves)
    assert ours <= saved_bytes(lambda: compute(op.eager), leaves)


@device_param
@policy_param
@pytest.mark.parametrize("kind", ["relu", "gelu"])
def test_a_network_keeps_no_more_than_eager(kind, policy_name, device):
    """In a chain, the output that ReLU keeps is the input that the next layer keeps anyway."""
    fused_type = tfl.FusedLinearReLU if kind == "relu" else tfl.FusedLinearGELU
    fused = torch.nn.Sequential(*(fused_type(128, 128) for _ in range(4)), tfl.FusedLinear(128, 8))
    fused = fused.to(device)
    eager = torch.nn.Sequential(*(m for layer in fused for m in [layer.to_unfused()]))
    x = torch.randn(64, 128, device=device)
    parameters = list(fused.parameters())
    with policy(policy_name):
        ours = saved_bytes(lambda: fused(x), parameters)
    theirs = saved_bytes(lambda: eager(x), parameters)
    # 'cublaslt' keeps its bit masks beside the outputs that the next layers keep: 1/32 more
    masks = 4 * 64 * 128 // 8 if (kind, policy_name) == ("relu", "cublaslt") else 0
    assert ours <= theirs + masks
    if kind == "relu" and policy_name == "auto":
        assert ours == 64 * 128 * 4 * 5, "four activations and the input, each once"


def test_the_mask_is_a_thirty_second_of_the_output():
    """Under 'cublaslt' ReLU keeps one bit per element instead of the output."""
    case = random_case((64,), 96, 128, torch.float32)
    leaves = [t.clone().requires_grad_() for t in case.inputs]
    with policy("cublaslt"):
        ours = saved_bytes(lambda: RELU.call(*leaves), leaves)
    assert ours == 64 * 128 // 8


@device_param
@op_param
@policy_param
def test_nothing_is_kept_or_written_without_a_gradient(policy_name, op, device):
    """No gradient wanted: the aux operators do not run, and the output has no history."""
    case = random_case((5,), 16, 24, torch.float32, device)
    leaves = [t.clone().requires_grad_() for t in case.inputs]
    with policy(policy_name):
        with torch.no_grad(), Calls() as without_grad:
            y = op.call(*leaves)
        assert y.grad_fn is None and not y.requires_grad
        with Calls() as frozen:
            assert op.call(*case.inputs).grad_fn is None
        assert saved_bytes(lambda: op.call(*case.inputs)) == 0
    for calls in (without_grad, frozen):
        assert not [name for name in calls.names if "aux" in name or "backward" in name]


@device_param
@pytest.mark.parametrize("op", [GELU_TANH, GELU_ERF, SILU], ids=repr)
def test_only_the_wanted_gemms_run(op, device):
    """A frozen weight runs no weight-gradient GEMM: the backward step is told so."""
    case = random_case((5,), 16, 24, torch.float32, device)
    for wanted in SUBSETS:
        leaves = [t.clone().requires_grad_(r) for t, r in zip(case.inputs, wanted)]
        y = op.call(*leaves)
        with AskedFor() as asked:
            y.backward(case.g)
        assert asked.masks in ([], [list(wanted)]), (wanted, asked.masks)


class AskedFor(TorchDispatchMode):
    """The output masks given to _linear_backward."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.fused._linear_backward.default:
            self.masks.append([bool(m) for m in args[-1]])
        return func(*args, **(kwargs or {}))


@device_param
def test_backward_frees_what_was_kept(device):
    """After backward the graph holds nothing: a leak would show as growth over steps."""
    import gc
    import weakref

    for op in OPS:
        case = random_case((5,), 16, 24, torch.float32, device)
        leaves = [t.clone().requires_grad_() for t in case.inputs]
        y = op.call(*leaves)
        watch = weakref.ref(y)
        y.backward(case.g)
        del y
        gc.collect()
        assert watch() is None, "the output is part of a reference cycle"
