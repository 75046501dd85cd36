"""Layers that the compiler keeps because its kernels are faster, on a made-up GPU."""

import copy
import operator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from compiler import needs_compiler
from fusion import recording_backend, results
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from two_layers import assert_as_exact

import torch_fused_linear as tfl
from torch_fused_linear.activations import ACTIVATIONS
from torch_fused_linear.graph import criterion

H200 = 4.4e12  # bytes a second


@pytest.fixture
def gpu(monkeypatch):
    """Has a decision made as for an H200; gives a function that makes it another machine."""

    def be(bandwidth):
        monkeypatch.setattr(criterion, "bandwidth_of", lambda device: bandwidth)

    be(H200)
    return be


class Gated(nn.Module):
    def __init__(self, activation="silu", stacked=False, bias=False, sizes=(16, 48)):
        super().__init__()
        width, hidden = sizes
        self.gate = nn.Linear(width, hidden * (1 + stacked), bias)
        self.up, self.down = nn.Linear(width, hidden, bias), nn.Linear(hidden, width, bias)
        self.act, self.stacked = ACTIVATIONS[activation].module(), stacked

    def forward(self, x):
        gate, up = self.gate(x).chunk(2, -1) if self.stacked else (self.gate(x), self.up(x))
        return x + self.down(self.act(gate) * up)


class Layer(nn.Module):
    """With something after it that is a pass of its own, such as dropout."""

    def __init__(self, activation, after=lambda h: h * 0.5):
        super().__init__()
        self.first, self.second = nn.Linear(16, 48), nn.Linear(48, 16)
        self.act, self.after = ACTIVATIONS[activation].module(), after

    def forward(self, x):
        return self.second(self.after(self.act(self.first(x))))


def check(model, *args, **options):
    """The model compiled with the pass is the same function. -> what was put in, and what forward
    and backward call"""
    args = args or [torch.randn(3, 5, 16, requires_grad=True)]
    graphs = {}
    how = {"partition_fn": min_cut_rematerialization_partition}
    how["decompositions"] = select_decomp_table()
    backend = tfl.compile_backend(recording_backend(graphs, **how))
    call = torch.compile(model, backend=backend, **options)
    torch.testing.assert_close(results(call, args), results(model, args))
    return dict(backend.replaced), graphs


# --- gated layers whose backward leaves the pass to the compiler ---------------------------------

SIZES = {"gate": (6, 5), "up": (6, 5), "down": (3, 6)}
SIZES |= {"gate_bias": (6,), "up_bias": (6,), "down_bias": (3,)}


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf", "relu2"])
@pytest.mark.parametrize("frozen", ["", "input", "gate", "up", "down", "input gate up"])
@pytest.mark.parametrize("layout", ["two", "joined", "stacked"])
@pytest.mark.parametrize("has_down", [True, False])
def test_it_computes_what_the_other_pass_does(activation, frozen, layout, has_down):
    def draw(name, *sizes):
        tensor = torch.randn(sizes, dtype=torch.float64)
        return tensor.requires_grad_(name not in frozen.split())

    given = {name: draw(name, *sizes) for name, sizes in SIZES.items()}
    if not has_down:
        del given["down"], given["down_bias"]
    if layout == "stacked":
        del given["up"], given["up_bias"]
        given["gate"], given["gate_bias"] = draw("gate", 12, 5), draw("gate_bias", 12)
    elif layout == "joined":
        both = draw("gate", 12, 5)
        given["gate"], given["up"] = both[:6], both[6:]
    leaves = [t for t in [draw("input", 2, 4, 5), *given.values()] if t.requires_grad]
    x = leaves[0] if "input" not in frozen.split() else draw("input", 2, 4, 5)
    call = torch.ops.fused.gated_mlp if has_down else torch.ops.fused.linear_glu

    def gradients(memory):
        given.setdefault("up", None)
        y = call(x, **given, activation=activation, memory=memory)
        first = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        total = sum(g.cos().sum() for g in first)
        return y, *first, *torch.autograd.grad(total, leaves, allow_unused=True)

    for a, b in zip(gradients("compiled"), gradients("default"), strict=True):
        torch.testing.assert_close(a, b)
    once = [
        torch.autograd.grad(
            call(x, **given, activation=activation, memory=memory).sin().sum(), leaves
        )
        for memory in ("compiled", "default")
    ]
    torch.testing.assert_close(*once)


