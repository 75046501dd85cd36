"""The operators under the public ones: what is saved, and the backward steps."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DTYPES,
    ERRORS,
    GELU_ERF,
    GELU_TANH,
    LINEAR,
    RELU,
    RELU2,
    SILU,
    decode_mask,
    device_param,
    encode_mask,
    exact_case,
    in_double,
    one_thread,  # noqa: F401
    plain,
    preactivation,
    random_case,
    rows,
    run,
    without_kinks,
)
from layouts import ND_LAYOUTS

fused = torch.ops.fused
dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
WIDTHS = [1, 2, 3, 7, 8, 64, 127, 128, 129, 257, 479, 785]
KEPT = {op.activation: op for op in (GELU_TANH, GELU_ERF, SILU, RELU2)}  # the pre-activation


def saved_for(activation, z):
    """Every form in which a layer may have saved what its activation's derivative needs."""
    if activation == "none":
        return []
    if activation == "relu":
        return [F.relu(z), encode_mask(z >= 0)]
    padded = torch.nn.functional.pad(z, (0, -z.shape[-1] % 8))[..., : z.shape[-1]]
    return [z, padded]


def aux_of(activation):
    return lambda x, w, b=None: fused._linear_aux(x, w, b, activation)


def true_dz(activation, z, g):
    z, g = z.detach().double().clone().requires_grad_(), g.double()
    act = {"none": lambda t: t * 1, "relu": F.relu, **{n: op.act for n, op in KEPT.items()}}
    return torch.autograd.grad(act[activation](z), z, g)[0]


@device_param
@dtype_param
def test_relu_mask_bit_for_bit(dtype, device):
    """Bit o & 7 of byte o >> 3, set where z >= 0 (zeros occur: there is no bias), padding 0."""
    for o, lead, bias in itertools.product(WIDTHS, [(), (5,), (2, 3)], [True, False]):
        case = exact_case(lead, 6, o, dtype, device, bias)
        y, mask = aux_of("relu")(*case.inputs)
        z = preactivation(case)
        assert torch.equal(y.double(), z.relu()) and y.dtype == dtype
        assert mask.dtype == torch.uint8 and mask.shape == (*lead, (o + 127) // 128 * 16)
        assert torch.equal(decode_mask(mask, o), z >= 0)
        assert torch.equal(mask, encode_mask(z >= 0)), "pad bits are not 0"


@device_param
@dtype_param
@pytest.mark.parametrize("activation", KEPT)
def test_preactivation(activation, dtype, device):
    op = KEPT[activation]
    for o, lead, bias in itertools.product(WIDTHS, [(), (5,), (2, 3)], [True, False]):
        case = exact_case(lead, 6, o, dtype, device, bias)
        y, z = aux_of(activation)(*case.inputs)
        assert torch.equal(z.double(), preactivation(case)) and z.dtype == dtype
        assert z.shape == y.shape == (*lead, o) and z.stride(-1) == 1
        if len(lead) and o > 1:
            assert z.stride(-2) == (o + 7) // 8 * 8, "rows are padded to 8 elements"
        torch.testing.assert_close(y.double(), op.act(z.double()), rtol=1e-2, atol=1e-2)


@device_param
def test_aux_of_empty_shapes(device):
    for t, i, o in [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0), (3, 0, 0)]:
        case = random_case(t, i, o, torch.float32, device)
        y, mask = aux_of("relu")(*case.inputs)
        assert y.shape == (t, o) and mask.shape == (t, (o + 127) // 128 * 16)
        assert torch.equal(mask, encode_mask(preactivation(case) >= 0))
        y, z = aux_of("gelu_tanh")(*case.inputs)
        assert y.shape == z.shape == (t, o)
        assert torch.equal(z, case.b.expand(t, o) if i == 0 else z)


@device_param
@dtype_param
@pytest.mark.parametrize("activation", ["none", "relu", *KEPT])
def test_activation_backward(activation, dtype, device):
    eps = torch.finfo(dtype).eps
    atol = 1e-14 if dtype == torch.float64 else max(4 * eps, 1e-5)
    for o, lead in itertools.product(WIDTHS, [(), (1,), (33,), (2, 3), (257,)]):
        case = random_case(lead, 3, o, dtype, device, seed=o)
        z = preactivation(case).to(dtype)
        z = z.masked_fill(z == 0, 1)  # there the two saved forms of ReLU differ, as they say
        # 'none' reads nothing from saved: any tensor will do
        for saved in saved_for(activation, z) or [z]:
            dz, db = fused._activation_backward(case.g, saved, activation, True)
            want = true_dz(activation, z, case.g)
            assert dz.dtype == db.dtype == dtype and dz.shape == z.shape and db.shape == (o,)
            torch.testing.assert_close(dz.double(), want, rtol=4 * eps, atol=atol)
            # the bias gradient sums dz in fp32 or better, not in the dtype
            total, spread = rows(want).sum(0), float(rows(want).abs().sum(0).max())
            tolerance = 2 * eps * (1 + float(total.abs().max()) + spread / len(rows(z)) ** 0.5)
            torch.testing.assert_close(db.double(), total, rtol=2 * eps, atol=tolerance)
            again, none = fused._activation_backward(case.g, saved, activation, False)
            torch.testing.assert_close(again.double(), want, rtol=4 * eps, atol=atol)
            assert none.numel() == 0 and none.dtype == dtype


@device_param
@pytest.mark.parametrize("activation", ["none", "relu", *KEPT])
def test_activation_backward_takes_any_layout(activation, device):
    for dtype, lead in [(torch.float32, (4, 3)), (torch.bfloat16, (12,)), (torch.float64, (12,))]:
        case = random_case(lead, 3, 24, dtype, device)
        z = preactivation(case).to(dtype)
        for name, layout in ND_LAYOUTS.items():
            g = layout(case.g)
            for saved in saved_for(activation, z) or [z]:
                want = fused._activation_backward(g.contiguous(), saved, activation, True)
                got = fused._activation_backward(g, saved, activation, True)
                for a, b in zip(got, want):
                    torch.testing.assert_close(a, b, msg=f"grad_output {name}")
        for name in ("transposed", "row_strided", "column_strided", "offset", "outer_swapped"):
            saved = [s for s in saved_for(activation, z) if s.dtype == dtype] or [z]
            want = fused._activation_backward(case.g, saved[0], activation, True)
            got = fused._activation_backward(case.g, ND_LAYOUTS[name](saved[0]), activation, True)
            for a, b in zip(got, want):
                torch.testing.assert_close(a, b, msg=f"saved {name}")


@device_param
def test_mask_and_output_differ_only_at_zero(device):
    """The stated difference: the mask's gradient at exactly 0 is 1, the output's is torch's 0."""
    z = torch.tensor([[-1.0, -0.0, 0.0, 1.0]], device=device)
    g = torch.full_like(z, 3.0)
    by_output = fused._activation_backward(g, F.relu(z), "relu", True)[0]
    by_mask = fused._activation_backward(g, encode_mask(z >= 0), "relu", True)[0]
    assert by_output.tolist() == [[0.0, 0.0, 0.0, 3.0]]
    assert by_mask.tolist() == [[0.0, 3.0, 3.0, 3.0]]


MASKS = list(itertools.product([False, True], repeat=3))


@device_param
@dtype_param
@pytest.mark.parametrize("op", [LINEAR, RELU], ids=repr)
def test_linear_backward_is_exact_and_gives_what_was_asked(op, dtype, device):
    for wanted, o, lead in itertools.product(MASKS, [1, 8, 129], [(), (5,), (2, 3)]):
        case = exact_case(lead, 6, o, dtype, device)
        z = preactivation(case).to(dtype)
        want = run(op.eager, in_double(case))[1:]
        for saved in saved_for(op.activation, z) or [None]:
            args = (case.g, case.x, case.w, saved, op.activation, list(wanted))
            for got, truth, asked in zip(fused._linear_backward(*args), want, wanted):
                assert got.dtype == dtype
                assert got.shape == (truth.shape if asked else (0,))
                assert not asked or torch.equal(got.double(), truth)


@device_param
@dtype_param
@pytest.mark.parametrize("op", KEPT.values(), ids=repr)
def test_linear_backward_of_what_keeps_its_preactivation(op, dtype, device):
    for o, lead in itertools.product([1, 8, 129], [(), (5,), (2, 3)]):
        case = random_case(lead, 6, o, dtype, device)
        _, z = aux_of(op.activation)(*case.inputs)
        args = (case.g, case.x, case.w, z, op.activation)
        everything = fused._linear_backward(*args, [True, True, True])
        for got, want in zip(everything, run(op.eager, plain(case))[1:]):
            tolerance = 16 * torch.finfo(dtype).eps
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * 4)
        for wanted in MASKS:
            for got, want, asked in zip(fused._linear_backward(*args, wanted), everything, wanted):
                assert got.shape == (want.shape if asked else (0,))
                if asked:
                    torch.testing.assert_close(got, want)


