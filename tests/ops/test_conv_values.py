"""fused::conv2d_relu: values and gradients against fp64, over shapes, layouts and dtypes."""

from collections import defaultdict

import pytest
import torch
from convolutions import (  # noqa: F401
    LAST,
    LAYOUTS,
    ODD,
    Conv,
    assert_contract,
    full_precision,
    in_double,
    without_kinks,
)
from helpers import (  # noqa: F401
    DTYPES,
    LOW_DTYPES,
    Case,
    Tally,
    device_param,
    names,
    one_thread,
    policy,
    run,
)

odd_param = pytest.mark.parametrize("odd", ODD)
dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])


def layouts_of(conv):
    return [layout for layout in LAYOUTS if conv.batch is not None or layout in ("", "w")]


@device_param
@dtype_param
def test_contract(dtype, device):
    tallies = defaultdict(Tally)
    for odd, conv in ODD.items():
        cases = [
            (f"{odd} {layout!r}, bias {bias}", conv.case(dtype, device, bias, layout))
            for layout in layouts_of(conv)[:: 1 if odd in ("block", "wide", "plain") else 2]
            for bias in (True, False)
        ]
        cases = [(label, without_kinks(conv, case)) for label, case in cases]
        assert_contract(conv, cases, tallies)
    for name, tally in tallies.items():
        tally.check(name)


@device_param
@pytest.mark.parametrize("name", ["cublaslt", "eager"])
def test_contract_under_the_other_policies(name, device):
    with policy(name):
        for dtype in LOW_DTYPES:
            for odd in ("plain", "groups, strided, dilated", "block"):
                conv = ODD[odd]
                case = without_kinks(conv, conv.case(dtype, device, last="xw"))
                assert_contract(conv, [(f"{name} {odd} {dtype}", case)])


@odd_param
def test_small_integers_are_exact(odd):
    """Sums that every dtype holds, in whatever order they are taken: bit for bit the fp64 result,
    forward and backward. (Not so on a GPU, where a Winograd transform rounds.)"""
    conv = ODD[odd]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        like = conv.case(dtype)
        x, w, g = ((t * 10).round().clamp(-1, 1) for t in (like.x, like.w, like.g))
        x, w = x * (torch.rand(x.shape) < 0.5), w * (torch.rand(w.shape) < 0.5)
        case = Case(x, w, (like.b * 3).round() + 0.5, g * (torch.rand(g.shape) < 0.3))
        wide = run(conv.eager, in_double(case))
        for name, mine, want in zip(names(case), run(conv.call, case), wide, strict=True):
            assert torch.equal(want.to(dtype).double(), want), "the data is not exact"
            assert torch.equal(mine.double(), want), f"{dtype} {name}"


@device_param
@dtype_param
@pytest.mark.parametrize("batch, wanted", [(0, True), (0, False)])
def test_empty_batch(batch, wanted, dtype, device):
    conv = Conv(batch=batch, padding=(1, 1))
    for layout in ("", "x", "xw"):
        case = conv.case(dtype, device, last=layout)
        if not wanted:
            assert conv.call(*case.inputs).shape == conv.eager(*case.inputs).shape == (0, 6, 7, 6)
            continue
        y, *grads = run(conv.call, case)
        assert y.shape == (0, 6, 7, 6)
        for grad, leaf in zip(grads, case.inputs, strict=True):
            assert grad.shape == leaf.shape and grad.dtype == dtype and not grad.any()


@device_param
@odd_param
def test_layout_of_the_result(odd, device):
    """Channels-last where image or kernel is, else contiguous: on every device, for every dtype."""
    conv = ODD[odd]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for layout in layouts_of(conv):
            case = conv.case(dtype, device, last=layout.replace("g", ""))
            y = conv.call(*case.inputs)
            last = any(t.dim() == 4 and strictly_last(t) for t in (case.x, case.w))
            want = LAST if last else torch.contiguous_format
            image = y if y.dim() == 4 else y.unsqueeze(0)
            assert image.is_contiguous(memory_format=want), (layout, y.stride())
            torch.testing.assert_close(y, conv.eager(*case.inputs), rtol=2e-2, atol=2e-2)


def strictly_last(t):
    """As torch tells it, for which ambiguous tensors are contiguous."""
    return torch._prims_common.suggest_memory_format(t) == LAST


