"""The CPU's own ways, which need sizes that the other tests do not have: oneDNN's products in
parts, and the activation's gradient with the bias's sum in one pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import one_thread  # noqa: F401
from numerics import Tally, add_checked, assert_contract, assert_exact, run
from operators import DTYPES, GELU_ERF, GELU_TANH, LINEAR, OPS, RELU, Case, op_param, without_kinks
from steps import encode_mask

import torch_fused_linear as tfl

ONE_PASS_DTYPES = [torch.float64, torch.float32]
PRODUCT, ONE_PASS = "oneDNN product in parts", "activation gradient and bias sum in one pass"
FROM_BITS = "activation gradient from bits"
# Sums of one part and a little more, of several, of a prime number; few and many columns.
SHAPES = [(300, 784, 150), (256, 193, 600), ((5, 103), 1000, 130), (2051, 389, 30), (129, 3072, 97)]
ACTIVATIONS = ["relu", "gelu_tanh", "gelu_erf"]
activation_param = pytest.mark.parametrize("activation", ACTIVATIONS)


def has_products() -> bool:
    """Whether this is a machine on which oneDNN outruns the BLAS that PyTorch has."""
    info = Path("/proc/cpuinfo")
    intel = not info.exists() or "GenuineIntel" in info.read_text()
    capable = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return capable and not intel and torch.backends.mkl.is_available()


needs_products = pytest.mark.skipif(not has_products(), reason="no faster than MKL here")


def paths(call) -> list[str]:
    with tfl.explain() as report:
        call()
    return [row.path for row in report.calls]


# --- products in parts ------------------------------------------------------------------------


@needs_products
def test_which_way_is_taken():
    case = LINEAR.case(*SHAPES[0], torch.float32)
    assert paths(lambda: run(RELU.call, case)) == [
        f"{PRODUCT} + ATen activation",
        " + ".join(["reference", PRODUCT, PRODUCT]),  # too few elements for one pass
    ]
    many = LINEAR.case(16_001, 40, 264, torch.float32)
    assert paths(lambda: run(GELU_ERF.call, many)) == [
        f"{PRODUCT} + ATen activation",
        " + ".join([ONE_PASS, PRODUCT, PRODUCT]),
    ]
    assert paths(lambda: LINEAR.call(*case.inputs)) == [PRODUCT]
    few = LINEAR.case(32, 784, 1500, torch.float32)
    assert paths(lambda: LINEAR.call(*few.inputs)) == ["reference"]


@needs_products
def test_switches_of_torch_are_obeyed():
    case = LINEAR.case(*SHAPES[0], torch.float32)

    def path():
        return paths(lambda: RELU.call(*case.inputs))

    with torch.backends.mkldnn.flags(enabled=False):
        assert path() == ["reference"]
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert path() == ["reference"]
    finally:
        torch.set_float32_matmul_precision(before)
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        for lower in ("tf32", "bf16"):  # which the older switch cannot tell, and says so
            matmul.fp32_precision = lower
            assert path() == ["reference"]
    finally:
        matmul.fp32_precision = before
    cuda = torch.backends.cuda.matmul
    before = cuda.fp32_precision
    try:
        cuda.fp32_precision = "tf32"  # no concern of a CPU
        assert path() != ["reference"]
    finally:
        cuda.fp32_precision = before
    with tfl.set_policy("eager"):
        assert path() == ["reference"]


@op_param
def test_error_is_not_above_eagers(op):
    def cases():
        for seed, shape in enumerate(SHAPES):
            for bias in (True, False):
                case = LINEAR.case(*shape, torch.float32, bias=bias, seed=seed)
                yield op, f"{shape} bias={bias}", without_kinks(op, case) if op is RELU else case

    assert_contract(cases())


@pytest.mark.parametrize("op", [LINEAR, RELU], ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_term_is_lost_or_doubled(op, shape):
    assert_exact(op, LINEAR.exact_case(*shape, torch.float32), shape)
    assert_exact(op, LINEAR.exact_case(*shape, torch.float32, bias=False), shape)


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "with gaps": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "every other": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "backwards": lambda t: t.flip(0).contiguous().flip(0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "w", "g"])
@pytest.mark.parametrize("op", [LINEAR, RELU], ids=repr)
def test_strides(op, which, layout):
    case = LINEAR.exact_case(300, 784, 150, torch.float32)
    *case.inputs, case.g = (
        LAYOUTS[layout](t) if letter == which else t
        for letter, t in zip("xwbg", (*case.inputs, case.g))
    )
    assert_exact(op, case, f"{which} {layout}")


@pytest.mark.parametrize("layout", ["every other", "one for all"])
@op_param
def test_strides_of_the_bias(op, layout):
    case = LINEAR.case(300, 784, 150, torch.float32)
    change = {
        "every other": lambda b: b.repeat_interleave(2)[::2],
        "one for all": lambda b: b[:1].expand_as(b),
    }[layout]
    strided = Case.of(case.x, case.w, change(case.b), case.g)
    plain = Case.of(case.x, case.w, strided.b.contiguous(), case.g)
    with torch.no_grad():
        assert torch.equal(op.call(*strided.inputs), op.call(*plain.inputs))
    for ours, same in zip(run(op.call, strided), run(op.call, plain), strict=True):
        assert torch.equal(ours, same)


@op_param
def test_overlapping_strides(op):
    """One row for all tokens, and one gradient for all outputs."""
    case = LINEAR.case(300, 784, 150, torch.float32)
    wide = Case.of(case.x[:1].expand(300, -1), case.w, case.b, case.g[:1, :1].expand(300, 150))
    plain = Case.of(wide.x.contiguous(), case.w, case.b, wide.g.contiguous())
    for ours, same in zip(run(op.call, wide), run(op.call, plain), strict=True):
        torch.testing.assert_close(ours, same, rtol=1e-5, atol=1e-4)


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
        assert all(map(torch.equal, run(op.call, case), first))


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
    run = subprocess.run([sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True)
    assert run.stdout.strip() == "2", run.stderr


# --- gradient of the activation and of the bias in one pass -----------------------------------

# Many rows, rows longer than a block, a width that divides nothing.
GRADIENT_SHAPES = [(140_001, 30), (43, 100_003), (16_411, 257), ((3, 75, 71), 264)]


def gradient_case(shape, dtype, seed=0):
    lead, features = shape
    lead = (lead,) if isinstance(lead, int) else lead
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(*lead, features, generator=gen).to(dtype) for _ in range(2)]


def backward(grad, saved, activation, bias_grad=True):
    return torch.ops.fused._activation_backward(grad, saved, activation, bias_grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@activation_param
def test_one_pass_against_fp64(activation, dtype):
    """dz is torch's own but for the last bit, where a vector ends in the middle of a block; its sum
    has no more error than torch's."""
    tally = Tally()
    for shape in GRADIENT_SHAPES:
        grad, saved = gradient_case(shape, dtype)
        with tfl.explain() as report:
            dz, grad_bias = backward(grad, saved, activation)
        assert report.calls[0].path == (ONE_PASS if dtype in ONE_PASS_DTYPES else "reference")
        with tfl.set_policy("eager"):
            torch_dz, torch_bias = backward(grad, saved, activation)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(dz, torch_dz, rtol=eps, atol=eps)
        assert dz.is_contiguous()
        assert (grad_bias.dtype, grad_bias.shape) == (dtype, torch_bias.shape)
        truth = dz.double().flatten(0, -2).sum(0)
        size = float(truth.abs().max())
        add_checked(tally, grad_bias, torch_bias, truth, size, f"{shape}")
    tally.check(f"{activation} {dtype}")


