"""Our own products for small networks, taken by force: values, layouts, infinities, capture."""

import itertools

import pytest
import torch
from plan_files import run_forced
from two_layers import (
    ACTIVATIONS,
    Block,
    assert_as_exact,
    assert_near_eagers,
    assert_same_bits_again,
)

import torch_fused_linear as tfl
from torch_fused_linear import plans

pytestmark = pytest.mark.cuda

HALVES = [torch.bfloat16, torch.float16]
KERNEL = "own small kernel"
SIZES = [  # tokens, and the features of three layers
    (1, 64, 72, 64),
    (256, 64, 64, 64),
    (256, 784, 256, 10),
    (300, 17, 33, 9),
    (512, 1024, 1000, 8),
    (77, 8, 24, 100),
]


@pytest.fixture(autouse=True)
def built(cuda):
    """Every size is measured at once."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs tensor cores for bf16")
    with plans.budget(2), plans.patience(0):
        yield
    plans.clear()


def forced(step, folder):
    """What step gives when all its products are done by our small kernels."""
    products = ("fprop", "dgrad", "wgrad")
    return run_forced(step, folder, "small", lambda plan: plan.what in products and not plan.mask)


def assert_all_ours(paths, count, sums=0):
    """A row of a backward has a step for each product, and for each bias summed by itself."""
    steps = [step for path in paths for step in path.split(" + ")]
    assert sorted(steps) == ["own column sum"] * sums + [KERNEL] * count


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_steps_are_as_exact_as_eager(activation, dtype, bias, tmp_path):
    for sizes in SIZES:
        block = Block(*sizes, dtype, activation, bias)
        got, paths = forced(block.step, tmp_path)
        assert_all_ours(paths, 6)
        assert_as_exact(got, block.plain(dtype), block.plain(torch.float64))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_inference_is_as_exact_as_eager(activation, dtype, tmp_path):
    for sizes in SIZES:
        block = Block(*sizes, dtype, activation)
        got, paths = forced(block.inference, tmp_path)
        assert paths == [KERNEL]
        assert_as_exact(got, block.plain(dtype, 1), block.plain(torch.float64, 1))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_single_number(activation, tmp_path):
    """Where eager is exact by luck, ours need not be."""
    for dtype in HALVES:
        block = Block(1, 1, 1, 1, dtype, activation)
        got, paths = forced(block.step, tmp_path)
        assert_all_ours(paths, 6)
        for a, b, c in zip(got, block.plain(dtype), block.plain(torch.float64)):
            ours, theirs = (float((result.double() - c).abs()) for result in (a, b))
            unit = torch.finfo(dtype).eps * max(1.0, float(c.abs()))
            assert ours <= 5.1 * theirs + 2 * unit


@pytest.mark.parametrize("gap, offset", list(itertools.product([0, 3, 8], [0, 1, 8])))
def test_rows_of_any_length_at_any_address(gap, offset, tmp_path):
    block = Block(130, 40, 24, 17, torch.bfloat16, "relu")
    leaves = [block.x, *block.weights]
    for k, leaf in enumerate(leaves):
        rows, cols = leaf.shape
        wide = torch.full((rows * (cols + gap) + offset,), torch.nan, device="cuda").to(leaf.dtype)
        apart = wide[offset:].view(rows, cols + gap)[:, :cols]
        leaves[k] = apart.copy_(leaf.detach()).requires_grad_()
    block.x, *block.weights = leaves
    got, paths = forced(block.step, tmp_path)
    assert_all_ours(paths, 6, sums=int(gap > 0))  # whose weight's gradient is a transpose
    assert_as_exact(got, block.plain(torch.bfloat16), block.plain(torch.float64))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_operands_that_are_copied_first(activation, tmp_path):
    """What waits for a launch that is shared must still be there when it comes."""
    block = Block(130, 40, 24, 16, torch.bfloat16, activation)
    for k, leaf in enumerate(leaves := [block.x, *block.weights]):
        rows, cols = leaf.shape
        wide = torch.zeros(rows, 2 * cols, device="cuda", dtype=leaf.dtype)
        leaves[k] = wide[:, ::2].copy_(leaf.detach()).requires_grad_()
    block.x, *block.weights = leaves
    got, paths = forced(block.step, tmp_path)
    assert_all_ours(paths, 6, sums=1)
    assert_as_exact(got, block.plain(torch.bfloat16), block.plain(torch.float64))
    assert_same_bits_again(block.step, got)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_not_finite_and_exact_zeros(activation, value, tmp_path):
    block = Block(100, 40, 24, 16, torch.bfloat16, activation)
    with torch.no_grad():
        block.x[3, 5] = block.weights[1][2, 1] = value
        block.x[7] = 0
        block.biases[0][4] = 0
    got, _ = forced(block.step, tmp_path)
    assert_near_eagers(got, block)


def test_same_bits_again_in_other_streams_and_captured(tmp_path):
    block = Block(256, 64, 64, 64, torch.bfloat16, "gelu_tanh")
    first, paths = forced(block.step, tmp_path)
    assert_all_ours(paths, 6)
    assert_same_bits_again(block.step, first)


class Deep:
    """Three layers, all of them small, whose input changes in place."""

    def __init__(self, count):
        torch.manual_seed(0)
        self.inputs = torch.randn(count, 256, 64, device="cuda").bfloat16()
        self.x = self.inputs[0].clone().requires_grad_()
        self.grad = torch.randn(256, 64, device="cuda").bfloat16()
        self.weights = [torch.randn(64, 64, device="cuda").bfloat16() / 8 for _ in range(3)]
        self.biases = [torch.randn(64, device="cuda").bfloat16() for _ in range(3)]
        for tensor in (*self.weights, *self.biases):
            tensor.requires_grad_()

    def step(self):
        y = tfl.mlp(self.x, self.weights, self.biases, activation="gelu_tanh")
        leaves = [self.x, *self.weights, *self.biases]
        return [y.detach(), *torch.autograd.grad(y, leaves, self.grad)]

    def results_of(self, run):
        """Of each input, one behind the other, with no wait between them."""
        results = []
        for x in self.inputs:
            with torch.no_grad():
                self.x.copy_(x)
            results.append([t.clone() for t in run()])
        torch.cuda.synchronize()
        return results

    def results_one_by_one(self):
        def run():
            torch.cuda.synchronize()
            results = self.step()
            torch.cuda.synchronize()
            return results

        return self.results_of(run)


def assert_all_equal(got, want):
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for one, other in zip(got, want) for a, b in zip(one, other))


def captured(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def run():
        graph.replay()
        return results

    return run


def test_kernels_that_are_launched_early_read_what_was_just_written(tmp_path):
    deep = Deep(40)
    _, paths = forced(deep.step, tmp_path)
    assert_all_ours(paths, 9)
    want = deep.results_one_by_one()
    assert not torch.equal(want[0][0], want[1][0])
    for _ in range(5):
        assert_all_equal(deep.results_of(deep.step), want)
    assert_all_equal(deep.results_of(captured(deep.step)), want)


def test_a_capture_whose_memory_is_used_again_within_it(tmp_path):
    """Another stream's record keeps memory no longer, with this setting of the allocator's."""
    deep = Deep(10)
    forced(deep.step, tmp_path)
    want = deep.results_one_by_one()
    settings = torch._C._accelerator_setAllocatorSettings
    settings("graph_capture_record_stream_reuse:True")
    try:
        run = captured(lambda: [t for _ in range(3) for t in deep.step()][-8:])
        assert_all_equal(deep.results_of(run), want)
    finally:
        settings("graph_capture_record_stream_reuse:False")


def test_more_tokens_go_another_way(tmp_path):
    block = Block(513, 64, 64, 64, torch.bfloat16, "relu")
    _, paths = forced(block.step, tmp_path)
    assert not any(KERNEL in path for path in paths), paths
