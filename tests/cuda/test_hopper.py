"""Our own products for Hopper GPUs, taken by force: values, layouts, infinities, capture."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import two_layers
from plan_files import run_forced
from steps import encode_mask

import torch_fused_linear as tfl
from torch_fused_linear import plans
from torch_fused_linear.activations import NUMBERS

pytestmark = pytest.mark.cuda

HALVES = [torch.bfloat16, torch.float16]
KERNEL = "own Hopper kernel"
ORDERS = 2
LEAST_TOKENS = 512  # of the kernel for a gated layer's forward


@pytest.fixture(autouse=True)
def built(cuda):
    """Skips where there are none; nothing is known at first, and every size measured at once."""
    plans.clear()
    x = torch.zeros(8192, 64, device="cuda", dtype=torch.bfloat16)
    with plans.budget(0), tfl.explain() as report:
        tfl.linear_gelu(x, x[:64], approximate="none")
    if KERNEL not in report.calls[0].path:
        pytest.skip("no own products for Hopper in this build, or no such GPU")
    with plans.budget(2), plans.patience(0):
        yield
    plans.clear()


def is_ours(plan):
    if plan.what == "chain":
        return "layers"
    is_product = plan.what in ("fprop", "dgrad", "gating", "glu")
    is_gate_of_relu = plan.what in ("gating", "glu") and plan.activation == "relu"
    return is_product and plan.activation != "none" and not plan.mask and not is_gate_of_relu


def forced(step, folder, order=0):
    """The results of step if our own products do all that they can."""
    return run_forced(step, folder, "hopper", is_ours, order)


class GatedBlock(two_layers.Block):
    """A gated layer, in a form, and one after it."""

    def __init__(self, tokens, i, h, o, dtype, activation, form="apart"):
        super().__init__(tokens, i, h, o, dtype, activation, bias=False)
        self.form = form
        up = (torch.randn(h, i, device="cuda") / i**0.5).to(dtype)
        gates = [self.weights[0].detach(), up]
        first = gates if form == "apart" else [torch.cat(gates)]
        self.weights = [*(t.requires_grad_() for t in first), self.weights[1]]

    def fused(self, x, *weights):
        gate, up, down = weights if self.form == "apart" else (weights[0], None, weights[1])
        return tfl.gated_mlp(x, gate, up, down, activation=self.activation)

    def eager(self, x, *weights):
        *first, down = weights
        halves = first if self.form == "apart" else first[0].chunk(2)
        gate, up = (F.linear(x, half) for half in halves)
        return F.linear(two_layers.ACTIVATIONS[self.activation](gate) * up, down)


SIZES = [
    (8, 8, 8, 8),
    (1, 64, 128, 64),
    (129, 136, 264, 72),
    (300, 64, 64, 64),
    (1003, 520, 1032, 136),
    (4097, 256, 384, 128),
]


def cases(make, by_columns):
    """Blocks of several sizes, and every order of a product's tiles; where asked for, with weights
    as Hugging Face's Conv1D stores them, [in, out]."""
    for order in range(ORDERS):
        for sizes in SIZES[2:] if by_columns else SIZES:
            block = make(*sizes)
            if by_columns:
                weights = [w.detach().t().contiguous().t() for w in block.weights]
                block.weights = [w.requires_grad_() for w in weights]
            yield block, order


def assert_laid_out_as_leaves(block, grads):
    for leaf, grad in zip(block.leaves, grads, strict=True):
        assert grad.stride() == leaf.stride()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", two_layers.ACTIVATIONS)
@pytest.mark.parametrize("bias, by_columns", [(True, False), (False, False), (True, True)])
def test_steps_are_as_exact_as_eager(activation, dtype, bias, by_columns, tmp_path):
    make = partial(two_layers.Block, dtype=dtype, activation=activation, bias=bias)
    for block, order in cases(make, by_columns):
        got, paths = forced(block.step, tmp_path, order)
        assert KERNEL in paths[-2] and (activation == "relu" or KERNEL in paths[0]), paths
        two_layers.assert_as_exact(got, block.plain(dtype), block.plain(torch.float64))
        if by_columns:
            assert_laid_out_as_leaves(block, got[1:])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", two_layers.ACTIVATIONS)
def test_inference_is_as_exact_as_eager(activation, dtype, tmp_path):
    for block, order in cases(partial(two_layers.Block, dtype=dtype, activation=activation), False):
        got, paths = forced(block.inference, tmp_path, order)
        assert paths == [KERNEL]
        two_layers.assert_as_exact(got, block.plain(dtype, 1), block.plain(torch.float64, 1))


def of_bits(block):
    """ReLU's output and bits, as a layer of low memory makes them."""
    with torch.no_grad():
        return torch.ops.fused._linear_relu_bits(block.x, block.weights[0], block.biases[0])


