"""On a GPU: streams, CUDA graphs, no host synchronisation, threads, memory, kernels."""

import gc
import itertools
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import captured, setting
from numerics import assert_bits, in_double, run
from operators import GELU_ERF, GELU_TANH, LINEAR, OPS, RELU, Case, op_param, policy_param
from steps import encode_mask

import torch_fused_linear as tfl
from torch_fused_linear import plans
from torch_fused_linear.activations import NUMBERS

pytestmark = pytest.mark.cuda
HALF_SECOND = 1_000_000_000  # cycles, at the 1 to 2 GHz of a GPU


def bf16_case(t=129, i=64, o=257, seed=0, bias=True) -> Case:
    return LINEAR.case(t, i, o, torch.bfloat16, "cuda", bias, seed)


# --- streams and graphs -------------------------------------------------------------------------


@op_param
@policy_param
def test_everything_runs_on_the_current_stream(policy, op):
    """The default stream is kept busy: work launched there would not be done in time, and work
    that reads its input too early would see NaN."""
    with tfl.set_policy(policy):
        case = bf16_case()
        want = run(op.call, case)
        torch.cuda.synchronize()
        side, busy = torch.cuda.Stream(), torch.cuda.Event()
        late = torch.full_like(case.x, float("nan"))
        with torch.cuda.stream(side):
            run(op.call, case)  # brings the stream's memory and workspace: asking waits for all
        torch.cuda.synchronize()
        torch.cuda._sleep(HALF_SECOND)
        busy.record()
        with torch.cuda.stream(side):
            torch.cuda._sleep(HALF_SECOND // 10)
            late.copy_(case.x)
            got = run(op.call, Case.of(late, case.w, case.b, case.g))
        side.synchronize()
        assert not busy.query(), "something waited for the default stream"
        with torch.cuda.stream(side):
            assert_bits(got, want)
        torch.cuda.synchronize()


def capture(op, case):
    """A graph of one forward and backward, its results and its inputs."""
    static = case.map(torch.clone)
    return *captured(lambda: run(op.call, static)), static


def warm_up(op, case):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(op.call, case)
        # cuBLAS is for each thread, and not set up within a capture, where a new problem is ATen's.
        run(LINEAR.eager, bf16_case())
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


@op_param
@policy_param
@pytest.mark.parametrize("known", [True, False], ids=["seen before", "first met in capture"])
def test_cuda_graph_of_forward_and_backward(known, policy, op):
    """Replayed on new data: what is computed, and not what was computed at capture."""
    with tfl.set_policy(policy):
        case = bf16_case(*((128, 64, 264) if known else (96 + 8 * len(policy), 72, 520)))
        warm_up(op, case if known else bf16_case())
        graph, results, case = capture(op, case)
        for seed in (1, 2):
            fresh = bf16_case(*case.x.shape, case.w.shape[0], seed=seed)
            for old, new in zip((*case.inputs, case.g), (*fresh.inputs, fresh.g), strict=True):
                old.copy_(new)
            graph.replay()
            first = [t.clone() for t in results]
            for got, want in zip(first, run(op.call, fresh), strict=True):
                size = float(want.abs().max())
                torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * size)
            graph.replay()
            assert_bits(results, first, "second replay:")


def test_two_graphs_of_which_one_goes():
    """A workspace that belongs to the first graph must not be what the second replays with."""
    case = bf16_case(128, 64, 264)
    warm_up(GELU_TANH, case)
    first, (second, results, _) = capture(GELU_TANH, case), capture(GELU_TANH, case)
    second.replay()
    want = [t.clone() for t in results]
    del first
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    second.replay()
    assert_bits(results, want)
    del junk


@op_param
@policy_param
def test_no_host_synchronisation(policy, op):
    with tfl.set_policy(policy):
        cases = [bf16_case(), bf16_case(5, 7, 9), LINEAR.case(33, 8, 16, torch.float32, "cuda")]
        for case in cases:
            run(op.call, case)  # choosing how to do a new shape may take its time
        with setting(torch.cuda.set_sync_debug_mode, "error", "default"):
            for case in cases:
                run(op.call, case)
                with torch.no_grad():
                    op.call(*case.inputs)


