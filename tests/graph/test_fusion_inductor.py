"""The pass in the default compiler: options, modes, kernels, caches."""

import torch
from compiler import needs_compiler
from fusion import results
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import list_mode_options
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import torch_fused_linear as tfl

KEY = "pre_grad_custom_pass"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 1), nn.ReLU())
        self.block = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 20))
        self.head = nn.Sequential(nn.Linear(20, 8), nn.ReLU())

    def forward(self, x):
        x = self.images(x).flatten(1)
        x = x + checkpoint(self.block, x, use_reentrant=False)
        return self.head(x)


@needs_compiler
def test_inductor_runs_our_operators_and_its_caches_hold(tmp_path, monkeypatch):
    """Compiled in an empty cache, found there by an equal pass, and not by another one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, args = Network(), [torch.randn(5, 4, 7, 6, requires_grad=True)]
    want = results(model, args)
    for conv, hits in ((True, 0), (True, 1), (False, 0)):
        torch._dynamo.reset()
        counters.clear()
        options = tfl.compile_options(conv=conv)
        compiled = torch.compile(model, fullgraph=True, options=options)
        got, code = run_and_get_code(results, compiled, args)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        replaced = {"mlp": 1, "linear_relu": 1, **({"conv2d_relu": 2} if conv else {})}
        assert options[KEY].replaced == replaced
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
        assert counters["aot_autograd"]["autograd_cache_bypass"] == 0
        if not hits:
            both = "".join(code)
            for name in ("_linear_backward_across", "linear_relu"):
                assert f"torch.ops.fused.{name}" in both and "addmm" not in both
            for name in ("conv2d_relu", "_channels_relu_backward"):
                assert (f"torch.ops.fused.{name}" in both) == conv


def test_options_hold_what_a_mode_means():
    options = tfl.compile_options("max-autotune", {"epilogue_fusion": False})
    for key, value in list_mode_options("max-autotune").items():
        assert options[key] == value
    assert options["epilogue_fusion"] is False
    keys = {KEY, "joint_custom_pre_pass", "post_grad_custom_pre_pass"}
    assert set(tfl.compile_options()) - {"pre_grad_pass_timing"} == keys
    for key in keys:
        assert tfl.compile_options()[key] is not tfl.compile_options()[key]
    theirs = tfl.compile_options(options={"joint_custom_pre_pass": None})
    assert theirs["joint_custom_pre_pass"] is None
