"""torchao's `tensorwise` recipe written anew in fp64, and arguments to try the operators with."""

import itertools

import torch
import torch.nn.functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ACTS = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
    "relu2": lambda z: F.relu(z).square(),
}
HIDDEN = [name for name in ACTS if name != "none"]


def dequantised(values, dtype=E4M3):
    """The values of a tensor after its cast, in fp64."""
    largest = torch.finfo(dtype).max
    scale = (largest / values.abs().max().double().clamp_min(1e-12)).float()
    return (values.float() * scale).clamp(-largest, largest).to(dtype).double() / scale.double()


def gradient_of(activation, z, grad):
    """act'(z) · grad as autograd has it, in the dtype of z."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        return torch.autograd.grad(ACTS[activation](z), z, grad.to(z.dtype))[0]


class Layer:
    """A layer of the recipe: products of dequantised casts in fp64, results rounded to `dtype`."""

    def __init__(self, weight, bias, dtype):
        self.weight, self.bias, self.dtype = weight, bias, dtype

    def forward(self, x):
        self.x, self.w = dequantised(x), dequantised(self.weight)
        z = self.x @ self.w.T
        return (z if self.bias is None else z + self.bias.to(self.dtype).double()).to(self.dtype)

    def backward(self, grad):
        """The gradients of the input, the weight and the bias."""
        q = dequantised(grad, E5M2)
        made = (q @ self.w).to(self.dtype), (q.T @ self.x).to(self.dtype), grad.float().sum(0)
        return made[0], made[1].to(self.weight.dtype), made[2].to(self.dtype)


def mlp(x, weights, biases, activation, grad, activates_last=False):
    """The output, and the gradients of the input, of each weight and of each bias."""
    layers = [Layer(w, b, x.dtype) for w, b in zip(weights, biases)]
    z, hidden = [], x
    for k, layer in enumerate(layers):
        z.append(layer.forward(hidden))
        is_last = k + 1 == len(layers)
        hidden = z[-1] if is_last and not activates_last else ACTS[activation](z[-1])
    of_weights, of_biases = [], []
    for k in reversed(range(len(layers))):
        if k + 1 < len(layers) or activates_last:
            grad = gradient_of(activation, z[k], grad)
        grad, of_weight, of_bias = layers[k].backward(grad)
        of_weights.insert(0, of_weight)
        of_biases.insert(0, of_bias)
    return [hidden, grad, *of_weights, *of_biases]


def gated_mlp(x, gate, up, down, activation, grad):
    """The output, and the gradients of the input, gate, up and down."""
    layers = [Layer(w, None, x.dtype) for w in (gate, up, down)]
    gate_z, up_z = layers[0].forward(x), layers[1].forward(x)
    y = layers[2].forward(ACTS[activation](gate_z) * up_z)
    grad_hidden, grad_down, _ = layers[2].backward(grad)
    of_gate = layers[0].backward(gradient_of(activation, gate_z, grad_hidden * up_z))
    of_up = layers[1].backward(grad_hidden * ACTS[activation](gate_z))
    return [y, of_gate[0] + of_up[0], of_gate[1], of_up[1], grad_down]


def error(got, want):
    """The norm of the difference beside that of what is wanted."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# --- arguments ------------------------------------------------------------------------------------


def parameters(sizes, dtype=torch.float32, bias=True, grad=True, device="cpu"):
    """The weights and biases of a chain."""
    weights, biases = [], []
    for fan_in, fan_out in itertools.pairwise(sizes):
        weight = torch.randn(fan_out, fan_in, device=device) * fan_in**-0.5
        weights.append(weight.to(dtype).requires_grad_(grad))
        values = torch.randn(fan_out, device=device).to(dtype)
        biases.append(values.requires_grad_(grad) if bias else None)
    return weights, biases


def special(kind, dtype, rows=48, features=32):
    """A matrix with values of a kind."""
    x = torch.randn(rows, features)
    if kind == "huge":
        x = x * (1e4 if dtype == torch.float16 else 1e37)
    elif kind == "tiny":
        x = x * (1e-6 if dtype == torch.float16 else 1e-13)
    elif kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "subnormal":  # of the dtype, also beside a value of 1
        x = x.sign() * torch.finfo(dtype).smallest_normal / 3
        x[0, 0] = 1
    elif kind == "all subnormal":
        x = x.sign() * torch.finfo(dtype).smallest_normal / 3
    elif kind == "outlier":
        x[3, 5] = 3e4
    elif kind == "nan":
        x[1, 2] = torch.nan
    elif kind == "inf":
        x[1, 2], x[2, 3] = torch.inf, -torch.inf
    return x.to(dtype)


KINDS = [
    "random",
    "huge",
    "tiny",
    "zeros",
    "subnormal",
    "all subnormal",
    "outlier",
    "nan",
    "inf",
]
