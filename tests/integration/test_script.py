"""TorchScript: script, trace, save, and load in a process that has only the library."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import device_param
from torch import Tensor

import torch_fused_linear as tfl

# What a program without our Python package does: load the library, then the script.
FRESH = """
import sys, torch
if sys.argv[1]:
    torch.ops.load_library(sys.argv[1])
assert "torch_fused_linear" not in sys.modules
model, data = torch.jit.load(sys.argv[2]), torch.load(sys.argv[3])
x = data["x"].requires_grad_()
y = model(x)
y.backward(data["g"])
gradients = [x.grad] + [p.grad for p in model.parameters()]
for got, want in zip([y] + gradients, data["want"], strict=True):
    torch.testing.assert_close(got, want)
print("equal", len(gradients))
"""


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = tfl.FusedLinearReLU(6, 9)
        self.second = tfl.FusedLinearGELU(9, 8)
        self.third = tfl.FusedLinearGELU(8, 8, bias=False, approximate="none")
        self.fourth = tfl.FusedLinearSiLU(8, 8)
        self.gated = tfl.FusedGatedMLP(8, 12)
        self.last = tfl.FusedLinear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(self.first(x)))
        return self.last(self.gated(self.fourth(x)))


class WithMLP(torch.nn.Module):
    """All of it; the FusedMLP is scripted by itself when the rest is traced."""

    def __init__(self):
        super().__init__()
        self.layers = Network()
        self.mlp = tfl.FusedMLP(3, 8, 8, 3, activation="gelu_tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.layers(x))


def program_of(model, how, x):
    if how == "trace":
        model.mlp = torch.jit.script(model.mlp)
        return torch.jit.trace(model, x)
    scripted = torch.jit.script(model.train(how != "freeze"))
    return torch.jit.freeze(scripted) if how == "freeze" else scripted


def functions(x: Tensor, w: Tensor, b: Tensor, exact: bool) -> Tensor:
    """The functional forms as script sees them: defaults, keywords and a branch."""
    y = tfl.linear_relu(x, w, b) + tfl.linear(x, w)
    if exact:
        return y + tfl.linear_gelu(x, w, b, approximate="none")
    return y + tfl.linear_gelu(x, w) + tfl.linear_silu(x, w) + tfl.linear_glu(x, w, w, b)


def results(model, x, g):
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], g)]


@pytest.fixture
def data():
    return torch.randn(5, 6), torch.randn(5, 3)


@device_param
def test_script_equals_eager(device, data):
    model = Network().to(device)
    x, g = (t.to(device) for t in data)
    scripted = torch.jit.script(model)
    for _ in range(3):  # the profiling executor specialises on the second call
        for a, b in zip(results(scripted, x, g), results(model, x, g), strict=True):
            torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(scripted(x), model(x))
    other = torch.randn(2, 7, 6, device=device)  # another rank through the same script
    torch.testing.assert_close(scripted(other), model(other))


@device_param
def test_trace_equals_eager(device, data):
    model = Network().to(device)
    x, g = (t.to(device) for t in data)
    traced = torch.jit.trace(model, x)
    for size in (5, 8):
        x, g = torch.randn(size, 6, device=device), torch.randn(size, 3, device=device)
        for a, b in zip(results(traced, x, g), results(model, x, g), strict=True):
            torch.testing.assert_close(a, b)


def test_functional_forms_are_scriptable():
    scripted = torch.jit.script(functions)
    x, w, b = torch.randn(5, 6), torch.randn(4, 6), torch.randn(4)
    for exact in (True, False):
        torch.testing.assert_close(scripted(x, w, b, exact), functions(x, w, b, exact))
    code = str(scripted.inlined_graph)
    for name in ("fused::linear(", "fused::linear_relu(", "fused::linear_gelu("):
        assert name in code


def run_fresh(library, folder):
    command = [sys.executable, "-c", FRESH, library, folder / "model.pt", folder / "data.pt"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize("how", ["script", "trace", "freeze"])
def test_save_and_load_in_a_fresh_process(how, tmp_path, data):
    """Forward and backward there equal those here, with no Python of ours imported."""
    model, (x, g) = WithMLP(), data
    want = [t.clone() for t in results(model, x, g)]
    program = program_of(model, how, x)
    assert len(list(program.parameters())) == (0 if how == "freeze" else len(want) - 2)
    program.save(tmp_path / "model.pt")
    want = want[:2] if how == "freeze" else want  # its parameters have become constants
    torch.save({"x": x, "g": g, "want": want}, tmp_path / "data.pt")
    done = run_fresh(tfl.library_path(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"equal {len(want) - 1}\n"


def test_a_process_without_the_library_is_told_the_operator(tmp_path, data):
    """The words are torch's, which reads the model before anything of ours could speak."""
    torch.jit.script(Network()).save(tmp_path / "model.pt")
    torch.save({}, tmp_path / "data.pt")
    done = run_fresh("", tmp_path)
    assert done.returncode == 1
    assert "Unknown builtin op: fused::linear_relu" in done.stderr


def test_a_loaded_module_learns_as_the_model_does(data):
    """Steps of SGD on what was loaded change its parameters as they change the model's."""
    model, (x, g) = WithMLP(), data
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(model), buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    before = [p.detach().clone() for p in model.parameters()]
    for network in (model, loaded):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            (network(x) - g).square().sum().backward()
            optimizer.step()
    for a, b, old in zip(loaded.parameters(), model.parameters(), before, strict=True):
        torch.testing.assert_close(a, b)
        assert not torch.equal(a, old)


def test_the_library_needs_no_python():
    """torch_fused_linear.library_path() is a file that a program without Python can load."""
    needed = re.findall(rb"\0(lib[\w.+-]+\.so[\w.]*)(?=\0)", Path(tfl.library_path()).read_bytes())
    assert b"libtorch_cpu.so" in needed
    assert not [name for name in needed if b"python" in name]


def test_trace_of_fused_mlp_says_what_to_do(data):
    x, _ = data
    model = WithMLP()
    with pytest.raises(RuntimeError, match=r"FusedMLP: torch\.jit\.trace cannot.*Script it"):
        torch.jit.trace(model, x)
    want = model(x)
    unfused = torch.nn.Sequential(model.layers, model.mlp.to_sequential())
    torch.testing.assert_close(torch.jit.trace(unfused, x)(x), want)
    traced = program_of(model, "trace", x)
    assert "fused::mlp" in str(traced.inlined_graph)
    other = torch.randn(2, 7, 6)
    torch.testing.assert_close(traced(other), model(other))


def test_frozen_script():
    model = Network().eval()
    frozen = torch.jit.freeze(torch.jit.script(model))
    x = torch.randn(5, 6)
    torch.testing.assert_close(frozen(x), model(x))
    frozen = torch.jit.optimize_for_inference(torch.jit.script(model))
    torch.testing.assert_close(frozen(x), model(x))


def test_script_keeps_its_errors():
    scripted = torch.jit.script(functions)
    with pytest.raises(RuntimeError, match=r"linear_relu: expected .* weight Float \[4, 5\]"):
        scripted(torch.randn(5, 6), torch.randn(4, 5), torch.randn(4), True)
