"""FP8 layers and blocks on a GPU: beside torchao's own layers there, captured, compiled, odd."""

import copy

import pytest
import torch
from helpers import captured
from recipe import ACTS, DTYPES, HIDDEN, error, gated_mlp, mlp, parameters
from torch import nn

import torch_fused_linear as tfl

pytestmark = pytest.mark.cuda
BF16 = torch.bfloat16
# Sums in another order move a hidden value's cast to its neighbour. The tensor cores' accumulator
# has fewer bits than fp32 in the forward, of which the recipe in fp64 knows nothing.
TOLERANCE = {torch.bfloat16: 2.5e-2, torch.float16: 1.5e-2, torch.float32: 1.5e-2}
dtype_param = pytest.mark.parametrize("dtype", DTYPES, ids=str)
TOKENS, WIDTH, HIDDEN_SIZE = 512, 256, 768


@pytest.fixture(scope="module", autouse=True)
def seed():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of capability 8.9 or newer")
    torch.manual_seed(0)


def random(*size, dtype=BF16):
    return torch.randn(size, device="cuda").to(dtype)


def gradients(y, grad, *leaves):
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def assert_near(got, want, tolerance):
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape and a.device == b.device, k
        assert error(a, b) < tolerance, f"result {k}: {error(a, b):.2e}"


class Gated(nn.Module):
    def __init__(self, width=WIDTH, hidden=HIDDEN_SIZE):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    def fused(self, x):
        return tfl.float8_gated_mlp(x, self.gate.weight, self.up.weight, self.down.weight)


class Mlp(nn.Sequential):
    def __init__(self, activation, width=WIDTH, hidden=HIDDEN_SIZE, bias=False):
        act = tfl.activations.ACTIVATIONS[activation].module()
        super().__init__(nn.Linear(width, hidden, bias), act, nn.Linear(hidden, width, bias))
        self.activation = activation

    def fused(self, x):
        layers = self[0], self[2]
        weights, biases = [m.weight for m in layers], [m.bias for m in layers]
        return tfl.float8_mlp(x, weights, biases, self.activation)


def model_of(kind):
    """`gated`, or a block with the activation; its layers have biases where it says so."""
    if kind == "gated":
        return Gated()
    activation, _, bias = kind.partition(" ")
    return Mlp(activation, bias=bool(bias))


# --- torchao and the recipe -----------------------------------------------------------------------


def beside_torchao(model, x, grad):
    """The results of torchao's layers, and of the operator."""
    convert = pytest.importorskip("torchao.float8").convert_to_float8_training
    theirs = convert(copy.deepcopy(model))
    results = []
    for run, leaves in ((theirs, theirs.parameters()), (model.fused, model.parameters())):
        leaf = x.clone().requires_grad_()
        results.append(gradients(run(leaf), grad, leaf, *leaves))
    return results


@pytest.mark.parametrize("kind", [*HIDDEN, "gelu_tanh bias", "gated"])
def test_a_block_is_torchaos(kind):
    model = model_of(kind).to("cuda", BF16)
    want, got = beside_torchao(model, random(TOKENS, WIDTH), random(TOKENS, WIDTH))
    # torchao rounds before it adds the bias, and after: many a cast moves to its neighbour.
    assert_near(got, want, 6e-2 if "bias" in kind else TOLERANCE[BF16])