@device_param
@pytest.mark.parametrize("how", ["sliced", "expanded", "transposed", "flipped"])
def test_strided_inputs(how, device):
    conv = Conv(padding=(1, 1))
    make = {
        "sliced": lambda t: torch.stack([t, t + 1], -1)[..., 0],
        "expanded": lambda t: t[:1].expand(t.shape),
        "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        "flipped": lambda t: t.flip(3),
    }[how]
    case = conv.case(torch.float64, device)
    case = Case(make(case.x), make(case.w), case.b.flip(0), make(case.g))
    before = [t.clone() for t in case.inputs]
    for ours, eager in zip(run(conv.call, case), run(conv.eager, case), strict=True):
        torch.testing.assert_close(ours, eager)
    assert all(torch.equal(a, b) for a, b in zip(case.inputs, before)), "an argument was changed"


@device_param
@dtype_param
@pytest.mark.parametrize("layout", ["", "xw"])
def test_sum_backward(layout, dtype, device):
    """The gradient of a sum has strides of 0."""
    conv = ODD["block"]
    case = without_kinks(conv, conv.case(dtype, device, last=layout))
    ones = torch.ones((), dtype=dtype, device=device).expand(case.g.shape)
    spread = Case(case.x, case.w, case.b, ones)
    dense = Case(case.x, case.w, case.b, ones.contiguous())
    for a, b in zip(run(conv.call, spread), run(conv.call, dense), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


# --- NaN, infinity and zero -------------------------------------------------------------------


@device_param
@dtype_param
@pytest.mark.parametrize("layout", ["", "xw"])
@pytest.mark.parametrize("where", ["x", "w", "b", "g"])
def test_nan_goes_where_it_goes_in_eager(where, layout, dtype, device):
    """In both directions: an output of NaN lets the gradient pass."""
    conv = Conv(channels=8, out=16, padding=(1, 1))
    case = without_kinks(conv, conv.case(dtype, device, last=layout))
    tensor = getattr(case, where)
    tensor[(0,) * tensor.dim()] = float("nan")
    results = zip(names(case), run(conv.call, case), run(conv.eager, case), strict=True)
    for name, ours, eager in results:
        assert torch.equal(ours.isnan(), eager.isnan()), name
        assert not (where == "b" and name == "output") or ours[:, 0].isnan().all()
        torch.testing.assert_close(ours, eager, rtol=3e-2, atol=3e-2, equal_nan=True)
    with torch.no_grad():
        assert torch.equal(conv.call(*case.inputs).isnan(), conv.eager(*case.inputs).isnan())


@device_param
@pytest.mark.parametrize("layout", ["", "xw"])
def test_infinities(layout, device):
    conv = Conv(channels=8, out=16, padding=(1, 1))
    case = conv.case(torch.float32, device, last=layout)
    case.b[0], case.b[1] = float("inf"), float("-inf")
    y = conv.call(*case.inputs)
    assert (y[:, 0] == float("inf")).all() and (y[:, 1] == 0).all()


@device_param
@dtype_param
@pytest.mark.parametrize("layout", ["", "xw"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["auto", "cublaslt", "eager"])
def test_gradient_at_exactly_zero_is_zero(name, bias, layout, dtype, device):
    conv = Conv(padding=(1, 1))
    case = conv.case(dtype, device, bias, layout)
    case.x.zero_()
    if bias:
        case.b.zero_()
    with policy(name):
        for result in run(conv.call, case):
            assert not result.any()


def test_one_channel_between_two_layers():
    """Its strides are ambiguous, and torch's own convolution reads garbage through some of them."""
    torch.manual_seed(0)
    image, first = torch.randn(3, 16, 12, 4), torch.randn(1, 16, 1, 5)
    second, bias = torch.randn(2, 1, 1, 3), torch.randn(2)
    first = first.contiguous(memory_format=torch.channels_last)
    arguments = ((1, 1), (0, 1), (2, 1)), ((1, 2), (0, 1))

    def chain(layer, dtype):
        given = [t.to(dtype) for t in (image, first, second, bias)]
        hidden = layer(given[0], given[1], given[3][:1], *arguments[0])
        return layer(hidden, given[2], given[3], *arguments[1])

    def plain(x, weight, bias, *geometry):
        return torch.relu(torch.nn.functional.conv2d(x, weight, bias, *geometry))

    got = chain(torch.ops.fused.conv2d_relu, torch.float32)
    torch.testing.assert_close(got, chain(plain, torch.float64).float(), rtol=1e-4, atol=1e-4)