def test_only_gated_operators_take_it():
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    for call in (tfl.linear_relu, torch.ops.fused.linear_relu):
        with pytest.raises(ValueError, match="memory must be 'default' or 'low', got 'compiled'"):
            call(x, w, memory="compiled")


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "activation, stacked",
    [("silu", False), ("silu", True), ("gelu_tanh", False), ("gelu_erf", True), ("relu", False)],
)
def test_gating_is_the_compilers(gpu, activation, stacked, own):
    model = Gated(activation, stacked)
    if own and not stacked:
        model = tfl.FusedGatedMLP.from_modules(model.gate, model.up, model.down, activation)
    put_in, graphs = check(model)
    assert put_in == ({} if own and not stacked else {"gated_mlp": 1})
    assert graphs["forward"].count("fused._linear_glu_aux.default") == 1
    # h is the forward's, and not made again: one product of two of its factors
    backward = graphs["backward"]
    assert "fused._glu_backward.default" not in backward
    assert backward.count("aten.cat.default") == stacked
    # of gate and up apart the gradients of their input are summed by the compiler
    assert backward.count("aten.mm.default") == (not stacked)
    assert "aten.addmm.default" not in backward


@pytest.mark.parametrize("own, stays", [(False, 0), (True, 1)])
@pytest.mark.parametrize("width", [8, 1024, 1028])
def test_a_product_of_ours_that_has_the_pass(gpu, monkeypatch, width, own, stays):
    monkeypatch.setattr(criterion, "has_hopper_products", lambda device: own)
    model = Gated(sizes=(width, 16)).bfloat16()
    x = torch.randn(3, width, dtype=torch.bfloat16, requires_grad=True)
    graphs = {}
    backend = tfl.compile_backend(recording_backend(graphs))
    torch.compile(model, backend=backend)(x).sum().backward()
    count = graphs["backward"].count("fused._glu_backward.default")
    assert count == (stays if width == 1024 else 0)


# Models that are left as they are, with sizes and machine, and the reason.
STAYS = [
    (Gated(bias=True), None, H200, "sums of biases"),
    (Gated(), True, H200, "sizes that change"),
    (Gated(), None, None, "a CPU"),
    (Layer("gelu_erf", lambda h: h), None, H200, "between products"),
    (Layer("gelu_erf", lambda h: h.view(15, 48) @ torch.ones(48, 48)), None, H200, "and a view"),
    (Layer("gelu_erf"), True, H200, "sizes that change"),
    (Layer("gelu_erf"), None, None, "a CPU"),
    (Layer("gelu_erf", lambda h: h.sum(-1, True).expand(h.shape)), None, H200, "a sum"),
]


@pytest.mark.parametrize("model, dynamic, bandwidth, why", STAYS)
def test_layers_that_do_not_gain_stay(gpu, model, dynamic, bandwidth, why):
    gpu(bandwidth)
    put_in, graphs = check(model, dynamic=dynamic)
    assert put_in in ({"gated_mlp": 1}, {"mlp": 1}, {"linear_gelu": 1}), why
    assert graphs["backward"].count("fused._glu_backward.default") == isinstance(model, Gated), why


# --- activations beside another pass --------------------------------------------------------------

PASSES = {
    "a factor": lambda h: h * 0.5,
    "dropout": lambda h: F.dropout(h, 0.0, training=False) + h,
    "a sum, then a norm": lambda h: F.layer_norm(h + 1, h.shape[-1:]),
    "a view and a method": lambda h: h.view(-1, 48).sigmoid().view(h.shape),
    "a cast": lambda h: h.double().float(),
    "two passes": lambda h: h.sin() + h.cos(),
    "a product in place": lambda h: operator.imul(h, 2),
    "softmax": lambda h: h.softmax(-1),
    "ATen": lambda h: torch.ops.aten.mul.Tensor(h, 2.0),
}


@pytest.mark.parametrize("after", PASSES)
def test_passes(gpu, after):
    put_in, graphs = check(Layer("gelu_tanh", PASSES[after]))
    assert put_in == {"linear": 1}, after
    assert graphs["forward"][0] == "fused.linear.default"


class Own(Layer):
    """With an operator of ours."""

    def forward(self, x):
        layer = getattr(tfl, self.act.operator)
        h = layer(x, self.first.weight, self.first.bias, **self.act.options)
        return self.second(self.after(h))


@pytest.mark.parametrize("form", [Layer, Own])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_beside_another_pass_stays_torchs(gpu, activation, form):
    model = form(activation)
    if form is Own:
        del model.act
        model.act = ACTIVATIONS[activation]
    put_in, graphs = check(model)
    assert put_in == {"linear": 1}
    assert graphs["forward"][0] == "fused.linear.default"
    assert graphs["backward"].count("fused._linear_backward.default") == 1


