"""fused::conv2d_relu on a GPU: which way is taken, TF32, determinism, graphs, our own kernels."""

import itertools
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from helpers import captured, setting
from numerics import in_double, run
from operators import LAST, LOW_DTYPES, Case, Op, channels_last, conv, without_kinks
from tf32 import FLOAT32_LEVEL, TF32_LEVEL, errors, needs_tf32, off_zero
from watching import explained, operators_of

import torch_fused_linear as tfl

pytestmark = pytest.mark.cuda
private = torch.ops.fused._channels_relu_backward
cudnn = torch.backends.cudnn
FUSED = "cuDNN convolution with bias and ReLU"
OWN = "ATen convolution + own bias and ReLU kernel"
ATEN = "ATen convolution + ATen ReLU in place"
BLOCK = conv(batch=8, channels=64, out=64, size=(14, 14), padding=(1, 1))


def case_of(op: Op, dtype: torch.dtype, last="", **options) -> Case:
    """`last`: what is channels-last of "x", "w" and "g"."""
    return channels_last(op.case(dtype=dtype, device="cuda", **options), last)


def assert_near(results, wanted, level: float) -> None:
    """Equal up to a part of the largest element: for sums that were taken in another order."""
    for got, want in zip(results, wanted, strict=True):
        tolerance = level * float(want.detach().abs().max())
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def path_of(fn):
    return operators_of(fn, "path")[0]


# --- which way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("last", ["", "xw"])
def test_one_of_the_two_ways_is_taken_and_named(last, dtype):
    """If not cuDNN's, then for a reason; found out once, and the trial leaves no memory behind and
    the random state alone."""
    op = conv(batch=3, channels=24, out=40, size=(13, 11), padding=(1, 1))
    case = case_of(op, dtype, last=last)
    before, random = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    first = path_of(lambda: op.call(*case.inputs))
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert first == FUSED or (first.startswith("(not cuDNN's fused form: ") and OWN in first)
    assert "fails" not in first, first
    assert path_of(lambda: op.call(*case.inputs)) == first


