"""Layers and blocks beside torchao's own and beside the recipe written in fp64."""

import copy

import pytest
import torch
from recipe import ACTS, DTYPES, HIDDEN, dequantised, error, gated_mlp, mlp, parameters
from torch import nn

import torch_fused_linear as tfl

fused = torch.ops.fused
dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# In a block, sums in another order may move a hidden value's cast to its neighbour, by 1/8 in e4m3
# and by 1/4 in e5m2; the coarser the dtype, the more of them.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 8e-3, torch.float32: 4e-3}


def gradients(y, grad, *leaves):
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def assert_near(got, want, tolerance):
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, k
        assert error(a, b) < tolerance, f"result {k}: {error(a, b):.2e}"


def assert_within_a_rounding(got, want):
    """Sums in another order: nearly all equal, others next to it, as fp32's last bits decide."""
    assert got.dtype == want.dtype
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, want, rtol=2 * eps, atol=2e-6 * want.abs().max().item())
    if got.dtype != torch.float32:
        assert (got == want).float().mean() > 0.99


@pytest.mark.parametrize("activation", ACTS)
@dtype_param
def test_layer(activation, dtype):
    weights, biases = parameters([64, 48], dtype)
    x = torch.randn(2, 16, 64, dtype=dtype, requires_grad=True)
    grad = torch.randn(2, 16, 48, dtype=dtype)
    y = tfl.float8_linear(x, weights[0], biases[0], activation=activation)
    assert y.shape == (2, 16, 48)
    got = [
        t.flatten(0, -2) if t.dim() == 3 else t for t in gradients(y, grad, x, *weights, *biases)
    ]
    is_last = activation != "none"
    want = mlp(x.detach().flatten(0, 1), weights, biases, activation, grad.flatten(0, 1), is_last)
    assert_near(got, want, {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype])


@pytest.mark.parametrize("activation", HIDDEN)
@dtype_param
@pytest.mark.parametrize("sizes", [(64, 96, 48), (32, 64, 16, 48)], ids=["two", "three"])
def test_block(activation, dtype, sizes):
    weights, biases = parameters(sizes, dtype)
    x = torch.randn(64, sizes[0], dtype=dtype, requires_grad=True)
    grad = torch.randn(64, sizes[-1], dtype=dtype)
    got = gradients(tfl.float8_mlp(x, weights, biases, activation), grad, x, *weights, *biases)
    want = mlp(x.detach(), weights, biases, activation, grad)
    assert_near(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("activation", HIDDEN)
@dtype_param
def test_gated_block(activation, dtype):
    gate, up = (parameters([64, 96], dtype)[0][0] for _ in range(2))
    down = parameters([96, 64], dtype)[0][0]
    x = torch.randn(64, 64, dtype=dtype, requires_grad=True)
    grad = torch.randn(64, 64, dtype=dtype)
    y = tfl.float8_gated_mlp(x, gate, up, down, activation=activation)
    got = gradients(y, grad, x, gate, up, down)
    want = gated_mlp(x.detach(), gate, up, down, activation, grad)
    assert_near(got, want, TOLERANCE[dtype])


def test_gated_block_of_one_weight():
    """It has one scale: as of two weights whose largest values are alike, and so gradients'."""
    torch.manual_seed(0)
    both = parameters([32, 128])[0][0]
    bias, down = torch.randn(128, requires_grad=True), parameters([64, 32])[0][0]
    x = torch.randn(32, 32, requires_grad=True)
    y = tfl.float8_gated_mlp(x, both, None, down, bias)
    grad = torch.randn_like(y)
    got = gradients(y, grad, x, both, down, bias)

    q, w, wd = dequantised(x), dequantised(both), dequantised(down)
    z = (q @ w.T + bias.double()).float()
    gate_z, up_z = z.detach().requires_grad_().chunk(2, 1)
    z = torch.cat([gate_z, up_z], 1).detach().requires_grad_()
    hidden = ACTS["silu"](z[:, :64]) * z[:, 64:]
    h = dequantised(hidden.detach())
    g = dequantised(grad, torch.float8_e5m2)
    (dz,) = torch.autograd.grad(hidden, z, (g @ wd).float())
    d = dequantised(dz, torch.float8_e5m2)
    want = [h @ wd.T, d @ w, d.T @ q, g.T @ h, dz.sum(0)]
    assert_near(got, [t.float() for t in want], TOLERANCE[torch.float32])


@dtype_param
def test_leading_dimensions(dtype):
    weights, biases = parameters([32, 48, 16], dtype)
    x = torch.randn(2, 2, 8, 32, dtype=dtype)
    whole = tfl.float8_mlp(x, weights, biases, "relu")
    assert torch.equal(whole.flatten(0, -2), tfl.float8_mlp(x.flatten(0, -2), weights, biases))
    one = tfl.float8_mlp(x[0, 0, 0], [w.detach() for w in weights], biases, "relu")
    assert one.shape == (16,)


@dtype_param
def test_master_weights_are_cast_as_they_are(dtype):
    """An fp32 weight goes to FP8 without a rounding to the input's dtype; its gradient is of that
    dtype, and then cast, as torchao's is."""
    weights, biases = parameters([32, 48, 16])
    x = torch.randn(32, 32, dtype=dtype, requires_grad=True)
    grad = torch.randn(32, 16, dtype=dtype)
    y = tfl.float8_mlp(x, weights, biases, "silu")
    assert y.dtype == dtype
    got = gradients(y, grad, x, *weights, *biases)
    assert [t.dtype for t in got] == [dtype, dtype, *[torch.float32] * 4]
    want = mlp(x.detach(), weights, biases, "silu", grad)
    assert_near(got[:4], want[:4], TOLERANCE[dtype])


# --- torchao --------------------------------------------------------------------------------------


def torchaos(model, **config):
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig(**config)
    return float8.convert_to_float8_training(copy.deepcopy(model), config=config)


def run_both(model, ours, x, grad, **config):
    results = []
    theirs = torchaos(model, **config)
    for run, leaves in ((theirs, list(theirs.parameters())), (ours, list(model.parameters()))):
        leaf = x.clone().requires_grad_()
        results.append(gradients(run(leaf), grad, leaf, *leaves))
    return results


@dtype_param
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "library"])
def test_layer_without_bias_is_torchaos(dtype, emulate):
    torch.manual_seed(0)
    model = nn.Linear(64, 48, bias=False, dtype=dtype)
    x, grad = torch.randn(2, 32, 64).to(dtype), torch.randn(2, 32, 48).to(dtype)
    ours = lambda x: tfl.float8_linear(x, model.weight)  # noqa: E731
    want, got = run_both(model, ours, x, grad, emulate=emulate)
    for a, b in zip(got, want, strict=True):
        assert_within_a_rounding(a, b)


