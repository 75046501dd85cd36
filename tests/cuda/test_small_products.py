"""Our own products for small networks, taken by force: values, layouts, infinities, capture."""

import itertools

import pytest
import torch
import two_layers
from helpers import captured, setting
from numerics import assert_bits
from plan_files import run_forced

import torch_fused_linear as tfl
from torch_fused_linear import plans

pytestmark = pytest.mark.cuda

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOTH_KINDS = DTYPES[:2]  # single multiplications, tensor cores
KERNEL = "own small kernel"
OF_ALL_LAYERS = KERNEL + " of all layers"
OF_ALL_MEMBERS = KERNEL + " of all members"
SIZES = [  # tokens, and the features of three layers
    (1, 64, 72, 64),
    (256, 64, 64, 64),
    (256, 784, 256, 10),
    (300, 17, 33, 9),
    (512, 1024, 1000, 8),
    (77, 8, 24, 100),
]
# Without a bias eager multiplies a single row by a kernel that is more exact than ours, which
# trials then refuse.
SIZES_WITH = {True: SIZES, False: SIZES[1:]}  # a bias


@pytest.fixture(autouse=True)
def built(cuda):
    """Every size is measured at once."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs tensor cores for bf16")
    with plans.budget(2), plans.patience(0):
        yield
    plans.clear()


def forced(step, folder, chains="layers"):
    """The results of step if our small kernels do all its products, layers in a chain one by
    one, or in one launch."""

    def takes(plan):
        if plan.what == "chain":
            return chains
        return plan.what in ("fprop", "dgrad", "wgrad") and not plan.mask

    return run_forced(step, folder, "small", takes)


def assert_all_ours(paths, count, sums=0, chains=0):
    """A row of a backward has a step for each product, and for each bias summed by itself."""
    steps = [step for path in paths for step in path.split(" + ")]
    want = ["own column sum"] * sums + [KERNEL] * count + [OF_ALL_LAYERS] * chains
    assert sorted(steps) == want


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", two_layers.ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chains", ["layers", "small"])
def test_steps_are_as_exact_as_eager(chains, activation, dtype, bias, tmp_path):
    products, in_one = (4, 1) if chains == "small" else (6, 0)
    for sizes in SIZES_WITH[bias]:
        block = two_layers.Block(*sizes, dtype, activation, bias)
        got, paths = forced(block.step, tmp_path, chains)
        assert_all_ours(paths, products, chains=in_one)
        two_layers.assert_as_exact(got, block.plain(dtype), block.plain(torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", two_layers.ACTIVATIONS)
def test_inference_is_as_exact_as_eager(activation, dtype, tmp_path):
    for sizes in SIZES:
        block = two_layers.Block(*sizes, dtype, activation)
        got, paths = forced(block.inference, tmp_path)
        assert paths == [KERNEL]
        two_layers.assert_as_exact(got, block.plain(dtype, 1), block.plain(torch.float64, 1))


@pytest.mark.parametrize("activation", two_layers.ACTIVATIONS)
def test_a_single_number(activation, tmp_path):
    """Where eager is exact by luck, ours need not be."""
    for dtype in DTYPES:
        block = two_layers.Block(1, 1, 1, 1, dtype, activation)
        got, paths = forced(block.step, tmp_path)
        assert_all_ours(paths, 6)
        for a, b, c in zip(got, block.plain(dtype), block.plain(torch.float64)):
            ours, theirs = (float((result.double() - c).abs()) for result in (a, b))
            unit = torch.finfo(dtype).eps * max(1.0, float(c.abs()))
            assert ours <= 5.1 * theirs + 2 * unit


@pytest.mark.parametrize("dtype", BOTH_KINDS, ids=str)
@pytest.mark.parametrize("gap, offset", list(itertools.product([0, 3, 8], [0, 1, 8])))
def test_rows_of_any_length_at_any_address(gap, offset, dtype, tmp_path):
    block = two_layers.Block(130, 40, 24, 17, dtype, "relu")
    block.place(lambda t: two_layers.apart(t, gap, offset))
    got, paths = forced(block.step, tmp_path)
    assert_all_ours(paths, 6, sums=int(gap > 0))  # whose weight's gradient is a transpose
    two_layers.assert_as_exact(got, block.plain(dtype), block.plain(torch.float64))


@pytest.mark.parametrize("activation", two_layers.ACTIVATIONS)
def test_operands_that_are_copied_first(activation, tmp_path):
    """Operands of a deferred product must live until the shared launch."""
    block = two_layers.Block(130, 40, 24, 16, torch.bfloat16, activation)
    block.place(lambda t: torch.stack([t, torch.zeros_like(t)], -1)[..., 0])
    got, paths = forced(block.step, tmp_path)
    assert_all_ours(paths, 6, sums=1)
    two_layers.assert_as_exact(got, block.plain(torch.bfloat16), block.plain(torch.float64))
    two_layers.assert_same_bits_again(block.step, got)


@pytest.mark.parametrize("dtype", BOTH_KINDS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("activation", two_layers.ACTIVATIONS)
def test_nan_infinity_and_exact_zeros(activation, value, dtype, tmp_path):
    block = two_layers.Block(100, 40, 24, 16, dtype, activation)
    with torch.no_grad():
        block.x[3, 5] = block.weights[1][2, 1] = value
        block.x[7] = 0
        block.biases[0][4] = 0
    got, _ = forced(block.step, tmp_path)
    two_layers.assert_near_eagers(got, block)


@pytest.mark.parametrize("dtype", BOTH_KINDS, ids=str)
def test_same_bits_again_in_other_streams_and_captured(dtype, tmp_path):
    block = two_layers.Block(256, 64, 64, 64, dtype, "gelu_tanh")
    first, paths = forced(block.step, tmp_path)
    assert_all_ours(paths, 6)
    two_layers.assert_same_bits_again(block.step, first)


class Deep(two_layers.Block):
    """Small layers, three if no other sizes are given, whose input changes in place."""

    def __init__(self, count, dtype, tokens=256, sizes=(64, 64, 64, 64)):
        torch.manual_seed(0)
        self.activation = "gelu_tanh"

        def draw(*sizes):
            return torch.randn(*sizes, device="cuda").to(dtype)

        self.inputs = draw(count, tokens, sizes[0])
        self.x = self.inputs[0].clone().requires_grad_()
        self.grad = draw(tokens, sizes[-1])
        self.weights = [draw(o, i) / i**0.5 for i, o in itertools.pairwise(sizes)]
        self.biases = [draw(size) for size in sizes[1:]]
        for tensor in (*self.weights, *self.biases):
            tensor.requires_grad_()

    def results_of(self, run):
        """Runs each input, one after the other, with no wait between them."""
        results = []
        for x in self.inputs:
            with torch.no_grad():
                self.x.copy_(x)
            results += [t.clone() for t in run()]
        torch.cuda.synchronize()
        return results

    def results_of_replays(self, step):
        graph, results = captured(step)
        return self.results_of(lambda: graph.replay() or results)

    def results_one_by_one(self):
        def run():
            torch.cuda.synchronize()
            results = self.step()
            torch.cuda.synchronize()
            return results

        return self.results_of(run)


@pytest.mark.parametrize("dtype", BOTH_KINDS, ids=str)
@pytest.mark.parametrize("chains", ["layers", "small"])
def test_kernels_that_are_launched_early_read_what_was_just_written(chains, dtype, tmp_path):
    deep = Deep(40, dtype)
    _, paths = forced(deep.step, tmp_path, chains)
    assert_all_ours(paths, 6 + 3 * (chains == "layers"), chains=int(chains == "small"))
    want = deep.results_one_by_one()
    assert not torch.equal(want[0], want[len(want) // 40])
    for _ in range(5):
        assert_bits(deep.results_of(deep.step), want)
    assert_bits(deep.results_of_replays(deep.step), want)


def test_a_capture_whose_memory_is_used_again_within_it(tmp_path):
    """Another stream's record keeps memory no longer, with this setting of the allocator's."""
    deep = Deep(10, torch.float32)
    forced(deep.step, tmp_path)
    want = deep.results_one_by_one()
    name = "graph_capture_record_stream_reuse"
    with setting(torch._C._accelerator_setAllocatorSettings, f"{name}:True", f"{name}:False"):
        step = lambda: [t for _ in range(3) for t in deep.step()][-8:]  # noqa: E731
        assert_bits(deep.results_of_replays(step), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(64, 17, 256, 256, 6), (1, 4, 64, 64, 64, 2), (512, 256, 256, 1)]
)
def test_networks_in_one_launch(sizes, dtype, tmp_path):
    deep = Deep(4, dtype, sizes[0], sizes[1:])
    with torch.no_grad():
        outputs, paths = forced(lambda: [deep.fused(*deep.leaves)], tmp_path, chains="small")
    assert paths == [OF_ALL_LAYERS]
    results, paths = forced(deep.step, tmp_path, chains="small")
    assert_all_ours(paths, 2 * len(deep.weights), chains=1)
    assert torch.equal(results[0], outputs[0])
    two_layers.assert_same_bits_again(deep.step, results)
    one_by_one, _ = forced(deep.step, tmp_path)
    # As bytes: 0 is not -0.
    in_bytes = ([t.contiguous().view(torch.uint8) for t in r] for r in (results, one_by_one))
    assert_bits(*in_bytes)


def test_a_network_in_one_launch_is_measured():
    Deep(1, torch.float32).step()
    (line,) = [line for line in plans.show().splitlines() if line.startswith("chain")]
    assert "256x64x64x64x64: " in line and "eager" in line


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", two_layers.ACTIVATIONS)
def test_members_of_an_ensemble_share_launches(activation, dtype, shared, tmp_path):
    torch.manual_seed(0)
    sizes = [(2, 256, 64, 64, 64), (10, 77, 23, 256, 1), (3, 512, 9, 40, 7)]
    for members, tokens, i, h, o in sizes:

        def draw(*sizes):
            return torch.randn(sizes, device="cuda").to(dtype).requires_grad_()

        x = draw(tokens, i) if shared else draw(members, tokens, i)
        layers = [draw(members, h, i), draw(members, h), draw(members, o, h), draw(members, o)]
        grad = draw(members, tokens, o).detach()

        def network(x, w, b, v, c):
            return tfl.mlp(x, [w, v], [b, c], activation=activation)

        def step(x=x, layers=layers, grad=grad):
            y = torch.func.vmap(network, (None if shared else 0, 0, 0, 0, 0))(x, *layers)
            return [y.detach(), *torch.autograd.grad(y, [x, *layers], grad)]

        def of_torch(dtype, x=x, layers=layers, grad=grad):
            x, w, b, v, c = (t.detach().to(dtype).requires_grad_() for t in (x, *layers))
            hidden = torch.baddbmm(b[:, None], x.expand(len(w), -1, -1), w.mT)
            y = torch.baddbmm(c[:, None], two_layers.ACTIVATIONS[activation](hidden), v.mT)
            return [y.detach(), *torch.autograd.grad(y, [x, w, b, v, c], grad.to(dtype))]

        got, paths = forced(step, tmp_path)
        ours = [path for path in paths if path]
        assert ours == [OF_ALL_MEMBERS] * 3 + ["own one-pass kernel + " + OF_ALL_MEMBERS]
        two_layers.assert_as_exact(got, of_torch(dtype), of_torch(torch.float64))
        two_layers.assert_same_bits_again(step, got)


def test_members_that_fill_the_gpu_go_another_way():
    """There torch.bmm is faster."""
    x, w = (torch.randn(200, n, 64, device="cuda", requires_grad=True) for n in (256, 64))
    with tfl.explain() as report:
        torch.func.vmap(tfl.linear_relu)(x, w).sum().backward()
    assert report.calls and not any(KERNEL in call.path for call in report.calls)


@pytest.mark.parametrize("tokens, dtype", [(256, torch.float64), (513, torch.bfloat16)], ids=str)
def test_fp64_and_more_tokens_go_another_way(tokens, dtype, tmp_path):
    _, paths = forced(two_layers.Block(tokens, 64, 64, 64, dtype, "relu").step, tmp_path)
    assert not any(KERNEL in path for path in paths), paths
