"""plans: settings, files that do not fit, warming up. What needs a GPU is in test_plans_cuda.py."""

import io
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from plan_files import file_text
from processes import run_python
from torch import nn
from watching import operators_of

import torch_fused_linear as tfl
from torch_fused_linear import plans

POLICIES = "'auto', 'cublaslt', 'eager' or 'batch_invariant'"


@pytest.mark.parametrize(
    "switch, value, words",
    [
        (plans.budget, -1, r"budget must be from 0 to 1e\+06 milliseconds, got -1"),
        (plans.patience, -1, "patience must be at least 0 calls, got -1"),
        (plans.verbose, -1, "level must be from 0 to 2, got -1"),
        (plans.verbose, 3, "level must be from 0 to 2, got 3"),
        *(
            (tfl.set_policy, name, f"policy must be {POLICIES}, got '{name}'")
            for name in ("", "Auto", "cublas")
        ),
    ],
)
def test_bounds(switch, value, words):
    with pytest.raises(ValueError, match=words):
        switch(value)
    assert tfl.get_policy() == "auto"


STEP = """
import torch, torch_fused_linear as t
x = torch.ones(2, 2, requires_grad=True)
t.linear(t.linear_relu(x, x), x).sum().backward()
torch.ops.fused._plans_verbosity(), t.plans.get_budget()
"""


@pytest.mark.parametrize(
    "variable, values, expected",
    [
        ("BUDGET_MS", ["much", "nan", "1e300"], "a number from 0 to 1e+06"),
        ("VERBOSE", ["1e300", "-1"], "an integer from 0 to 2"),
        ("POLICY", ["fast"], POLICIES),
    ],
)
def test_values_in_the_environment_are_checked(variable, values, expected):
    for value in values:
        last = run_python(STEP, code=1, **{variable: value}).stderr.splitlines()[-1]
        words = f"TORCH_FUSED_LINEAR_{variable} must be {expected}, got '{value}'"
        assert last == f"ValueError: {words}"


IN_FORCE = """
import torch, torch_fused_linear as t
print(t.get_policy(), t.plans.get_budget())
print(t.plans.get_patience(), torch.ops.fused._plans_verbosity())
"""


@pytest.mark.parametrize(
    "values, in_force",
    [
        ((None, None, None), "auto 200.0 256 0"),
        (("", "", ""), "auto 200.0 256 0"),
        (("eager", "7.5", "2"), "eager 7.5 256 2"),
        (("cublaslt", "0", "0"), "cublaslt 0.0 256 0"),
    ],
)
def test_environment_variables_set_the_policy_and_budget(values, in_force):
    names = ("POLICY", "BUDGET_MS", "VERBOSE")
    done = run_python(IN_FORCE, **dict(zip(names, values)))
    assert (done.stdout.split(), done.stderr) == (in_force.split(), "")


def test_nothing_is_planned_on_the_cpu():
    plans.clear()
    with plans.budget(50):
        tfl.linear_relu(torch.randn(3, 4), torch.randn(5, 4), torch.randn(5))
    assert plans.show() == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("call", ["save", "load"])
def test_files_need_a_gpu(call, tmp_path):
    path = tmp_path / "plans"
    if call == "load":
        path.write_text(file_text())
    with pytest.raises(RuntimeError, match=f"plans.{call}: plans are of a GPU, and there is none"):
        getattr(plans, call)(path)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "cannot read"),
        ("", "is no file of plans"),
        ("something else\n", "is no file of plans"),
        (file_text()[:-3], "is damaged"),
        (file_text().replace("GPU A", "GPU B"), "is damaged"),
        (file_text(first="torch_fused_linear plans 6"), "is no file of plans that this version"),
    ],
)
def test_a_bad_file_is_refused(text, message, tmp_path):
    path = tmp_path / "plans"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message) as failure:
        plans.load(path)
    assert "\n" not in str(failure.value)


def test_files_say_this_packages_version():
    header = (Path(tfl.__file__).parents[1] / "csrc/plans/plan_file.h").read_text()
    assert f'own_version = "{tfl.__version__}";' in header


def test_a_bad_file_of_the_environment_is_told_of_and_left_alone(tmp_path):
    path = tmp_path / "plans"
    path.write_text("damaged")
    done = run_python("import torch_fused_linear", PLANS=str(path))
    assert "TORCH_FUSED_LINEAR_PLANS" in done.stderr and "is no file of plans" in done.stderr
    assert "left as it is" in done.stderr
    assert "frame #" not in done.stderr and "Exception raised" not in done.stderr
    assert path.read_text() == "damaged"


def test_a_missing_file_of_the_environment_is_no_fault(tmp_path):
    path = tmp_path / "plans"
    assert run_python("import torch_fused_linear", PLANS=str(path)).stderr == ""
    assert not path.exists()  # nothing was planned


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layer = tfl.FusedLinearReLU(4, 8)
        self.drop = nn.Dropout(0.5)
        self.last = tfl.FusedLinear(8, 2)

    def forward(self, x, scale=1.0):
        return {"out": self.last(self.drop(self.layer(self.norm(x)))) * scale, "count": len(x)}


X, W = torch.randn(6, 4), torch.randn(5, 4, requires_grad=True)
STEPS = ["linear_relu", "linear", "_linear_backward", "_linear_backward"]


@pytest.mark.parametrize(
    "module, inputs, options, grad, names",
    [
        (Model(), [X], {"scale": 2.0}, True, STEPS),
        (Model().eval(), [X], {}, False, STEPS[:2]),
        (tfl.linear_relu, [X, W], {}, True, ["linear_relu", "_linear_backward"]),
    ],
    ids=["training", "inference", "function"],
)
def test_warmup_runs_forward_and_backward(module, inputs, options, grad, names):
    with torch.set_grad_enabled(grad):
        ran = operators_of(lambda: plans.warmup(module, *inputs, **options))
    assert ran == names and W.grad is None


@pytest.mark.parametrize("fails", [False, True])
def test_warmup_leaves_no_trace(fails):
    model, x = Model(), torch.randn(6, 4, requires_grad=True)
    if fails:
        model.layer = tfl.FusedLinearReLU(3, 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="linear_relu") if fails else nullcontext():
        plans.warmup(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert x.grad is None and all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert model.training


class Terminal(io.StringIO):
    def __init__(self, is_one):
        super().__init__()
        self.isatty = lambda: is_one


@pytest.mark.parametrize("is_one, seconds, lines", [(True, 0.8, 2), (True, 0, 0), (False, 0.8, 0)])
def test_a_long_warmup_is_told_on_a_terminal(monkeypatch, is_one, seconds, lines):
    terminal, before = Terminal(is_one), threading.active_count()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(plans, "_SECONDS_UNTOLD", 0.1)
    plans.warmup(lambda x: time.sleep(seconds), torch.randn(3))
    text = terminal.getvalue()
    assert text.count("plans.warmup: 0 plans in ") >= lines
    assert (text == "") == (lines == 0)
    assert text.rpartition("plans in")[2].rpartition("\r")[0].endswith(" ") or not text, "wiped"
    assert threading.active_count() == before
