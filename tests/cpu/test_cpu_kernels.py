"""The CPU's own ways, which need sizes that the other tests do not have: oneDNN's products in
parts, and the activation's gradient with the bias's sum in one pass."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import one_thread, setting  # noqa: F401
from numerics import (
    Tally,
    add_checked,
    assert_bits,
    assert_contract,
    assert_exact,
    plain,
    run,
    with_inference,
)
from operators import DTYPES, GELU_ERF, GELU_TANH, LINEAR, OPS, RELU, op_param, without_kinks
from processes import run_python
from steps import encode_mask
from watching import explained, operators_of

import torch_fused_linear as tfl
from torch_fused_linear.activations import NUMBERS

ONE_PASS_DTYPES = [torch.float64, torch.float32]
PRODUCT, ONE_PASS = "oneDNN product in parts", "activation gradient and bias sum in one pass"
FROM_BITS, NOT_FUSED = "activation gradient from bits", "PyTorch's own (not fused)"
# Sums of one part and a little more, of several, of a prime number; few and many columns.
SHAPES = [(300, 784, 150), (256, 193, 600), ((5, 103), 1000, 130), (2051, 389, 30), (129, 3072, 97)]


def has_products() -> bool:
    """Returns whether oneDNN is faster than PyTorch's BLAS on this machine."""
    info = Path("/proc/cpuinfo")
    intel = not info.exists() or "GenuineIntel" in info.read_text()
    capable = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return capable and not intel and torch.backends.mkl.is_available()


def paths(call) -> list[str]:
    return operators_of(call, "path")


needs_products = pytest.mark.skipif(not has_products(), reason="no faster than MKL here")


# --- products in parts ------------------------------------------------------------------------


@needs_products
def test_which_way_is_taken():
    case = LINEAR.case(*SHAPES[0], torch.float32)
    # Too few elements for one pass.
    backward = " + ".join([NOT_FUSED, PRODUCT, PRODUCT])
    assert paths(lambda: run(RELU.call, case)) == [f"{PRODUCT} + ATen activation", backward]
    many = LINEAR.case(16_001, 40, 264, torch.float32)
    backward = " + ".join([ONE_PASS, PRODUCT, PRODUCT])
    assert paths(lambda: run(GELU_ERF.call, many)) == [f"{PRODUCT} + ATen activation", backward]
    assert paths(lambda: LINEAR.call(*case.inputs)) == [PRODUCT]
    few = LINEAR.case(32, 784, 1500, torch.float32)
    assert paths(lambda: LINEAR.call(*few.inputs)) == [NOT_FUSED]


@needs_products
def test_switches_of_torch_are_obeyed():
    case = LINEAR.case(*SHAPES[0], torch.float32)

    def is_plain():
        return paths(lambda: RELU.call(*case.inputs)) == [NOT_FUSED]

    with torch.backends.mkldnn.flags(enabled=False):
        assert is_plain()
    with tfl.set_policy("eager"):
        assert is_plain()
    before = torch.get_float32_matmul_precision()
    with setting(torch.set_float32_matmul_precision, "medium", before):
        assert is_plain()
    mkldnn, cuda = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    # The older switch cannot tell these, and says so; a GPU's is no concern of a CPU.
    for matmul, precision in ((mkldnn, "tf32"), (mkldnn, "bf16"), (cuda, "tf32")):
        put = partial(setattr, matmul, "fp32_precision")
        with setting(put, precision, matmul.fp32_precision):
            assert is_plain() == (matmul is mkldnn)


@op_param
def test_error_is_not_above_eagers(op):
    def cases():
        for seed, shape in enumerate(SHAPES):
            for bias in (True, False):
                case = LINEAR.case(*shape, torch.float32, bias=bias, seed=seed)
                yield op, f"{shape} bias={bias}", without_kinks(op, case)
                if op in (LINEAR, RELU):  # nor is any term lost or doubled
                    assert_exact(op, LINEAR.exact_case(*shape, torch.float32, bias=bias), shape)

    assert_contract(cases())
    for dtype in DTYPES[1:] if op in (RELU, GELU_TANH, GELU_ERF) else ():
        case = LINEAR.case(1031, 65, 264, dtype)
        assert_contract([(op, f"many tokens, {dtype}", without_kinks(op, case))])


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "with gaps": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "every other": lambda t: t.repeat_interleave(2, 1)[:, ::2],
}


def one_for_all(t):
    return t[(slice(1),) * t.dim()].expand_as(t)