@activation_param
def test_one_pass_without_the_sum(activation):
    grad, saved = gradient_case((16_411, 257), torch.float32)
    dz, nothing = backward(grad, saved, activation, bias_grad=False)
    assert torch.equal(dz, backward(grad, saved, activation)[0]) and nothing.shape == (0,)


@activation_param
def test_one_pass_of_any_strides(activation):
    grad, saved = gradient_case((16_411, 257), torch.float32)
    want = backward(grad, saved, activation)
    for change in LAYOUTS.values():
        for args in ((change(grad), saved), (grad, change(saved))):
            assert all(map(torch.equal, backward(*args, activation), want))
    row = grad[:1].expand_as(grad)
    want = backward(row.contiguous(), saved, activation)
    assert all(map(torch.equal, backward(row, saved, activation), want))


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
    for width in [*range(1, 131), 255, 256, 257, 1000]:
        for lead in [(), (1,), (7,), (2, 3)]:
            grad = edges[torch.randint(len(edges), (*lead, width))]
            passed = torch.randint(2, grad.shape).bool()
            with tfl.explain() as report:
                dz, _ = backward(grad, encode_mask(passed), "relu")
                backward(grad, encode_mask(passed), "relu", bias_grad=False)
            want = torch.where(passed, grad, 0)
            integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
            assert torch.equal(dz.view(integers), want.view(integers)), (lead, width)
            paths = [call.path for call in report.calls]
            assert paths == [f"{FROM_BITS} + ATen sum", FROM_BITS]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", GRADIENT_SHAPES, ids=str)