def test_reasons_that_can_be_told_beforehand(monkeypatch):
    case = case_of(BLOCK, torch.float64)
    assert "fp64" in path_of(lambda: BLOCK.call(*case.inputs))
    case = case_of(BLOCK, torch.float32)
    monkeypatch.setattr(cudnn, "deterministic", True)
    assert "not deterministic" in path_of(lambda: BLOCK.call(*case.inputs))
    monkeypatch.setattr(cudnn, "deterministic", False)
    monkeypatch.setattr(cudnn, "enabled", False)
    assert "switched off" in path_of(lambda: BLOCK.call(*case.inputs))
    want = BLOCK.eager(*in_double(case).inputs).float()
    torch.testing.assert_close(BLOCK.call(*case.inputs), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("last", ["", "xw"])
@pytest.mark.parametrize("groups", [1, 32])
def test_with_a_budget_the_quickest_way_is_taken(groups, last):
    op = conv(batch=4, channels=32, out=64, size=(20, 20), padding=(1, 1), groups=groups)
    case = case_of(op, torch.bfloat16, last=last)
    with tfl.plans.budget(20):
        path = path_of(lambda: op.call(*case.inputs))
        assert path_of(lambda: op.call(*case.inputs)) == path
        assert_near([op.call(*case.inputs)], [op.eager(*case.inputs)], 2e-2)
    assert path == FUSED or path.endswith((OWN, ATEN))


@pytest.mark.parametrize("searches", [False, True])
def test_threads_and_streams(searches, monkeypatch):
    monkeypatch.setattr(cudnn, "benchmark", searches)
    cases = [without_kinks(BLOCK, case_of(BLOCK, torch.bfloat16, seed=k)) for k in range(4)]
    want = [run(BLOCK.call, case) for case in cases]
    torch.cuda.synchronize()

    def job(k):
        with torch.cuda.stream(torch.cuda.Stream()):
            got = run(BLOCK.call, cases[k])
            torch.cuda.current_stream().synchronize()
        return got

    with ThreadPoolExecutor(4) as pool:
        for k, got in enumerate(pool.map(job, range(4))):
            assert_near(got, want[k], 3e-2)


@pytest.mark.parametrize("last", ["", "xw"])
def test_misaligned_tensors(last):
    """Slices of larger buffers, which start at any element."""
    case = without_kinks(BLOCK, case_of(BLOCK, torch.bfloat16, last=last))
    want = run(BLOCK.call, case)

    def shifted(t):
        moved = torch.empty(t.numel() + 1, dtype=t.dtype, device="cuda")[1:]
        return moved.as_strided(t.shape, t.stride(), 1).copy_(t)

    for which in itertools.product([False, True], repeat=3):
        args = [shifted(t) if move else t for t, move in zip(case.inputs, which)]
        assert_near(run(BLOCK.call, Case(args, shifted(case.g))), want, 2e-2)


# --- the guard ----------------------------------------------------------------------------------


@contextmanager
def in_place_of_cudnns(call):
    """Replaces cuDNN's fused form in torch by `call`."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that something is overridden
        library.impl("cudnn_convolution_relu", call, "CUDA")
    try:
        yield
    finally:
        library._destroy()


def times_as_inexact(factor):
    def call(x, w, b, *options):
        wide = [t if t is None else t.double() for t in (x, w, b)]
        exact = F.relu(F.conv2d(*wide, *options))
        eager = F.relu(F.conv2d(x, w, b, *options)).double()
        return (exact + factor * (eager - exact)).to(x.dtype)

    return call


def six_bits(x, w, b, *options):
    """Keeps six bits of the mantissa; bf16 has one more."""
    result = F.relu(F.conv2d(x, w, b, *options)).float()
    return (result.view(torch.int32) & ~(2**17 - 1)).view(torch.float32).to(x.dtype)


LESS_EXACT = "(not cuDNN's fused form: less exact than eager)"


@needs_tf32
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tf32", [True, False])
def test_an_inexact_form_is_refused_for_good(tf32, bias, monkeypatch):
    monkeypatch.setattr(cudnn, "allow_tf32", tf32)
    refused = conv(batch=5, channels=96, out=40, size=(12, 13), padding=(1, 1))
    accepted = conv(batch=6, channels=96, out=40, size=(12, 13), padding=(1, 1))
    case = case_of(refused, torch.float32, bias=bias)
    with in_place_of_cudnns(times_as_inexact(1.3)):
        path = path_of(lambda: refused.call(*case.inputs))
    assert path == f"{LESS_EXACT} + {OWN if bias else ATEN}"
    tfl.plans.clear()
    assert path_of(lambda: refused.call(*case.inputs)) == path
    assert_near([refused.call(*case.inputs)], [refused.eager(*case.inputs)], 1e-2)
    with in_place_of_cudnns(times_as_inexact(1)):
        case = case_of(accepted, torch.float32, bias=bias)
        assert path_of(lambda: accepted.call(*case.inputs)) == FUSED


FEW_OUTPUTS = conv(batch=1, channels=64, out=8, size=(3, 3))  # 8 a trial: seeds are pooled
ONE_BIT_LESS = conv(batch=7, channels=64, out=48, size=(14, 10), padding=(1, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("last", ["", "xw"])
@pytest.mark.parametrize("op", [ONE_BIT_LESS, FEW_OUTPUTS], ids=["many outputs", "few outputs"])
def test_one_bit_less_is_refused(op, last, dtype):
    case = case_of(op, dtype, last=last)
    with in_place_of_cudnns(six_bits):
        assert path_of(lambda: op.call(*case.inputs)).startswith(LESS_EXACT)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("last", ["", "xw"])
@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_ordinary_convolutions_pass(dtype, last, tf32, monkeypatch):
    monkeypatch.setattr(cudnn, "allow_tf32", tf32)
    for op in (
        conv(batch=8, channels=64, out=64, size=(28, 28), padding=(1, 1)),
        conv(batch=8, channels=64, out=256, size=(14, 14), kernel=(1, 1)),
        conv(batch=8, channels=64, out=128, size=(28, 28), stride=(2, 2), padding=(1, 1)),
        conv(batch=8, channels=64, out=64, size=(14, 14), dilation=(2, 2), padding=(2, 2)),
        conv(batch=2, channels=8, out=8, size=(5, 5), kernel=(2, 2), padding=(3, 3)),
    ):
        case = case_of(op, dtype, last=last)
        path = path_of(lambda c=op, a=case: c.call(*a.inputs))
        assert not any(reason in path for reason in ("less exact", "fails")), path


def relative_error(result, op, case):
    """The root mean square of e / (Σ|aₖbₖ| + |bias|)."""
    wide = in_double(case).inputs
    scale = op.product(*(t.abs() for t in wide))
    return math.sqrt(float(((result.double() - op.eager(*wide)) / scale).square().mean()))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("last", ["", "xw"])
@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_whatever_runs_is_as_exact_as_eager(dtype, last, deterministic, monkeypatch):
    """Depthwise convolutions of ATen add the bias before they round, which our kernel cannot."""
    monkeypatch.setattr(cudnn, "deterministic", deterministic)
    for groups in (1, 4, 64):
        op = conv(batch=9, channels=64, out=64, size=(15, 15), padding=(1, 1), groups=groups)
        case = case_of(op, dtype, last=last)
        path = path_of(lambda c=op, a=case: c.call(*a.inputs))
        ours, eager = (relative_error(f(*case.inputs), op, case) for f in (op.call, op.eager))
        assert ours <= 1.2 * eager, f"{groups} groups: {path}"


def test_without_memory_for_the_trial_it_is_tried_later():
    op = conv(batch=16, channels=64, out=64, size=(128, 128), kernel=(1, 1))
    case = case_of(op, torch.bfloat16, last="xw")  # 32 MiB, and as many of the result
    op.eager(*case.inputs)
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    part = (torch.cuda.memory_reserved() + 95e6) / total
    with setting(torch.cuda.set_per_process_memory_fraction, part, 1.0):
        path = path_of(lambda: op.call(*case.inputs))
    assert path.startswith("(not cuDNN's fused form: no memory to try it)")
    assert path_of(lambda: op.call(*case.inputs)) == path  # not at once
    for _ in range(64):
        op.call(*case.inputs)
    assert "no memory" not in path_of(lambda: op.call(*case.inputs))


# --- numerics -----------------------------------------------------------------------------------


@needs_tf32
@pytest.mark.parametrize("last", ["", "xw"])
def test_tf32_switch_is_obeyed_in_both_directions(last, monkeypatch):
    op = conv(batch=16, channels=128, out=128, size=(28, 28), padding=(1, 1))
    case = off_zero(op, case_of(op, torch.float32, last=last))
    for on in (False, True, False):
        monkeypatch.setattr(cudnn, "allow_tf32", on)
        ours, eager = errors(op, case), errors(op, case, op.eager)
        for name, error in ours.items():
            if on:
                # cuDNN may know nothing quicker in TF32; eager shows it
                assert error > TF32_LEVEL or eager[name] < TF32_LEVEL, (ours, eager)
            else:
                assert error < 4 * FLOAT32_LEVEL, (ours, eager)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("last", ["", "xw"])
def test_deterministic_mode_and_our_kernels_round_as_eager(last, dtype, monkeypatch):
    """Bit for bit eager's result, which adds and rectifies in two steps; and the same each time."""
    monkeypatch.setattr(cudnn, "deterministic", True)
    for op in (BLOCK, conv(channels=3, out=5, size=(9, 7)), conv(channels=8, out=8)):
        case = case_of(op, dtype, last=last)
        want = F.relu(op.product(case.x, case.w) + case.b.view(-1, 1, 1))
        assert OWN in path_of(lambda c=op, a=case: c.call(*a.inputs))
        assert torch.equal(op.call(*case.inputs), want)
        first = run(op.call, case)
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(run(op.call, case), first))


