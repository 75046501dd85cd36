"""Stand-ins for other libraries' blocks, under their names, on a CPU."""

from types import SimpleNamespace

import torch.nn.functional as F
from layers import GatedBlock
from torch import nn

TUNED, HEURISTICS = [], []  # what the calls were made with


def quack_mlp_func(x, weight1, weight2, activation, bias1=None, bias2=None, tuned=True):
    TUNED.append(tuned)
    z = F.linear(x, weight1, bias1)
    h = {"relu": F.relu(z), "gelu_tanh_approx": F.gelu(z, approximate="tanh")}[activation]
    return F.linear(h, weight2, bias2)


class QuackMLP(nn.Module):
    def __init__(self, width, hidden, out, activation, device, dtype, tuned):
        super().__init__()
        assert activation == "swiglu"
        self.fc1 = nn.Linear(width, 2 * hidden, bias=False, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out, bias=False, device=device, dtype=dtype)

    def forward(self, x):
        y = self.fc1(x)
        return self.fc2(F.silu(y[..., ::2]) * y[..., 1::2])


def liger_mlp(config):
    assert config.hidden_act == "silu"
    return GatedBlock(config.hidden_size, config.intermediate_size)


class FlashMLP(nn.Module):
    def __init__(self, in_features, hidden_features, activation, heuristic):
        super().__init__()
        HEURISTICS.append(heuristic)
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.act = {"relu": nn.ReLU(), "gelu_approx": nn.GELU("tanh")}[activation]

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class ApexMLP(nn.Module):
    def __init__(self, width, hidden, out):
        super().__init__()
        self.weight1 = self.bias1 = self.weight2 = self.bias2 = None

    def forward(self, x):
        h = F.gelu(F.linear(x, self.weight1, self.bias1), approximate="tanh")
        return F.linear(h, self.weight2, self.bias2)


def coda_linear_swiglu(x, both):
    y = F.linear(x, both)
    return F.silu(y[..., ::2]) * y[..., 1::2]


FAKES = {
    "coda.kernels.functional.swiglu": SimpleNamespace(linear_swiglu=coda_linear_swiglu),
    "quack.mlp": SimpleNamespace(mlp_func=quack_mlp_func, MLP=QuackMLP),
    "flash_attn.ops.fused_dense": SimpleNamespace(FusedMLP=FlashMLP),
    "apex.fused_dense": SimpleNamespace(FusedDenseGeluDense=ApexMLP),
    "liger_kernel.transformers": SimpleNamespace(LigerSwiGLUMLP=liger_mlp),
}