@policy_param
def test_eight_threads_with_other_shapes_equal_serial_bits(policy):
    """One cache of algorithms, one handle and one workspace per thread or none shared."""
    with tfl.set_policy(policy):
        shapes = [(t, i, o) for t, i, o in itertools.product((3, 64, 129), (8, 96), (7, 128, 264))]
        jobs = [(op, bf16_case(*s)) for s in shapes for op in OPS]
        want = [run(op.call, case) for op, case in jobs]
        torch.cuda.synchronize()

        def work(k):
            with torch.cuda.stream(torch.cuda.Stream()):
                mine = [(n, run(jobs[n][0].call, jobs[n][1])) for n in range(k, len(jobs), 8)] * 2
                torch.cuda.current_stream().synchronize()
            return mine

        with ThreadPoolExecutor(8) as pool:
            for mine in pool.map(work, range(8)):
                for n, got in mine:
                    assert_bits(got, want[n], f"{jobs[n][0]!r} {jobs[n][1].x.shape}")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@op_param
def test_device_of_the_tensors_and_not_the_current_one(op):
    case = bf16_case()
    want = run(op.call, case)
    there = case.map(lambda t: t.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    got = run(op.call, there)
    assert all(t.device == torch.device("cuda:1") for t in got)
    assert_bits([t.to("cuda:0") for t in got], want)
    with pytest.raises((RuntimeError, ValueError), match=rf"{op.name}.*cuda:1"):
        op.call(case.x, there.w)


# --- memory ---------------------------------------------------------------------------------------


def blocks(size):
    """The bytes that the caching allocator takes for so many."""
    return -(-size // 512) * 512


@op_param
@policy_param
def test_memory_held_after_a_forward(policy, op):
    """Inference leaves the output and nothing else; training what the backward needs."""
    case = bf16_case(4096, 256, 512)
    output = blocks(4096 * 512 * 2)

    def held(*inputs):
        gc.collect()
        before = torch.cuda.memory_allocated()
        y = op.call(*inputs)
        after = torch.cuda.memory_allocated()
        del y
        return after - before

    with tfl.set_policy(policy):
        run(op.call, case)  # handles and workspaces that stay come once
        time.sleep(0.1)  # the engine's thread lets go of its last task a moment after the call
        with torch.no_grad():
            assert held(*case.inputs) == output
        w = case.w.clone().requires_grad_()
        bits = blocks(4096 * 512 // 8) if policy == "cublaslt" else 0
        saved = {"none": 0, "relu": bits}.get(op.activation, output)
        assert held(case.x, w, case.b) <= output + saved


CANARY = 0x5A


@pytest.mark.parametrize("o", [1, 2, 3, 7, 129, 264, 479, 785])
@pytest.mark.parametrize("op", [RELU, GELU_TANH, GELU_ERF], ids=repr)
def test_buffers_are_not_overrun(op, o):
    """Blocks full of a pattern lie between the places where results will go. With 256 rows all
    sizes are whole allocator blocks, so that one byte too many hits a neighbour."""
    case = bf16_case(256, 64, o)
    aux, options = torch.ops.fused._linear_aux, {"activation": NUMBERS[op.activation]}
    width = (o + 127) // 128 * 16 if op is RELU else 2 * ((o + 7) // 8 * 8)
    for policy in ("auto", "cublaslt"):
        with tfl.set_policy(policy):
            aux(*case.inputs, **options)  # so that no workspace is made later
        torch.cuda.empty_cache()
        rooms = [
            torch.full((256 * n,), CANARY, dtype=torch.uint8, device="cuda")
            for n in (2 * o, width)
            for _ in range(32)
        ]
        guards, rooms = rooms[::2], None
        with tfl.set_policy(policy):
            kept = [aux(*case.inputs, **options) for _ in range(8)]
        assert all(bool((g == CANARY).all()) for g in guards), "a neighbour was written to"
        for y, saved in kept:
            assert torch.equal(y, kept[0][0]) and torch.equal(saved, kept[0][1])
            if op is RELU:
                z, zero = LINEAR.eager(*in_double(case).inputs), torch.zeros_like(saved)
                far, bits = z.abs() > 1e-2, encode_mask(z >= 0)
                known = encode_mask(far)
                assert torch.equal(saved & known, bits & known)
                pads = ~encode_mask(torch.ones_like(far))
                assert torch.equal(saved & pads, zero), "pad bits are not 0"
            else:
                row = saved.stride(0)
                pads = saved.as_strided((256, row), (row, 1)).view(torch.uint8)[:, 2 * o :]
                assert bool(((pads == 0) | (pads == CANARY)).all()), "padding was written to"


# --- kernels --------------------------------------------------------------------------------------


def kernels(fn):
    """The names of the GPU kernels that fn launches."""
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        fn()
        torch.cuda.synchronize()
    found = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not found:
        pytest.skip("the profiler sees no kernels on this machine")
    return [name for name in found if not re.search("Memset|Memcpy|memset|memcpy", name)]


@pytest.mark.parametrize("op, count", [(LINEAR, 1), (RELU, 1), (GELU_TANH, 1), (GELU_ERF, 2)])
def test_inference_is_one_kernel(op, count):
    """Fused means fused: bias and activation happen in the product's kernel. erf, which cuBLASLt
    has not, takes one more."""
    case = bf16_case(4096, 512, 1024)
    with tfl.set_policy("cublaslt"), torch.no_grad():
        names = kernels(lambda: op.call(*case.inputs))
    assert len(names) == count, names


@pytest.mark.parametrize("cols", [1000, 1001])
def test_bits_of_relu_are_one_kernel(cols):
    output = torch.randn(512, cols, dtype=torch.bfloat16, device="cuda")
    names = kernels(lambda: torch.ops.fused._relu_mask(output))
    assert len(names) == 1 and "relu_mask" in names[0], names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [256, 300, 8192])
@pytest.mark.parametrize("cols", [10, 256, 1000])
def test_gradient_of_activation_and_bias_is_one_kernel_where_blocks_can_join(cols, rows, dtype):
    """A cluster adds up few chunks of the rows; many take a second kernel."""
    # Integers, whose sums are exact.
    options = {"generator": torch.Generator("cuda").manual_seed(0), "device": "cuda"}
    grad, output = torch.randint(-8, 9, (2, rows, cols), **options).to(dtype).unbind()

    def call():
        with plans.budget(0):  # by rule: the own kernel, where timing might prefer ATen's three
            return torch.ops.fused._activation_backward(grad, output, NUMBERS["relu"], True)

    dz, grad_bias = call()
    want = grad.masked_fill(output <= 0, 0)
    assert torch.equal(dz, want)
    assert torch.equal(grad_bias, want.double().sum(0).to(dtype))
    if torch.cuda.get_device_capability() >= (9, 0):
        assert len(kernels(call)) == (2 if rows == 8192 else 1)


@op_param
def test_unwanted_gradients_launch_nothing(op):
    """A frozen weight runs no weight-gradient product, a first layer no input-gradient one."""
    case = bf16_case(4096, 512, 1024)

    def launched(wanted):
        leaves = [t.clone().requires_grad_(r) for t, r in zip(case.inputs, wanted, strict=True)]
        y = op.call(*leaves)
        chosen = [t for t in leaves if t.requires_grad]
        return len(kernels(lambda: torch.autograd.grad(y, chosen, case.g, retain_graph=True)))

    everything = launched((True, True, True))
    assert launched((True, False, False)) < everything
    assert launched((False, True, False)) < everything
    assert launched((False, False, True)) < launched((True, False, True))


@pytest.mark.parametrize("op", OPS, ids=repr)
def test_a_column_major_gradient(op):
    """A contiguous copy of it has the size of the results: it must live as long as it is read."""
    case = LINEAR.case(1024, 1024, 1024, torch.bfloat16, "cuda")
    leaves = [t.detach().requires_grad_() for t in case.inputs]
    y = op.call(*leaves)
    for _ in range(3):
        want = torch.autograd.grad(y, leaves, case.g, retain_graph=True)
        got = torch.autograd.grad(y, leaves, case.g.t().contiguous().t(), retain_graph=True)
        assert all(map(torch.equal, got, want))