def test_gradient_from_bits_and_its_sum(shape, dtype):
    grad, saved = gradient_case(shape, dtype)
    mask, tally = encode_mask(saved > 0), Tally()
    torch.set_num_threads(3)
    with tfl.explain() as report:
        dz, grad_bias = backward(grad, mask, "relu")
    torch.set_num_threads(1)
    plain = dtype not in ONE_PASS_DTYPES
    assert report.calls[0].path == (f"{FROM_BITS} + ATen sum" if plain else ONE_PASS)
    assert torch.equal(dz, torch.where(saved > 0, grad, 0)) and dz.is_contiguous()
    with tfl.set_policy("eager"):
        torch_dz, torch_bias = backward(grad, mask, "relu")
    assert torch.equal(dz, torch_dz) and grad_bias.dtype == dtype
    truth = dz.double().flatten(0, -2).sum(0)
    add_checked(tally, grad_bias, torch_bias, truth, float(truth.abs().max()), str(shape))
    tally.check(str(dtype))


def test_gradient_from_bits_of_any_strides():
    grad, saved = gradient_case((33, 257), torch.float32)
    mask = encode_mask(saved > 0)
    want = backward(grad, mask, "relu")
    for change in LAYOUTS.values():
        for args in ((change(grad), mask), (grad, change(mask))):
            assert all(map(torch.equal, backward(*args, "relu"), want))
    for empty in (grad[:0], mask[:0]), (grad[:, :0], mask[:, :0]):
        dz, grad_bias = backward(*empty, "relu")
        assert dz.shape == empty[0].shape and torch.equal(grad_bias, torch.zeros_like(grad_bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layers_backward_from_bits(dtype):
    """The products are given the same gradient as where the output was kept."""
    case = LINEAR.case((2, 20), 40, 264, dtype)
    output = RELU.call(*case.inputs)
    everything = [True, True, True]

    def gradients(saved):
        args = (case.g, case.x, case.w, saved, "relu", everything)
        with tfl.explain() as report:
            results = torch.ops.fused._linear_backward(*args)
        return results, report.calls[0].path

    got, path = gradients(encode_mask(output > 0))
    want, plain = gradients(output)
    assert all(map(torch.equal, got, want))
    assert FROM_BITS in path and FROM_BITS not in plain
    args = (case.g, output, case.w[:, :1].expand(264, 264).contiguous(), None, "none", everything)
    results = [
        torch.ops.fused._linear_backward_across(*args, saved, "relu", True)
        for saved in (encode_mask(output > 0), output)
    ]
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", ONE_PASS_DTYPES, ids=str)
@activation_param
def test_one_pass_has_the_same_bits_on_any_number_of_threads(activation, dtype):
    grad, saved = gradient_case((16_411, 257), dtype)
    want = backward(grad, saved, activation)
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, backward(grad, saved, activation), want)), threads
    torch.set_num_threads(1)


@pytest.mark.parametrize("op", [op for op in OPS if op is not LINEAR], ids=repr)
def test_between_layers(op):
    """The gradient that is handed over is that of the layers one by one."""
    first, second = (
        LINEAR.case(16_001, 40, 264, torch.float32),
        LINEAR.case(1, 264, 150, torch.float32),
    )
    parameters = [*first.inputs[1:], *second.inputs[1:]]

    def gradients():
        leaves = [t.clone().requires_grad_() for t in (first.x, *parameters)]
        hidden = op.call(*leaves[:3])
        return torch.autograd.grad(LINEAR.call(hidden, *leaves[3:]).square().sum(), leaves)

    with tfl.explain() as report:
        handed = gradients()
    assert report.handed_over == 1 and ONE_PASS in report.calls[2].path
    with tfl.handover(False):
        assert all(map(torch.equal, handed, gradients()))
    with tfl.set_policy("eager"):
        for ours, eager in zip(handed, gradients(), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("op", [GELU_TANH, GELU_ERF, RELU], ids=repr)
def test_error_of_many_tokens_is_not_above_eagers(op):
    def cases():
        for seed, dtype in enumerate([torch.float32, torch.float16, torch.bfloat16]):
            case = LINEAR.case(1031, 65, 264, dtype, seed=seed)
            yield op, f"{dtype}", without_kinks(op, case) if op is RELU else case

    for case in cases():
        assert_contract([case])