CHANGES = {
    **{f"{which} {name}": {which: LAYOUTS[name]} for which in "xwg" for name in LAYOUTS},
    "bias with gaps": {"b": lambda b: b.repeat_interleave(2)[::2]},
    "one bias for all": {"b": one_for_all},
    "one row, one gradient": {"x": lambda x: x[:1].expand_as(x), "g": one_for_all},
}


@op_param
def test_strides(op):
    """As the same numbers without gaps, bit for bit where only the bias has any."""
    is_exact = op in (LINEAR, RELU)
    for name, change in CHANGES.items():
        case = (LINEAR.exact_case if is_exact else LINEAR.case)(300, 784, 150, torch.float32)
        *case.inputs, case.g = (
            change.get(letter, lambda t: t)(t) for letter, t in zip("xwbg", (*case.inputs, case.g))
        )
        if is_exact:
            assert_exact(op, case, name)
        near = {"rtol": 0, "atol": 0} if "b" in change else {"rtol": 1e-5, "atol": 1e-4}
        ours, same = (with_inference(op.call, c) for c in (case, plain(case)))
        torch.testing.assert_close(ours, same, **near)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
@op_param
def test_nan_and_infinity_pass_as_in_torch(op, special):
    for place in ("x", "w", "b", "g"):
        case = LINEAR.case(300, 784, 150, torch.float32)
        tensor = getattr(case, place)
        tensor[tuple(n // 2 for n in tensor.shape)] = special
        for ours, eager in zip(run(op.call, case), run(op.eager, case), strict=True):
            assert torch.equal(ours.isnan(), eager.isnan()), place
            assert torch.equal(ours.isinf(), eager.isinf()), place
            finite = eager.isfinite()
            torch.testing.assert_close(ours[finite], eager[finite], rtol=1e-4, atol=1e-4)


@op_param
def test_the_same_bits_every_time(op):
    case = LINEAR.case(513, 784, 600, torch.float32)
    first = run(op.call, case)
    for _ in range(5):
        assert_bits(run(op.call, case), first)


# --- threads --------------------------------------------------------------------------------------

COUNT_THREADS = """
import os
import torch
import torch_fused_linear

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
output = torch.empty(1 << 20)
before = threads()
torch.ops.fused._relu_mask(output)
print(threads() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted on Linux")
@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="PyTorch without OpenMP")
def test_our_loops_run_on_torchs_threads():
    """at::parallel_for is a plain loop in a library that is built without OpenMP."""
    run = run_python(COUNT_THREADS)
    assert run.stdout.strip() == "2", run.stderr


# --- gradient of the activation and of the bias in one pass -----------------------------------

# Many rows, rows longer than a block, a width that divides nothing.
GRADIENT_SHAPES = [(140_001, 30), (43, 100_003), (16_411, 257), ((3, 75, 71), 264)]
KINDS = ["relu", "relu from bits", "gelu_tanh", "gelu_erf"]
kind_param = pytest.mark.parametrize("kind", KINDS)


def gradient_case(shape, dtype, kind):
    """A gradient, what is kept of `kind`, and the activation."""
    lead, features = shape
    lead = (lead,) if isinstance(lead, int) else lead
    gen = torch.Generator().manual_seed(0)
    grad, saved = (torch.randn(*lead, features, generator=gen).to(dtype) for _ in range(2))
    return grad, encode_mask(saved > 0) if "bits" in kind else saved, kind.partition(" ")[0]


def backward(grad, saved, activation, bias_grad=True):
    return torch.ops.fused._activation_backward(grad, saved, NUMBERS[activation], bias_grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@kind_param
def test_one_pass_against_fp64(kind, dtype):
    """dz is torch's own but for the last bit, where a vector ends in the middle of a block; its sum
    has no more error than torch's."""
    tally, eps = Tally(), torch.finfo(dtype).eps
    path = f"{FROM_BITS} + ATen sum" if "bits" in kind else NOT_FUSED
    for shape in GRADIENT_SHAPES:
        args = gradient_case(shape, dtype, kind)
        torch.set_num_threads(3 if "bits" in kind else 1)
        (dz, grad_bias), report = explained(lambda a=args: backward(*a))
        torch.set_num_threads(1)
        assert report.calls[0].path == (ONE_PASS if dtype in ONE_PASS_DTYPES else path)
        with tfl.set_policy("eager"):
            torch_dz, torch_bias = backward(*args)
        torch.testing.assert_close(dz, torch_dz, rtol=eps, atol=eps)
        assert dz.is_contiguous() and grad_bias.dtype == dtype
        truth = dz.double().flatten(0, -2).sum(0)
        add_checked(tally, grad_bias, torch_bias, truth, float(truth.abs().max()), f"{shape}")
    tally.check(f"{kind} {dtype}")


@pytest.mark.parametrize("dtype", ONE_PASS_DTYPES, ids=str)
@kind_param
def test_one_pass_has_the_same_bits_in_any_way(kind, dtype):
    """On any number of threads, without the sum, of any strides."""
    grad, saved, activation = gradient_case((16_411, 257), dtype, kind)
    want = backward(grad, saved, activation)
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        assert_bits(backward(grad, saved, activation), want, f"{threads} threads")
    torch.set_num_threads(1)
    dz, nothing = backward(grad, saved, activation, bias_grad=False)
    assert torch.equal(dz, want[0]) and nothing.shape == (0,)
    for name, change in LAYOUTS.items() if dtype == torch.float32 else ():
        for args in ((change(grad), saved), (grad, change(saved))):
            assert_bits(backward(*args, activation), want, name)
    row = grad[:1].expand_as(grad)
    assert_bits(backward(row, saved, activation), backward(row.contiguous(), saved, activation))
    for empty in (grad[:0], saved[:0]), (grad[:, :0], saved[:, :0]):
        dz, grad_bias = backward(*empty, activation)
        assert dz.shape == empty[0].shape and torch.equal(grad_bias, torch.zeros_like(grad_bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_pass_of_relu_at_the_edges(dtype):
    """0 where the output is at or below 0; what was NaN lets the gradient pass, and NaN stays."""
    values = torch.tensor([0.0, -0.0, 1.0, float("nan"), float("inf")], dtype=dtype)
    saved = values.repeat(4200, 200)
    grad = torch.full_like(saved, 2.0)
    dz, grad_bias = backward(grad, saved, "relu")
    want = torch.tensor([0.0, 0.0, 2.0, 2.0, 2.0], dtype=dtype)
    assert torch.equal(dz, want.repeat(4200, 200))
    assert torch.equal(grad_bias, (4200 * want).repeat(200))
    grad[7] = float("nan")
    dz, grad_bias = backward(grad, saved, "relu")
    lost = (want == 0).repeat(200)
    assert torch.equal(dz[7].isnan(), ~lost) and torch.equal(grad_bias.isnan(), ~lost)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_from_bits(dtype):
    """Whatever the gradient is, NaN and -0.0 too, it is passed on as it is, or 0."""
    edges = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-30, -1.0]).to(dtype)
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    widths = [*range(1, 131), 255, 256, 257, 1000]
    for width, lead in zip(widths * 2, itertools.cycle([(), (1,), (7,), (2, 3)])):
        grad = edges[torch.randint(len(edges), (*lead, width))]
        passed = torch.randint(2, grad.shape).bool()
        with tfl.explain() as report:
            dz, _ = backward(grad, encode_mask(passed), "relu")
            backward(grad, encode_mask(passed), "relu", bias_grad=False)
        want = torch.where(passed, grad, 0)
        assert torch.equal(dz.view(integers), want.view(integers)), (lead, width)
        assert [call.path for call in report.calls] == [f"{FROM_BITS} + ATen sum", FROM_BITS]
    case = LINEAR.case((2, 20), 40, 264, dtype)
    args = (case.g, case.x, case.w, encode_mask(case.g > 0), NUMBERS["relu"], [True] * 3)
    (path,) = paths(lambda: torch.ops.fused._linear_backward(*args))
    assert FROM_BITS in path


@pytest.mark.parametrize("op", [op for op in OPS if op is not LINEAR], ids=repr)
def test_between_layers(op):
    """A block's gradients are those of the layers one by one."""
    first = LINEAR.case(16_001, 40, 264, torch.float32)
    parameters = [*first.inputs[1:], *LINEAR.case(1, 264, 150, torch.float32).inputs[1:]]

    def gradients(is_block):
        x, w, b, v, c = leaves = [t.clone().requires_grad_() for t in (first.x, *parameters)]
        if is_block:
            y = tfl.mlp(x, [w, v], [b, c], activation=op.activation)
        else:
            y = LINEAR.call(op.call(x, w, b), v, c)
        return torch.autograd.grad(y.square().sum(), leaves)

    of_block, report = explained(lambda: gradients(True))
    across = [call.path for call in report.calls if call.operator == "_linear_backward_across"]
    assert len(across) == 1 and ONE_PASS in across[0]
    assert all(map(torch.equal, of_block, gradients(False)))
    with tfl.set_policy("eager"):
        for ours, eager in zip(of_block, gradients(False), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-2)
