"""The pass that writes operators out in ATen where that pays, for a GPU that is made up here."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from compiler import needs_compiler
from functorch.compile import make_boxed_func
from fusion import recording_backend, results
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from two_layers import assert_as_exact

import torch_fused_linear as tfl
from torch_fused_linear.activations import ACTIVATIONS
from torch_fused_linear.graph import criterion, formula_pass
from torch_fused_linear.graph.formula_pass import FormulaPass

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


def compiled_by(formulas, graphs):
    """A backend with our passes before autograd and after it, without the compiler's own."""

    def part(joint, inputs, **kwargs):
        formulas(joint.graph)
        joint.graph.lint()
        joint.recompile()
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    how = {"partition_fn": part, "decompositions": select_decomp_table()}
    return tfl.compile_backend(recording_backend(graphs, **how))


def check(model, *args, **options):
    """The model compiled with both passes is the same function. -> what was written out, and what
    forward and backward call"""
    args = args or [torch.randn(3, 5, 16, requires_grad=True)]
    formulas, graphs = FormulaPass(), {}
    call = torch.compile(model, backend=compiled_by(formulas, graphs), **options)
    torch.testing.assert_close(results(call, args), results(model, args))
    return dict(formulas.written_out), graphs


# --- the formulas themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_formulas_are_what_the_operators_compute(activation):
    def draw(*sizes):
        return torch.randn(sizes, dtype=torch.float64)

    x, w, b, grad = draw(2, 3, 8), draw(16, 8), draw(16), draw(2, 3, 16)
    calls = [("_linear_backward", (grad, x, w, draw(2, 3, 16), activation, [True] * 3))]
    if activation != "relu":  # whose second result is bits
        calls.append(("_linear_aux", (x, w, b, activation)))
    for up, down in ((grad, None), (None, None), (grad, draw(8, 16)), (None, draw(8, 16))):
        z = draw(2, 3, 16 if up is not None else 32)
        wanted = [True, up is not None, False, False, True]
        arrives = grad if down is None else x
        calls.append(("_glu_backward", (arrives, z, up, activation, wanted, down)))
    for name, args in calls:
        operator = getattr(torch.ops.fused, name)
        formula, _ = formula_pass._FORMULAS[operator.default]
        for ours, theirs in zip(formula(*args), operator(*args), strict=True):
            torch.testing.assert_close(ours, theirs)
        names = [a.name for a in operator.default._schema.arguments]
        assert list(inspect.signature(formula).parameters)[: len(names)] == names


# --- where they are taken ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation, stacked",
    [("silu", False), ("silu", True), ("gelu_tanh", False), ("gelu_erf", True), ("relu", False)],
)
def test_gating_is_written_out(gpu, activation, stacked):
    written, graphs = check(Gated(activation, stacked))
    assert written == {"_glu_backward": 1}
    assert graphs["forward"].count("fused._linear_glu_aux.default") == 1
    # h is the forward's, and not made again: one product of two of its factors
    backward = graphs["backward"]
    assert "fused._glu_backward.default" not in backward
    assert backward.count("aten.cat.default") == stacked
    # of gate and up apart the gradients of their input are summed by the compiler
    assert backward.count("aten.mm.default") == (not stacked)
    assert "aten.addmm.default" not in backward


@pytest.mark.parametrize("width, own, written", [(6, 1, 1), (8, 1, 1), (1024, 0, 1), (1024, 1, 0)])
def test_with_the_product_before(gpu, monkeypatch, width, own, written):
    """As on a GPU, and in a graph of the backward alone, where h is made again."""
    monkeypatch.setattr(criterion, "has_hopper_products", lambda device: own)

    def function(grad, gate, up, down):
        mask = [True, True, False, False, True]
        return torch.ops.fused._glu_backward(grad, gate, up, "silu", mask, down)

    dtype = torch.float32 if width == 6 else torch.bfloat16
    args = [torch.randn(s, dtype=dtype) for s in ((4, width), (4, 8), (4, 8), (width, 8))]
    formulas, calls = FormulaPass(), []

    def compiler(module, inputs):
        formulas(module.graph)
        module.recompile()
        calls.extend(str(n.target) for n in module.graph.nodes if n.op == "call_function")
        return make_boxed_func(module.forward)

    got = torch.compile(function, backend=aot_autograd(fw_compiler=compiler))(*args)
    torch.testing.assert_close(got, function(*args))
    assert formulas.written_out == ({"_glu_backward": 1} if written else {})
    assert ("aten.mm.default" in calls) == written == all(not c.startswith("fused") for c in calls)


# What is left as it is: a model, with which sizes, on which machine, and why.
STAYS = [
    (Gated(bias=True), None, H200, "sums of biases"),
    (Gated(), True, H200, "sizes that change"),
    (Gated(), None, None, "a CPU"),
    (Layer("gelu_erf", lambda h: h), None, H200, "between products"),
    (Layer("gelu_erf", lambda h: h.view(15, 48) @ torch.ones(48, 48)), None, H200, "and a view"),
]


@pytest.mark.parametrize("model, dynamic, bandwidth, why", STAYS)
def test_what_is_not_better_stays(gpu, model, dynamic, bandwidth, why):
    gpu(bandwidth)
    written, graphs = check(model, dynamic=dynamic)
    calls = graphs["backward"]
    assert written == {}
    assert calls.count("fused._glu_backward.default") == isinstance(model, Gated), why


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_beside_another_pass_is_written_out(gpu, activation):
    written, graphs = check(Layer(activation))
    aux = {} if activation == "relu" else {"_linear_aux": 1}
    assert written == {**aux, "_linear_backward": 1}
    first = "fused.linear_relu.default" if activation == "relu" else "fused.linear.default"
    assert graphs["forward"][0] == first
    assert graphs["backward"].count("fused._linear_backward.default") == 1


def test_low_memory_keeps_bits_that_no_formula_reads(gpu):
    x, w = torch.randn(5, 16, requires_grad=True), torch.randn(48, 16, requires_grad=True)
    assert check(lambda x, w: tfl.linear_relu(x, w, memory="low") * 0.5, x, w)[0] == {}


# --- in the compiler -----------------------------------------------------------------------------


@needs_compiler
def test_the_compiler_runs_it_forward_and_backward(gpu, tmp_path, monkeypatch, caplog):
    """And once more from its cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, args = Gated(), [torch.randn(5, 16, requires_grad=True)]
    want = results(model, args)
    for written in ({"_glu_backward": 1}, {}):
        torch._dynamo.reset()
        options = tfl.compile_options()
        with tfl.explain() as report, caplog.at_level("INFO"):
            got, code = run_and_get_code(results, torch.compile(model, options=options), args)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert options["pre_grad_custom_pass"].replaced == {"gated_mlp": 1}
        assert options["joint_custom_pre_pass"].written_out == written
        paths = [c.path for c in report.calls if c.operator == "_glu_backward"]
        not_fused = "written out in a compiled graph + PyTorch's own (not fused)"
        assert paths == [not_fused] * len(written)
        if written:
            both = "".join(code)
            assert "ops.fused._linear_glu_aux" in both and "ops.fused._glu_backward" not in both
            assert "written out in a graph: 1 _glu_backward" in caplog.text


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
    assert options["joint_custom_pre_pass"].written_out == ({} if stays else {"_glu_backward": 1})
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
    """Of 64 channels: a pass over 12 MB takes 5 us, over 206 MB 93."""
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
