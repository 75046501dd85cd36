"""The bits that ReLU keeps with memory='low': our kernels against the formula, bit for bit."""

import pytest
import torch
from helpers import DTYPES, encode_mask, one_thread, policy  # noqa: F401
from layouts import ND_LAYOUTS

import torch_fused_linear as tfl

fused = torch.ops.fused
dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=str)
KERNEL = "own mask kernel"
# Every width of a first row of bits, then around whole bytes, vectors and rows of bits.
WIDTHS = [*range(1, 131), 136, 255, 256, 257, 384, 1000, 1001, 1024, 1025, 3072]
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def formula(output):
    """By torch's rule: where output <= 0 no gradient passes; where it is NaN, it does."""
    return encode_mask(~(output <= 0))


def values(shape, dtype, device):
    """Numbers of both signs, and often one of those that a comparison may get wrong."""
    info = torch.finfo(dtype)
    edges = [0.0, torch.nan, torch.inf, info.max, info.tiny, info.tiny / 4, 1.0]  # subnormal
    edges = torch.tensor(edges, dtype=torch.float64)
    edges = torch.cat([edges, edges.neg()]).to(dtype)
    some = edges[torch.randint(len(edges), shape)]
    return torch.where(torch.rand(shape) < 0.5, some, torch.randn(shape).to(dtype)).to(device)


def assert_is_formula(output, label=""):
    mask, want = fused._relu_mask(output), formula(output)
    assert mask.dtype == torch.uint8 and mask.shape == want.shape and mask.is_contiguous(), label
    assert torch.equal(mask, want), label


@dtype_param
def test_every_width(dtype, device):
    for width in WIDTHS:
        for lead in [(), (1,), (5,), (2, 3)]:
            assert_is_formula(values((*lead, width), dtype, device), f"{lead} x {width}")


@dtype_param
def test_every_kind_of_number(dtype, device):
    """In 16 bits all that there are."""
    integers = INTEGERS[dtype.itemsize]
    if dtype.itemsize == 2:
        patterns = torch.arange(-(2**15), 2**15, dtype=integers)
    else:
        info = torch.iinfo(integers)
        patterns = torch.randint(info.min, info.max, (2**16,), dtype=integers)
    numbers = patterns.view(dtype).to(device)
    assert numbers.isnan().any()
    assert_is_formula(numbers.view(64, 1024))
    assert_is_formula(numbers[:-64].view(64, 1023))


@dtype_param
@pytest.mark.parametrize("layout", ND_LAYOUTS)
def test_any_layout(layout, dtype, device):
    """Around the views is NaN, which would show: its bits are set."""
    for width in (7, 8, 24, 129, 256):
        shapes = [(4, width), (3, 5, width)] if layout != "overlapping" else [(4, width)]
        for shape in shapes:
            output = ND_LAYOUTS[layout](values(shape, dtype, device))
            assert_is_formula(output, f"{shape}")