def forced_bits(block, folder, order=0):
    takes = lambda plan: plan.what == "fprop" and plan.mask  # noqa: E731
    (y, bits), paths = run_forced(partial(of_bits, block), folder, "hopper", takes, order)
    assert paths == [KERNEL]
    assert torch.equal(bits, encode_mask(~(y <= 0)))
    return y, bits


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_bits_of_relu(bias, dtype, tmp_path):
    make = partial(two_layers.Block, dtype=dtype, activation="relu", bias=bias)
    for block, order in cases(make, False):
        y, _ = forced_bits(block, tmp_path, order)
        two_layers.assert_as_exact([y], block.plain(dtype, 1), block.plain(torch.float64, 1))


def with_values(block, value):
    with torch.no_grad():
        block.x[5] = value
        block.x[7, 3] = value
        block.biases[0].zero_()
    return block


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.0, 1e-7])
def test_bits_of_numbers_that_a_comparison_may_get_wrong(value, dtype, tmp_path):
    block = with_values(two_layers.Block(133, 64, 136, 64, dtype, "relu"), value)
    y, _ = forced_bits(block, tmp_path)
    want = F.relu(F.linear(block.x, block.weights[0], block.biases[0]))
    assert torch.equal(y.isnan(), want.isnan())


def test_bits_of_rows_apart_and_of_many_tokens(tmp_path):
    block = two_layers.Block(70_001, 72, 264, 8, torch.bfloat16, "relu")
    block.x = two_layers.apart(block.x)
    y, bits = forced_bits(block, tmp_path)
    assert bits.shape == (70_001, 48) and y.count_nonzero() > y.numel() // 4
    two_layers.assert_same_bits_again(partial(of_bits, block), [y, bits])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_layer_of_low_memory_has_the_gradients_that_its_output_gives(dtype):
    block = two_layers.Block(8192, 128, 512, 64, dtype, "relu")
    leaves = [block.x, block.weights[0], block.biases[0]]
    grad = torch.randn(8192, 512, device="cuda").to(dtype)
    with plans.budget(0), tfl.explain() as report:
        y = tfl.linear_relu(*leaves, memory="low")
        got = torch.autograd.grad(y, leaves, grad)
    assert report.calls[0].path == KERNEL, "by rule"
    let_through = grad.masked_fill(y <= 0, 0)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.autograd.grad(F.linear(*leaves), leaves, let_through)
    exact = torch.autograd.grad(F.linear(*wide), wide, let_through.double())
    two_layers.assert_as_exact(got, want, exact)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", [name for name in two_layers.ACTIVATIONS if name != "relu"])
@pytest.mark.parametrize("form", ["apart", "stacked"])
@pytest.mark.parametrize("by_columns", [False, True])
def test_steps_of_gated_blocks_are_as_exact_as_eager(by_columns, form, activation, dtype, tmp_path):
    make = partial(GatedBlock, dtype=dtype, activation=activation, form=form)
    for block, order in cases(make, by_columns):
        got, paths = forced(block.step, tmp_path, order)
        assert paths.count(KERNEL) == (2 if len(block.x) >= LEAST_TOKENS else 1), paths
        two_layers.assert_as_exact(got, block.plain(dtype), block.plain(torch.float64))
        if by_columns:
            assert_laid_out_as_leaves(block, got[1:])


def plain_glu(x, weight, bias, activation, form):
    z = F.linear(x, weight, bias)
    gate, up = z.chunk(2, -1)
    h = two_layers.ACTIVATIONS[activation](gate) * up
    return [h, z] if form == "stacked" else [h, gate, up]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", [name for name in two_layers.ACTIVATIONS if name != "relu"])
@pytest.mark.parametrize("form", ["apart", "stacked"])
@pytest.mark.parametrize("bias", [True, False])
def test_gated_layers_are_as_exact_as_eager(bias, form, activation, dtype, tmp_path):
    """Output and, where they are kept, pre-activations; rows of the input apart, at an offset."""
    forward = torch.ops.fused._linear_glu_aux
    sizes = [(512, 8, 8), (513, 136, 72), (640, 64, 128), (1003, 520, 1032), (4097, 256, 200)]
    for number, (tokens, inner, hidden) in enumerate(sizes):
        torch.manual_seed(number)
        x = two_layers.apart(torch.randn(tokens, inner, device="cuda").to(dtype))
        weight = (torch.randn(2 * hidden, inner, device="cuda") / inner**0.5).to(dtype)
        biases = torch.randn(2 * hidden, device="cuda").to(dtype) if bias else None
        both, both_biases = (weight, None), (biases, None)
        if form == "apart":
            both = [half.clone() for half in weight.chunk(2)]
            both_biases = [b.clone() for b in biases.chunk(2)] if bias else (None, None)

        for order, keeps in ((0, True), (1, True), (0, False)):
            args = (x, *both, *both_biases, NUMBERS[activation], keeps)
            got, paths = forced(partial(forward, *args), tmp_path, order)
            assert paths == [KERNEL]
            kept = [t for t in got if t.numel()]
            wide = [None if t is None else t.double() for t in (x, weight, biases)]
            eager, exact = (plain_glu(*t, activation, form) for t in ((x, weight, biases), wide))
            count = len(exact) if keeps else 1
            assert len(kept) == count
            two_layers.assert_as_exact(kept, eager[:count], exact[:count])


