"""The pass in the default compiler: options, modes, kernels, caches."""

import shutil

import pytest
import torch
from helpers import one_thread  # noqa: F401
from inductor import quick_to_compile
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import torch_fused_linear as tfl

KEY = "pre_grad_custom_pass"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU())

    def forward(self, x):
        x = x + checkpoint(self.block, x, use_reentrant=False)
        return self.head(x)


def step(call, model, x):
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="needs a C++ compiler")
def test_inductor_runs_our_operators_and_its_caches_hold(tmp_path, monkeypatch):
    """Once compiled in an empty cache; then with a new pass, from the cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    model, x = Network(), torch.randn(5, 16)
    want = step(model, model, x)
    for hits in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        options = tfl.compile_options()
        compiled = torch.compile(model, fullgraph=True, options=options)
        with quick_to_compile():
            got, code = run_and_get_code(step, compiled, model, x)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert options[KEY].replaced == {"mlp": 1, "linear_relu": 1}
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
        assert counters["aot_autograd"]["autograd_cache_bypass"] == 0
        if not hits:
            both = "".join(code)
            assert "torch.ops.fused._linear_backward_across" in both
            assert "torch.ops.fused.linear_relu" in both and "addmm" not in both


def test_options_hold_what_a_mode_means():
    from torch._inductor import list_mode_options

    options = tfl.compile_options("max-autotune", {"epilogue_fusion": False})
    for key, value in list_mode_options("max-autotune").items():
        assert options[key] == value
    assert options["epilogue_fusion"] is False
    assert set(tfl.compile_options()) == {KEY, "joint_custom_pre_pass"}
    for key in (KEY, "joint_custom_pre_pass"):
        assert tfl.compile_options()[key] is not tfl.compile_options()[key]
    theirs = tfl.compile_options(options={"joint_custom_pre_pass": None})
    assert theirs["joint_custom_pre_pass"] is None
