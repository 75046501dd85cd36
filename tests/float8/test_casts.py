"""The steps' casts have the bits of torchao's own cast functions, of whatever they are made."""

import itertools

import pytest
import torch
from recipe import ACTS, DTYPES, E4M3, E5M2, HIDDEN, KINDS, gradient_of, special

from torch_fused_linear.activations import NUMBERS

pytest.importorskip("torchao")
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

fused = torch.ops.fused
kind_param = pytest.mark.parametrize("kind", KINDS)
dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def bits(t):
    t = t.contiguous()
    return (t if t.dim() else t[None]).view(torch.uint8)


def assert_torchaos(made, values, dtype=E4M3):
    """The first three results of a step are torchao's cast of the values."""
    rows, columns, inverse_scale, *_ = made
    want = hp_tensor_to_float8_dynamic(values, dtype, LinearMMConfig())
    assert rows.dtype == columns.dtype == dtype
    assert rows.is_contiguous() and columns.is_contiguous() and columns.shape == rows.T.shape
    assert torch.equal(bits(rows), bits(want._data)), "rows"
    assert torch.equal(bits(columns), bits(want._data.t())), "columns"
    torch.testing.assert_close(
        inverse_scale, want._scale.reciprocal(), rtol=0, atol=0, equal_nan=True
    )


def assert_sum(made, values):
    want = values.sum(0)
    assert made.dtype == values.dtype
    torch.testing.assert_close(made, want, rtol=0, atol=0, equal_nan=True)


def assert_rows_alone(got, want):
    """Without columns the rest has the same bits."""
    assert got[1].shape == (0,) and got[1].dtype == want[1].dtype
    for a, b in zip((got[0], *got[2:]), (want[0], *want[2:]), strict=True):
        assert torch.equal(bits(a), bits(b))


def assert_made_again(got, want, columns):
    """The step of the backward also gives the forward's columns, to the bit."""
    *results, hidden = got
    *others, none = want
    assert none.shape == (0,) and none.dtype == hidden.dtype == E4M3
    assert hidden.is_contiguous() and torch.equal(bits(hidden), bits(columns))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results, others, strict=True))