def test_a_layer_is_torchaos():
    """The operands are the same bits, and so are the products but for the order of their sums."""
    float8 = pytest.importorskip("torchao.float8")
    model = nn.Linear(WIDTH, HIDDEN_SIZE, bias=False, device="cuda", dtype=BF16)
    theirs = float8.convert_to_float8_training(nn.Sequential(copy.deepcopy(model)))
    x, grad = random(4, TOKENS // 4, WIDTH), random(4, TOKENS // 4, HIDDEN_SIZE)
    results = []
    for run, weight in ((theirs, theirs[0].weight), (None, model.weight)):
        leaf = x.clone().requires_grad_()
        y = tfl.float8_linear(leaf, weight) if run is None else run(leaf)
        results.append(gradients(y, grad, leaf, weight))
    assert_near(results[1], results[0], 4e-3)


@pytest.mark.parametrize("activation", ACTS)
@dtype_param
def test_a_layer_is_the_recipe(activation, dtype):
    (weight,), (bias,) = parameters([WIDTH, HIDDEN_SIZE], dtype, device="cuda")
    x, grad = random(TOKENS, WIDTH, dtype=dtype), random(TOKENS, HIDDEN_SIZE, dtype=dtype)
    leaf = x.clone().requires_grad_()
    y = tfl.float8_linear(leaf, weight, bias, activation=activation)
    got = gradients(y, grad, leaf, weight, bias)
    want = mlp(x, [weight], [bias], activation, grad, activation != "none")
    assert_near(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("activation", HIDDEN)
@dtype_param
def test_blocks_are_the_recipe(activation, dtype):
    weights, biases = parameters([WIDTH, HIDDEN_SIZE, WIDTH], dtype, device="cuda")
    (up,), _ = parameters([WIDTH, HIDDEN_SIZE], dtype, device="cuda")
    x, grad = random(TOKENS, WIDTH, dtype=dtype), random(TOKENS, WIDTH, dtype=dtype)
    leaf = x.clone().requires_grad_()
    y = tfl.float8_mlp(leaf, weights, biases, activation)
    want = mlp(x, weights, biases, activation, grad)
    assert_near(gradients(y, grad, leaf, *weights, *biases), want, TOLERANCE[dtype])

    gate, down = weights
    y = tfl.float8_gated_mlp(leaf, gate, up, down, activation=activation)
    want = gated_mlp(x, gate, up, down, activation, grad)
    assert_near(gradients(y, grad, leaf, gate, up, down), want, TOLERANCE[dtype])


def test_a_gated_block_of_one_weight_of_equal_halves():
    """One scale for both halves is that of each, so that two weights give the same."""
    (gate,), (down,) = (
        parameters(sizes, BF16, device="cuda")[0]
        for sizes in ((WIDTH, HIDDEN_SIZE), (HIDDEN_SIZE, WIDTH))
    )
    both = torch.cat([gate, gate.flip(0)]).detach().requires_grad_()
    up = gate.flip(0).detach().requires_grad_()
    x, grad = random(TOKENS, WIDTH), random(TOKENS, WIDTH)
    stacked = gradients(tfl.float8_gated_mlp(x, both, None, down), grad, both, down)
    apart = gradients(tfl.float8_gated_mlp(x, gate, up, down), grad, gate, up, down)
    assert_near([stacked[0], stacked[2]], [apart[0], apart[3]], 4e-3)
    # The gradients' scales differ, which is a rounding of e5m2 more or less.
    assert error(stacked[1], torch.cat(apart[1:3])) < 0.12


# --- values, sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("kind", ["relu", "gelu_tanh", "gated"])
def test_values_that_are_no_numbers_spread_as_torchaos(kind, value):
    model = model_of(kind).to("cuda", BF16)
    x = random(TOKENS, WIDTH)
    if value == 0:
        x.zero_()
    else:
        x[3, 4] = value
    want, got = beside_torchao(model, x, random(TOKENS, WIDTH))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        if value == 0:
            assert error(a, b) < TOLERANCE[BF16] or b.abs().max() == a.abs().max() == 0
    assert value == 0 or got[0].isnan().all()


@pytest.mark.parametrize("tokens, width, hidden", [(513, 256, 768), (512, 250, 768), (0, 256, 768)])
def test_sizes_that_fp8_cannot_have_run_in_bf16(tokens, width, hidden):
    model = Gated(width, hidden).to("cuda", BF16)
    x, grad = random(tokens, width), random(tokens, width)
    leaf = x.clone().requires_grad_()
    got = gradients(model.fused(leaf), grad, leaf, *model.parameters())
    y = tfl.gated_mlp(leaf, *model.parameters())
    for a, b in zip(got, gradients(y, grad, leaf, *model.parameters()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tokens", [1, 7, 513])
def test_any_number_of_tokens_without_gradients(tokens):
    """A weight's gradient alone is a sum over them, so they need no multiple of 16."""
    model, x = Gated().to("cuda", BF16), random(tokens, WIDTH)
    with torch.no_grad(), tfl.explain() as calls:
        y = model.fused(x)
    assert "no FP8" not in str(calls)
    zeros = torch.zeros_like(x)
    assert_near([y], gated_mlp(x, *model.parameters(), "silu", zeros)[:1], TOLERANCE[BF16])


def test_a_part_of_a_larger_input():
    model = Mlp("silu").to("cuda", BF16)
    wide = random(TOKENS, 2 * WIDTH + 8)
    for x in (wide[:, :WIDTH], wide[:, 8 : 8 + WIDTH], wide[:, 1 : 1 + WIDTH], wide[::2, :WIDTH]):
        assert torch.equal(model.fused(x), model.fused(x.contiguous()))


# --- graphs, autocast, the compiler, memory -------------------------------------------------------


@pytest.mark.parametrize("kind", ["relu bias", "gelu_tanh bias", "gated"])
def test_a_step_in_a_cuda_graph(kind):
    model = model_of(kind).to("cuda", BF16)
    x, grad = random(TOKENS, WIDTH).requires_grad_(), random(TOKENS, WIDTH)
    leaves = [x, *model.parameters()]

    def step():
        return gradients(model.fused(x), grad, *leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph, results = captured(step)
    for scale in (0.1, 3.0):
        with torch.no_grad():
            x.copy_(random(TOKENS, WIDTH) * scale)
            for p in model.parameters():
                p.mul_(scale)
        grad.copy_(random(TOKENS, WIDTH) / scale)
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_the_input_alone(dtype):
    model, x = Gated().to("cuda"), random(TOKENS, WIDTH, dtype=torch.float32).requires_grad_()
    want, grad = model.fused(x.to(dtype)), random(TOKENS, WIDTH, dtype=dtype)
    with torch.autocast("cuda", dtype):
        y = model.fused(x)
    assert y.dtype == dtype and torch.equal(y, want)
    leaves = [x, *model.parameters()]
    got, want = (torch.autograd.grad(out, leaves, grad) for out in (y, want))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.parametrize("kind", ["gelu_tanh bias", "gated"])
def test_compiled_in_one_graph(kind, fresh_compiler):
    model = model_of(kind).to("cuda", BF16)
    x, grad = random(TOKENS, WIDTH).requires_grad_(), random(TOKENS, WIDTH)
    compiled = torch.compile(lambda x: model.fused(x * 2) + 1, fullgraph=True)
    leaves = [x, *model.parameters()]
    want = gradients(model.fused(x * 2) + 1, grad, *leaves)
    assert_near(gradients(compiled(x), grad, *leaves), want, 4e-3)


# A block with a hidden layer of four widths, beside eager layers in bf16: a gated one
# keeps two results and h in FP8, a ReLU bits in place of a result.
@pytest.mark.parametrize("kind, most", [("relu", 0.62), ("gelu_tanh", 0.8), ("gated", 0.7)])
def test_memory_kept_for_the_backward(kind, most):
    """The weights' copies are counted apart, as they do not grow with the tokens."""
    tokens, width, hidden = 8192, 512, 2048
    model = Gated(width, hidden) if kind == "gated" else Mlp(kind, width, hidden)
    model.to("cuda", BF16)

    x = random(tokens, width).requires_grad_()

    def kept(call):
        """Bytes; the input is made anew, as by a layer before: a leaf would live as long."""
        make = lambda: call(x + 0).sum().grad_fn  # noqa: E731
        make()
        before = torch.cuda.memory_allocated()
        graph = make()
        found = torch.cuda.memory_allocated() - before
        del graph
        return found

    plain = kept(model)
    ours = kept(model.fused) - sum(p.numel() for p in model.parameters())
    assert 0 < ours <= most * plain, ours / plain