@pytest.mark.parametrize("form", ["apart", "stacked"])
def test_a_gated_block_whose_last_layer_is_frozen(form, tmp_path):
    block = GatedBlock(1003, 520, 1032, 136, torch.bfloat16, "silu", form)
    block.weights[-1].requires_grad_(False)
    got, paths = forced(block.step, tmp_path)
    assert paths.count(KERNEL) == 2, paths
    two_layers.assert_as_exact(got, block.plain(torch.bfloat16), block.plain(torch.float64))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_gates_that_are_not_finite(value, tmp_path):
    block = GatedBlock(533, 64, 136, 64, torch.bfloat16, "silu")
    with torch.no_grad():
        block.x[5] = value
        block.grad[9, 3] = value
    got, paths = forced(block.step, tmp_path)
    assert paths.count(KERNEL) == 2, paths
    two_layers.assert_near_eagers(got, block)


@pytest.mark.parametrize("activation", two_layers.ACTIVATIONS)
def test_rows_apart_and_at_offsets(activation, tmp_path):
    block = two_layers.Block(300, 136, 264, 72, torch.bfloat16, activation)
    want = block.plain(torch.float64)
    block.x, block.grad = two_layers.apart(block.x).requires_grad_(), two_layers.apart(block.grad)
    got, paths = forced(block.step, tmp_path)
    assert KERNEL in paths[-2]
    two_layers.assert_as_exact(got, block.plain(torch.bfloat16), want)


@pytest.mark.parametrize("activation", two_layers.ACTIVATIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_nan_infinity_and_exact_zeros(activation, value, tmp_path):
    block = with_values(two_layers.Block(133, 64, 136, 64, torch.bfloat16, activation), value)
    got, _ = forced(block.step, tmp_path)
    two_layers.assert_near_eagers(got, block)
    if value == 0 and activation == "relu":  # whose gradient at exactly 0 is 0
        assert not got[1][5].any()


def test_padding_takes_nothing_of_an_infinite_weight(tmp_path):
    """Tokens beyond the last are zeros in the last tile, and 0 times infinity is NaN."""
    block = two_layers.Block(130, 64, 64, 64, torch.bfloat16, "relu")
    with torch.no_grad():
        block.x.fill_(-1)
        block.weights[0].fill_(1)
        block.biases[0].zero_()  # nothing is let through
        block.weights[1][0, 0] = float("inf")
    got, paths = forced(block.step, tmp_path)
    assert KERNEL in paths[-2]
    assert not got[4].any(), "the first bias's gradient"


@pytest.mark.parametrize("kind", [two_layers.Block, GatedBlock])
def test_same_bits_again_in_other_streams_and_captured(kind, tmp_path):
    block = kind(1003, 520, 1032, 136, torch.bfloat16, "gelu_erf")
    first, _ = forced(block.step, tmp_path)
    two_layers.assert_same_bits_again(block.step, first)


def test_more_than_two_to_the_31_elements(tmp_path):
    if torch.cuda.mem_get_info()[0] < 40e9:  # other tests may hold the rest
        pytest.skip("needs 40 GB")
    few, many, h = 2048, 140 * 1024, 16384
    small = two_layers.Block(few, 64, h, 64, torch.bfloat16, "gelu_erf")
    forced(small.step, tmp_path)
    with torch.no_grad():
        block = two_layers.Block(1, 64, h, 64, torch.bfloat16, "gelu_erf")
        block.weights, block.biases = small.weights, small.biases
        block.x = small.x.detach().repeat(many // few, 1).requires_grad_()
        block.grad = small.grad.repeat(many // few, 1)
    assert many * h > 2**31
    with plans.budget(0), tfl.explain() as report:
        y, grad_x, *_ = block.step()
    assert KERNEL in report.calls[-2].path
    want_y, want_x, *_ = small.step()
    for start in (0, many - few, many // 2):
        # The second layer's own products may be done in another way.
        torch.testing.assert_close(y[start : start + few], want_y, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(grad_x[start : start + few], want_x, rtol=2e-2, atol=2e-2)


def test_bits_of_more_than_two_to_the_31_elements(tmp_path):
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB")
    few, many, h = 2048, 140 * 1024, 16384
    small = two_layers.Block(few, 64, h, 64, torch.bfloat16, "relu")
    want_y, want_bits = forced_bits(small, tmp_path)
    assert many * h > 2**31
    operands = small.x.repeat(many // few, 1), small.weights[0], small.biases[0]
    with torch.no_grad(), plans.budget(0), tfl.explain() as report:
        y, bits = torch.ops.fused._linear_relu_bits(*operands)
    assert KERNEL in report.calls[-1].path
    for start in range(0, many, few):
        assert torch.equal(y[start : start + few], want_y)
        assert torch.equal(bits[start : start + few], want_bits)