@kind_param
@dtype_param
@pytest.mark.parametrize("dtype8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_cast(kind, dtype, dtype8):
    x = special(kind, dtype)
    made = fused._float8_cast(x, dtype8 == E5M2, True)
    assert_torchaos(made, x, dtype8)
    assert_sum(made[3], x)
    assert_rows_alone(fused._float8_cast(x, dtype8 == E5M2, True, False), made)


@pytest.mark.parametrize(
    "change",
    [lambda x: x.t(), lambda x: x[::2, ::2], lambda x: x[:1].expand(32, -1), lambda x: x[1:, 1:]],
    ids=["transposed", "strided", "expanded", "offset"],
)
def test_cast_of_strides(change):
    x = change(special("random", torch.bfloat16))
    assert_torchaos(fused._float8_cast(x, False, False), x)
    assert_torchaos(fused._float8_cast(x, True, True), x, E5M2)


def test_every_bf16_value():
    """All 65536, beside several largest values; only the finite ones, then all."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()].reshape(-1, 2)
    for largest in (1.0, 3.14159, 448.0, 1e-12, 1e-20, 1e30):
        x = finite.clamp(-largest, largest)
        for gradient in (False, True):
            assert_torchaos(fused._float8_cast(x, gradient, False), x, E5M2 if gradient else E4M3)
    x = every.reshape(-1, 2)
    assert_torchaos(fused._float8_cast(x, False, False), x)


@pytest.mark.parametrize("activation", HIDDEN)
@kind_param
@dtype_param
def test_activation(kind, dtype, activation):
    z = special(kind, dtype)
    made = fused._float8_activation(z, NUMBERS[activation])
    assert_torchaos(made, ACTS[activation](z))
    assert_rows_alone(fused._float8_activation(z, NUMBERS[activation], False), made)


@pytest.mark.parametrize("activation", HIDDEN)
@kind_param
@dtype_param
def test_activation_backward(kind, dtype, activation):
    z, grad = special(kind, dtype), special("random", dtype)
    dz = gradient_of(activation, z, grad)
    made = fused._float8_activation_backward(grad, z, NUMBERS[activation], True)
    assert_torchaos(made, dz, E5M2)
    assert_sum(made[3], dz)
    _, columns, _, scale = fused._float8_activation(z, NUMBERS[activation])
    again = fused._float8_activation_backward(grad, z, NUMBERS[activation], True, scale)
    assert_made_again(again, made, columns)
    if activation == "relu":
        bits_of_z = fused._relu_mask(z)
        made = fused._float8_activation_backward(grad, bits_of_z, NUMBERS["relu"], True)
        assert_torchaos(made, dz, E5M2)
        assert_sum(made[3], dz)


@pytest.mark.parametrize("activation", HIDDEN)
@dtype_param
@pytest.mark.parametrize("halves", [False, True], ids=["apart", "halves"])
def test_gating(dtype, activation, halves):
    gate, up = special("random", dtype), special("outlier", dtype)
    if halves:
        gate, up = torch.cat([gate, up], 1).chunk(2, 1)
    made = fused._float8_gating(gate, up, NUMBERS[activation])
    assert_torchaos(made, ACTS[activation](gate) * up)
    assert_rows_alone(fused._float8_gating(gate, up, NUMBERS[activation], False), made)


@pytest.mark.parametrize("activation", HIDDEN)
@dtype_param
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_gating_backward(dtype, activation, together):
    grad = special("random", dtype)
    gate, up = special("random", dtype), special("outlier", dtype)
    if together:
        gate, up = torch.cat([gate, up], 1).chunk(2, 1)
    grad_gate = gradient_of(activation, gate, grad * up)
    grad_up = grad * ACTS[activation](gate)
    made = fused._float8_gating_backward(grad, gate, up, NUMBERS[activation], together, True)
    _, columns, _, scale = fused._float8_gating(gate, up, NUMBERS[activation])
    again = fused._float8_gating_backward(
        grad, gate, up, NUMBERS[activation], together, True, scale
    )
    assert_made_again(again, made, columns)
    if together:
        both = torch.cat([grad_gate, grad_up], 1)
        assert_torchaos(made[:4], both, E5M2)
        assert_sum(made[3], both)
        assert all(t.shape == (0,) for t in made[4:])
    else:
        for four, values in ((made[:4], grad_gate), (made[4:8], grad_up)):
            assert_torchaos(four, values, E5M2)
            assert_sum(four[3], values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product(dtype):
    """Within a unit in the last place of the exact sum, which is rounded once."""
    a, _, inverse_a, _ = fused._float8_cast(torch.randn(32, 64), True, False)
    b, _, inverse_b, _ = fused._float8_cast(torch.randn(48, 64), False, False)
    to_all, to_add = torch.randn(48).to(dtype), torch.randn(32, 48).to(dtype)
    exact = (a.double() * inverse_a) @ (b.double() * inverse_b).T
    for bias, add in itertools.product((None, to_all), (None, to_add)):
        want = exact + (0 if bias is None else bias) + (0 if add is None else add)
        got = fused._float8_product(a, b, inverse_a, inverse_b, bias, add, dtype, True)
        assert got.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), want, rtol=eps, atol=1e-5)


def test_recipe_of_these_tests_is_torchaos():
    from recipe import dequantised

    for dtype8 in (E4M3, E5M2):
        x = special("random", torch.bfloat16)
        cast = hp_tensor_to_float8_dynamic(x, dtype8, LinearMMConfig())
        want = cast._data.double() / cast._scale.double()
        torch.testing.assert_close(dequantised(x, dtype8), want, rtol=0, atol=0)


def test_casts_under_autocast():
    x = special("random", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert_torchaos(fused._float8_cast(x, False, False), x)
        cast = fused._float8_cast(x, False, False)
        made = fused._float8_product(
            cast[0], cast[0], cast[2], cast[2], None, None, torch.float32, True
        )
    want = fused._float8_product(
        cast[0], cast[0], cast[2], cast[2], None, None, torch.float32, True
    )
    assert torch.equal(made, want)
