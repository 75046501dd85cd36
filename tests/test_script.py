"""TorchScript: script, trace, save, and load in a process that has only the library."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import device_param
from torch import Tensor

import torch_fused_linear as tfl

LIBRARY = next(iter(sorted(Path(tfl.__file__).parent.glob("_C*.so"))))

# What a program without our Python package does: load the library, then the script.
FRESH = """
import sys, torch
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
        self.last = tfl.FusedLinear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(self.second(self.first(x))))


def functions(x: Tensor, w: Tensor, b: Tensor, exact: bool) -> Tensor:
    """The functional forms as script sees them: defaults, keywords and a branch."""
    y = tfl.linear_relu(x, w, b) + tfl.linear(x, w)
    if exact:
        return y + tfl.linear_gelu(x, w, b, approximate="none")
    return y + tfl.linear_gelu(x, w)


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


@pytest.mark.parametrize("how", ["script", "trace"])
def test_save_and_load_in_a_fresh_process(how, tmp_path, data):
    """Forward and backward there equal those here, with no Python of ours imported."""
    model, (x, g) = Network(), data
    program = torch.jit.script(model) if how == "script" else torch.jit.trace(model, x)
    program.save(tmp_path / "model.pt")
    want = [t.clone() for t in results(model, x, g)]
    torch.save({"x": x, "g": g, "want": want}, tmp_path / "data.pt")
    command = [sys.executable, "-c", FRESH, LIBRARY, tmp_path / "model.pt", tmp_path / "data.pt"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal 8\n"


def test_frozen_script():
    model = Network().eval()
    frozen = torch.jit.freeze(torch.jit.script(model))
    x = torch.randn(5, 6)
    torch.testing.assert_close(frozen(x), model(x))
    frozen = torch.jit.optimize_for_inference(torch.jit.script(model))
    torch.testing.assert_close(frozen(x), model(x))


def test_script_keeps_its_errors():
    scripted = torch.jit.script(functions)
    with pytest.raises(RuntimeError, match=r"linear_relu: weight must have shape .* got \[4, 5\]"):
        scripted(torch.randn(5, 6), torch.randn(4, 5), torch.randn(4), True)