@pytest.mark.parametrize("activation", HIDDEN)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@dtype_param
def test_block_is_torchaos(dtype, bias, activation):
    act = tfl.activations.ACTIVATIONS[activation].module()
    model = nn.Sequential(nn.Linear(64, 96, bias), act, nn.Linear(96, 48, bias)).to(dtype)
    x, grad = torch.randn(64, 64).to(dtype), torch.randn(64, 48).to(dtype)

    def ours(x):
        layers = model[0], model[2]
        return tfl.float8_mlp(x, [m.weight for m in layers], [m.bias for m in layers], activation)

    want, got = run_both(model, ours, x, grad, emulate=True)
    # torchao rounds before it adds the bias, and after: many a cast moves to its neighbour.
    assert_near(got, want, TOLERANCE[dtype] * (2.5 if bias else 1))


@dtype_param
def test_sums_that_are_exact_have_torchaos_bits(dtype):
    """Whole numbers with a largest of 7, of which every scale is a power of two."""

    def whole(*shape):
        numbers = torch.randint(-1, 2, shape).to(dtype)
        numbers.view(-1)[5] = 7
        return numbers

    model = nn.Linear(32, 16, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(whole(16, 32))
        model.bias.copy_(whole(16))
    ours = lambda x: tfl.float8_linear(x, model.weight, model.bias)  # noqa: E731
    want, got = run_both(model, ours, whole(32, 32), whole(32, 16), emulate=True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@dtype_param
def test_gated_block_is_torchaos(dtype):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (nn.Linear(64, 96, bias=False) for _ in range(2))
            self.down = nn.Linear(96, 64, bias=False)

        def forward(self, x):
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    model = Model().to(dtype)
    x, grad = torch.randn(64, 64).to(dtype), torch.randn(64, 64).to(dtype)
    weights = model.gate.weight, model.up.weight, model.down.weight
    ours = lambda x: tfl.float8_gated_mlp(x, *weights)  # noqa: E731
    want, got = run_both(model, ours, x, grad, emulate=True)
    assert_near(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["nan", "inf", "zeros"])
def test_values_that_are_no_numbers_spread_as_torchaos(kind):
    model = nn.Linear(32, 16, bias=False)
    x = torch.randn(32, 32)
    if kind == "zeros":
        x.zero_()
    else:
        x[3, 4] = float(kind)
    ours = lambda x: tfl.float8_linear(x, model.weight)  # noqa: E731
    want, got = run_both(model, ours, x, torch.randn(32, 16), emulate=True)
    assert kind == "zeros" or got[0].isnan().all()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_errors_beside_fp32_are_those_of_fp8():
    """Far from fp32 by FP8's own error, so that FP8 is what runs; no further than that."""
    weights, biases = parameters([256, 512, 256])
    x = torch.randn(256, 256, requires_grad=True)
    grad = torch.randn(256, 256)
    results = []
    for precision in ("float8", "default"):
        y = tfl.mlp(x, weights, biases, "gelu_tanh", precision=precision)
        results.append(gradients(y, grad, x, *weights))
    for got, want in zip(*results, strict=True):
        assert 0.02 < error(got, want) < 0.12