@pytest.mark.parametrize("memory, put_in", [("low", {}), ("default", {"linear": 1})])
def test_low_memory_keeps_bits_that_no_formula_reads(gpu, memory, put_in):
    x, w = torch.randn(5, 16, requires_grad=True), torch.randn(48, 16, requires_grad=True)
    assert check(lambda x, w: tfl.linear_relu(x, w, memory=memory) * 0.5, x, w)[0] == put_in


def test_another_policy_rounds_as_the_operators_do(gpu):
    with tfl.set_policy("batch_invariant"):
        assert not criterion.has_choice(torch.empty(1))
    assert criterion.has_choice(torch.empty(1))


# --- in the compiler -----------------------------------------------------------------------------


@needs_compiler
def test_the_compiler_runs_it_forward_and_backward(gpu, tmp_path, monkeypatch):
    """And once more from its cache. What the pass has put in is what runs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = nn.Sequential(Gated(), Layer("gelu_erf"))
    args = [torch.randn(5, 16, requires_grad=True)]
    want = results(model, args)
    for is_cached in (False, True):
        torch._dynamo.reset()
        options = tfl.compile_options()
        got, code = run_and_get_code(results, torch.compile(model, options=options), args)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert options["pre_grad_custom_pass"].replaced == {"gated_mlp": 1, "linear": 1}
        if not is_cached:
            both = "".join(code)
            assert "ops.fused._linear_glu_aux" in both and "ops.fused.linear." in both
            assert "ops.fused._glu_backward" not in both and "ops.fused._linear_aux" not in both


@pytest.mark.cuda
@needs_compiler
@pytest.mark.parametrize("width", [128, 1024])
def test_on_a_gpu(cuda, width):
    """By the machine that is there: as exact as what the compiler makes of the plain model."""
    model = Gated("gelu_tanh", sizes=(width, 320)).to(cuda, torch.bfloat16)
    stays = width == 1024 and criterion.has_hopper_products(model.up.weight.device)
    x = torch.randn(1024, width, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    exact = results(copy.deepcopy(model).double(), [x.detach().double().requires_grad_()])
    eager = results(torch.compile(model), [x])
    torch._dynamo.reset()
    options = tfl.compile_options()
    got, code = run_and_get_code(results, torch.compile(model, options=options), [x])
    assert ("ops.fused._glu_backward" in "".join(code)) == stays
    assert_as_exact(got, eager, exact)


@pytest.mark.cuda
@needs_compiler
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_weights_by_columns_on_a_gpu(cuda, activation):
    """As transformers' Conv1D has them: their gradients lie as they do, without a copy."""
    act = ACTIVATIONS[activation].module()
    leaves = [torch.randn(s, device=cuda).bfloat16() / 8 for s in ((64, 256), (256,), (256, 64))]
    w, b, v = (t.requires_grad_() for t in leaves)
    x = torch.randn(8192, 64, device=cuda, dtype=torch.bfloat16, requires_grad=True)

    def function(x, w, b, v):
        return act(torch.addmm(b, x, w)) @ v

    def results(call, *args):
        return torch.autograd.grad(call(*args).double().square().sum(), args)

    options = tfl.compile_options()
    call = torch.compile(function, options=options)
    got, code = run_and_get_code(results, call, x, w, b, v)
    eager = results(function, x, w, b, v)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b, v)]
    assert_as_exact(got, eager, results(function, *wide))
    assert options["pre_grad_custom_pass"].replaced == {"mlp": 1}
    assert [g.stride() for g in got] == [t.stride() for t in (x, w, b, v)]
    assert "triton_poi" not in "".join(code), "nothing is copied"


# --- what the decision is made by ----------------------------------------------------------------


def test_bandwidth(monkeypatch):
    found = SimpleNamespace(memory_clock_rate=3_201_000, memory_bus_width=6144)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    ask = criterion.bandwidth_of.__wrapped__
    assert ask(torch.device("cuda", 0)) == pytest.approx(H200, rel=0.01)
    assert ask(torch.device("cpu")) is None


def test_a_convolution_stays_the_compilers_where_a_pass_is_quick(gpu):
    """With 64 channels: a sweep over 12 MB takes 5 us, one over 206 MB takes 93 us."""
    conv = nn.Conv2d(8, 16, 3, padding=1)

    def replaced(x, **options):
        torch._dynamo.reset()
        backend = tfl.compile_backend("eager", conv=True)
        torch.compile(lambda x: F.relu(conv(x)), backend=backend, **options)(x)
        return backend.replaced["conv2d_relu"]

    x = torch.randn(2, 8, 16, 16)  # the pass moves 65,536 bytes
    gpu(2e9)
    assert replaced(x) == 1 and replaced(x, dynamic=True) == 0
    gpu(2.3e9)
    assert replaced(x) == 0
    gpu(None)
    assert replaced(x) == 1 and replaced(x, dynamic=True) == 1