@dtype_param
def test_starts_of_rows_at_any_address(dtype, device):
    """Vectors of 16 bytes must not be asked for where none can start, nor beyond the end."""
    store = values((40 * 40,), dtype, device)
    for offset in range(17):
        for row in (24, 31, 32, 33):
            assert_is_formula(store.as_strided((9, 24), (row, 1), offset), f"{offset}, {row}")


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 7), (0, 0)])
def test_no_elements(shape, device):
    mask = fused._relu_mask(torch.empty(shape, device=device))
    assert mask.shape == (*shape[:-1], (shape[-1] + 127) // 128 * 16)


@dtype_param
@pytest.mark.parametrize("shape", [(3001, 257), (70_001, 8), (1_000_003,)])
def test_many_elements_on_several_threads(shape, dtype, device):
    output = values(shape, dtype, device)
    torch.set_num_threads(3)
    assert_is_formula(output)
    torch.set_num_threads(1)


def test_more_rows_than_a_grid_has(device):
    """A block has 16 rows here, its threads 4 each, and a grid at most 65535 blocks down."""
    output = torch.randn(65535 * 16 * 4 + 1001, 1).to(device)
    mask = fused._relu_mask(output)
    assert torch.equal(mask[:, :1], (output > 0).to(torch.uint8))
    assert torch.count_nonzero(mask[:, 1:]) == 0


@pytest.mark.cuda
def test_more_elements_than_32_bits_count(cuda):
    output = torch.zeros(2**16 + 3, 2**15 + 8, dtype=torch.bfloat16, device=cuda)
    output[-3:] = values((3, output.shape[1]), torch.bfloat16, cuda)
    mask = fused._relu_mask(output)
    assert torch.equal(mask[-3:], formula(output[-3:]))
    assert torch.count_nonzero(mask[:-3]) == 0


def test_subnormal_numbers_flushed_to_zero():
    """By torch's switch: they are zeros then, but not in fp16, which is compared in fp32."""
    if not torch.set_flush_denormal(True):
        pytest.skip("not on this processor")
    try:
        for dtype in DTYPES:
            output = torch.full((3, 130), torch.finfo(dtype).tiny / 4, dtype=dtype)
            assert_is_formula(output, dtype)
            assert (fused._relu_mask(output).sum() == 0) == (dtype != torch.float16)
    finally:
        torch.set_flush_denormal(False)


@dtype_param
def test_our_kernel_is_what_runs(dtype, device):
    x = torch.randn(6, 8, dtype=dtype, device=device, requires_grad=True)
    w = torch.randn(200, 8, dtype=dtype, device=device)
    with tfl.explain() as report:
        fused._relu_mask(values((6, 200), dtype, device))
        fused.linear_relu(x, w, memory="low")
    rows = [(call.operator, call.shapes, call.path) for call in report.calls]
    assert rows[0] == ("_relu_mask", "[6, 200]", KERNEL)
    assert rows[1][0] == "_linear_relu_bits"
    assert rows[1][2].endswith((KERNEL, "own Hopper kernel"))


@dtype_param
def test_the_formula_where_it_is_asked_for(dtype, device):
    """Under the policy "eager", in torch.func, and of what is traced without data."""
    output = values((6, 200), dtype, device)
    want = formula(output)
    with policy("eager"), torch.inference_mode(), tfl.explain() as report:
        assert torch.equal(fused._relu_mask(output), want)
        transposed = output.t().contiguous().t()
        assert fused._relu_mask(transposed).is_contiguous()
    assert [call.path for call in report.calls] == ["PyTorch's own (not fused)"] * 2
    with policy("eager"):
        assert torch.equal(fused._relu_mask(output), want)
    assert torch.equal(torch.vmap(fused._relu_mask)(output), want)
    assert torch.equal(torch.vmap(fused._relu_mask, in_dims=1)(output.t().contiguous()), want)


@dtype_param
@pytest.mark.parametrize("name", ["auto", "cublaslt", "eager"])
def test_a_layers_bits_are_those_of_its_output(name, dtype, device):
    sizes = [((), 4, 1), ((5,), 7, 129), ((2, 3), 16, 256), ((300,), 64, 64), ((0,), 3, 5)]
    sizes += [((3,), 0, 5), ((3,), 4, 0)]
    for lead, i, o in sizes:
        x, w, b = (values(shape, dtype, device) for shape in [(*lead, i), (o, i), (o,)])
        for bias in (b, None):
            with policy(name):
                y, mask = fused._linear_relu_bits(x, w, bias)
                want = fused.linear_relu(x, w, bias)
            assert torch.equal(mask, formula(y)), f"{lead} x {i} -> {o}"
            assert torch.equal(y.isnan(), want.isnan()) and y.shape == want.shape


def test_has_no_gradient(device):
    output = torch.randn(6, 200, device=device, requires_grad=True)
    assert not fused._relu_mask(output).requires_grad