PLANES = [(1, 1, 1, 1), (2, 3, 1, 5), (3, 64, 7, 7), (5, 17, 31, 33), (1, 2, 600, 640)]
PLANES += [(64, 8, 56, 56), (700, 33, 3, 3), (2, 1000, 2, 4), (300, 1, 16, 16)]


@pytest.mark.parametrize("dtype", [torch.float64, *LOW_DTYPES])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
def test_relu_and_bias_gradient_in_one_pass(offset, last, dtype):
    """Small planes and large, few channels and many, odd sizes, misaligned; every element, the sums
    and their bits."""

    def image(n, c, h, w):
        flat = torch.randn(n * c * h * w + offset, device="cuda").to(dtype)[offset:]
        return flat.view(n, h, w, c).permute(0, 3, 1, 2) if last else flat.view(n, c, h, w)

    memory_format = LAST if last else torch.contiguous_format
    for shape in PLANES:
        grad, output = image(*shape), image(*shape).relu_()
        count = output.numel()
        output.as_strided((count,), (1,))[:: max(count // 7, 1)] = float("nan")
        dz, sums = private(grad, output, True)
        want = torch.where(output <= 0, 0, grad)
        assert torch.equal(dz, want), f"{shape}: dz"
        assert dz.is_contiguous(memory_format=memory_format)
        exact = want.double().sum((0, 2, 3))
        scale = want.double().square().sum((0, 2, 3)).sqrt()
        eps = torch.finfo(dtype).eps
        assert ((sums.double() - exact).abs() <= 4 * eps * (scale + exact.abs())).all(), shape
        for _ in range(3):
            assert torch.equal(private(grad, output, True)[1], sums), f"{shape}: not the same bits"
        alone, nothing = private(grad, output, False)
        assert torch.equal(alone, want) and nothing.shape == (0,)


def test_more_elements_than_32_bits_count():
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of free GPU memory")
    shape = (33, 64, 1024, 1024)  # above 2^31
    for memory_format in (torch.contiguous_format, LAST):
        output = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        output = output.contiguous(memory_format=memory_format)
        output[-1, -1, -1, -8:] = 0
        dz, sums = private(output, output, True)
        assert torch.equal(dz, output)
        assert (sums.double() / (33 * 2**20) - 1).abs().max() < 1e-2
        del dz, output


# --- graphs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tried_before", [True, False])
@pytest.mark.parametrize("last", ["", "xw"])
def test_cuda_graph(last, tried_before):
    """No trial within a capture: the way that needs none is taken there."""
    op = conv(batch=4, channels=16, out=24 + 8 * tried_before, size=(10, 12), padding=(1, 1))
    other = conv(batch=2, channels=16, out=16, size=(10, 12), padding=(1, 1))  # loads the libraries
    case = without_kinks(op, case_of(op, torch.float32, last=last))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(other.call, case_of(other, torch.float32, last=last))
            if tried_before:
                run(op.call, case)
    torch.cuda.current_stream().wait_stream(side)
    (graph, results), report = explained(lambda: captured(lambda: run(op.call, case)))
    assert tried_before or "not tried before the capture" in report.calls[0].path
    fresh = without_kinks(op, case_of(op, torch.float32, last=last, seed=1))
    for static, new in zip((*case.inputs, case.g), (*fresh.inputs, fresh.g), strict=True):
        static.copy_(new)
    graph.replay()
    assert_near(results, run(op.call, fresh), 1e-3)