@device_param
def test_public_and_private_forms_agree(device):
    for dtype in DTYPES:
        case = without_kinks(random_case((2, 3), 24, 40, dtype, device))
        close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
        y, mask = aux_of("relu")(*case.inputs)
        torch.testing.assert_close(y, RELU.call(*case.inputs), **close)
        assert torch.equal(decode_mask(mask, 40)[y != 0], (y > 0)[y != 0])
        for op in KEPT.values():
            y, _ = aux_of(op.activation)(*case.inputs)
            torch.testing.assert_close(y, op.call(*case.inputs), **close)


@device_param
def test_wrong_arguments_name_operator_and_values(device):
    case = random_case(5, 6, 9, torch.float32, device)
    g, x, w = case.g, case.x, case.w
    y = F.relu(preactivation(case).float())
    bad = [
        (fused._activation_backward, (g, y, "swish", True), "_activation_backward", "swish"),
        (fused._activation_backward, (g, y[:3], "relu", True), "_activation_backward", "3, 9"),
        (fused._activation_backward, (g, y.double(), "relu", True), "_activation_backward", ""),
        (fused._activation_backward, (g, y.byte(), "gelu_tanh", True), "_activation_backward", ""),
        (fused._linear_backward, (g, x, w, y, "swish", [True] * 3), "_linear_backward", "swish"),
        (fused._linear_backward, (g, x, w, None, "relu", [True] * 3), "_linear_backward", ""),
        (fused._linear_backward, (g, x, w[:, :5], y, "relu", [True] * 3), "_linear_backward", "5"),
        (fused._linear_backward, (g[:3], x, w, y, "relu", [True] * 3), "_linear_backward", "3"),
        (fused._linear_aux, (x, w.t(), None, "relu"), "_linear_aux", "6, 9"),
        (fused._linear_aux, (x, w, None, "none"), "_linear_aux", "'none'"),
        (fused._relu_mask, (y.byte(),), "_relu_mask: output", "Byte"),
        (fused._relu_mask, (y[0, 0],), "_relu_mask: output", "0-dim"),
    ]
    for op, args, name, offender in bad:
        with pytest.raises(ERRORS, match=name) as error:
            op(*args)
        assert "got" in str(error.value) and offender in str(error.value)
