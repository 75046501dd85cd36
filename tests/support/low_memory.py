"""What the tests of memory='low' share: nets of GELU and SiLU, and comparing bits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_fused_linear as tfl

fused = torch.ops.fused
FORMS = {
    "gelu_tanh": (fused.linear_gelu, F.gelu, {"approximate": "tanh"}),
    "gelu_erf": (fused.linear_gelu, F.gelu, {"approximate": "none"}),
    "silu": (fused.linear_silu, F.silu, {}),
}
form_param = pytest.mark.parametrize("form", FORMS)
dtype_param = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str
)
ROWS, WIDTHS = 64, (128, 256, 384, 128)


class Net:
    """Layers with GELU or SiLU between them, as separate operators or as one."""

    def __init__(
        self, form="gelu_tanh", dtype=torch.float64, device="cpu", lead=(ROWS,), widths=WIDTHS
    ):
        gen = torch.Generator().manual_seed(1)

        def leaf(*shape, scale=1.0):
            values = torch.randn(*shape, generator=gen, dtype=torch.float64) * scale
            return values.to(device=device, dtype=dtype).requires_grad_()

        self.form = form
        self.x = leaf(*lead, widths[0])
        pairs = list(itertools.pairwise(widths))
        self.weights = [leaf(o, i, scale=max(i, 1) ** -0.5) for i, o in pairs]
        self.biases = [leaf(o) for _, o in pairs]
        self.g = leaf(*lead, widths[-1]).detach()
        self.hidden_bytes = self.x[..., :1].numel() * sum(widths[1:-1]) * dtype.itemsize

    @property
    def leaves(self):
        return [self.x, *itertools.chain(*zip(self.weights, self.biases))]

    def hidden(self, k, y, memory="low"):
        operator, _, options = FORMS[self.form]
        return operator(y, self.weights[k], self.biases[k], memory=memory, **options)

    def stack(self, memory="low"):
        y = self.x
        for k in range(len(self.weights) - 1):
            y = self.hidden(k, y, memory)
        return fused.linear(y, self.weights[-1], self.biases[-1])

    def mlp(self, memory="low"):
        return fused.mlp(self.x, self.weights, self.biases, self.form, memory=memory)

    def eager(self):
        y = self.x
        for w, b in zip(self.weights[:-1], self.biases[:-1]):
            _, activation, options = FORMS[self.form]
            y = activation(F.linear(y, w, b), **options)
        return F.linear(y, self.weights[-1], self.biases[-1])

    def grads(self, y, **options):
        return torch.autograd.grad(y, self.leaves, self.g, **options)


def identity(t):
    return t


def network(memory="low", dtype=torch.float64, device="cpu", sizes=(16, 24, 32, 8)):
    torch.manual_seed(0)
    a, b, c, d = sizes
    return nn.Sequential(
        tfl.FusedLinearGELU(a, b, memory=memory),
        tfl.FusedLinearGELU(b, c, approximate="none", memory=memory),
        tfl.FusedLinearReLU(c, c, memory=memory),
        tfl.FusedMLP(c, b, d, activation="gelu_tanh", memory=memory),
    ).to(device, dtype)


def small(device, **options):
    return Net(device=device, lead=(5,), widths=(6, 8, 7, 4), **options)
