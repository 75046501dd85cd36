"""TorchScript: script, trace, save, and load in a process that has only the library."""

import re

import pytest
import torch
from fresh_process import LOAD_LIBRARY, python
from layers import step
from networks import NETWORKS, OPERATORS, batch, network
from numerics import assert_same
from torch import Tensor, nn

import torch_fused_linear as tfl

name_param = pytest.mark.parametrize("name", NETWORKS)
# A program without our Python package loads the library, then the script.
FRESH = """
assert "torch_fused_linear" not in sys.modules
model, data = torch.jit.load(sys.argv[1]), torch.load(sys.argv[2])
x = data["x"].requires_grad_()
y = model(x)
got = [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]
for a, b in zip(got, data["want"], strict=True):
    torch.testing.assert_close(a, b)
print("equal", len(got))
"""


def program_of(model, how, x):
    if how == "trace":
        for name, part in list(model.named_modules()):
            if isinstance(part, tfl.FusedMLP):
                model.set_submodule(name, torch.jit.script(part))
        return torch.jit.trace(model, x)
    scripted = torch.jit.script(model.train(how != "freeze"))
    return torch.jit.freeze(scripted) if how == "freeze" else scripted


@name_param
@pytest.mark.parametrize("how", ["script", "trace"])
def test_equals_eager(how, name, device):
    model = network(name, device)
    program = program_of(network(name, device), how, batch(name, 5, device=device))
    for n in (5, 8, 5):  # the profiling executor specialises on the second call
        x = batch(name, n, device=device)
        assert_same(step(program, x), step(model, x))
        with torch.no_grad():
            assert_same([program(x)], [model(x)])
    found = re.findall(r"fused::(\w+)\(", str(program.inlined_graph))
    assert sorted(found) == sorted(OPERATORS[name])
    if name != "images":  # another rank through the same script
        other = batch(name, 2, 7, device=device)
        assert_same([program(other)], [model(other)])


@pytest.mark.parametrize(
    "how, name",
    [*(("script", name) for name in NETWORKS), ("trace", "images"), ("freeze", "vectors")],
)
def test_save_and_load_in_a_fresh_process(how, name, tmp_path):
    """Forward and backward there equal those here, with no Python of ours imported."""
    model, x = network(name), batch(name, 5)
    want = step(model, x)
    program = program_of(model, how, x)
    count = 2 if how == "freeze" else len(want)  # its parameters have become constants
    assert len(list(program.parameters())) == count - 2
    program.save(str(tmp_path / "model.pt"))
    torch.save({"x": x, "want": want[:count]}, tmp_path / "data.pt")
    code = f"{LOAD_LIBRARY}\n{FRESH}"
    done = python(code, tmp_path / "model.pt", tmp_path / "data.pt", cwd=tmp_path)
    assert done.stdout == f"equal {count}\n"


@name_param
def test_optimised(name):
    """Frozen first."""
    model, x = network(name).eval(), batch(name, 5)
    assert_same([torch.jit.optimize_for_inference(torch.jit.script(model))(x)], [model(x)])


def test_trace_of_fused_mlp_says_what_to_do():
    model, x = network("vectors"), batch("vectors", 5)
    with pytest.raises(RuntimeError, match=r"FusedMLP: torch\.jit\.trace cannot.*Script it"):
        torch.jit.trace(model, x)
    unfused = nn.Sequential(
        *(m.to_sequential() if isinstance(m, tfl.FusedMLP) else m for m in model)
    )
    assert_same([torch.jit.trace(unfused, x)(x)], [model(x)])


def functions(x: Tensor, w: Tensor, b: Tensor, exact: bool) -> Tensor:
    """The functional forms as script sees them: defaults, keywords and a branch."""
    y = tfl.linear_relu(x, w, b) + tfl.linear(x, w)
    if exact:
        return y + tfl.linear_gelu(x, w, b, approximate="none")
    return y + tfl.linear_gelu(x, w) + tfl.linear_silu(x, w) + tfl.linear_glu(x, w, w, b)


def test_functional_forms_are_scriptable_and_keep_their_errors():
    scripted = torch.jit.script(functions)
    x, w, b = torch.randn(5, 6), torch.randn(4, 6), torch.randn(4)
    for exact in (True, False):
        assert_same([scripted(x, w, b, exact)], [functions(x, w, b, exact)])
    with pytest.raises(RuntimeError, match=r"linear_relu: expected .* weight Float \[4, 5\]"):
        scripted(torch.randn(5, 6), torch.randn(4, 5), torch.randn(4), True)


def test_programs_from_before_there_was_a_choice_of_memory(tmp_path):
    """Their code calls the operators without the argument."""

    def program(x, w, b):
        y = torch.ops.fused.linear_relu(x, w, b)
        y = torch.ops.fused.linear_gelu(y, w, b, approximate="none")
        return torch.ops.fused.mlp(y, [w, w], [b, None], "gelu_tanh")

    scripted = torch.jit.script(program)
    assert "memory" not in scripted.code
    scripted.save(str(tmp_path / "program.pt"))
    args = [torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)]
    assert torch.equal(torch.jit.load(tmp_path / "program.pt")(*args), program(*args))
