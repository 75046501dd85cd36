"""Helpers for the tests of the pass over compiled graphs."""

import math

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import torch_fused_linear as tfl


def tensors(*lead, dtype=torch.float32):
    """x [*lead, 6], then weight and bias of 6 -> 8 and of 8 -> 6."""
    shapes = [(*lead, 6), (8, 6), (8,), (6, 8), (6,)]
    return [torch.randn(s).to(dtype).requires_grad_(dtype.is_floating_point) for s in shapes]


def images(*lead, dtype=torch.float32, last=False):
    """x [*lead, 4, 7, 6], weight and bias of 4 -> 6 channels."""
    x, w, b = (torch.randn(size).to(dtype) for size in ((*lead, 4, 7, 6), (6, 4, 3, 3), (6,)))
    if last:
        x = x.to(memory_format=torch.channels_last)
    return [t.requires_grad_(dtype.is_floating_point) for t in (x, w, b)]


def results(function, args):
    """Output and gradients, of parameters too."""
    torch.manual_seed(1)  # the same dropout
    y = function(*args)
    wanted = [t for t in args if t.requires_grad]
    wanted += function.parameters() if isinstance(function, nn.Module) else []
    if not y.requires_grad:
        return [y]
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted, allow_unused=True)]


def recording_backend(graphs, **how):
    """A backend that runs the graphs as they are, and leaves in `graphs` what the one called
    "forward" and the one called "backward" call; `how` is aot_autograd's."""

    def record(name):
        def compiler(module, _):
            graphs[name] = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
            return make_boxed_func(module.forward)

        return compiler

    return aot_autograd(fw_compiler=record("forward"), bw_compiler=record("backward"), **how)


def check(function, args, backend="eager", conv=False, dynamic=None, **replaced):
    """Compiled with the pass it is the same function, and so much of it has been replaced."""
    backend = tfl.compile_backend(backend, conv=conv)
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    near = {"rtol": 1e-4, "atol": 1e-4} if conv else {}
    for got, want in zip(results(compiled, args), results(function, args), strict=True):
        torch.testing.assert_close(got, want, **near)
        assert not conv or got.stride() == want.stride()
    assert backend.replaced == replaced


def chain_of(act):
    """Two layers and what is between them."""
    return lambda x, w, b, v, c: F.linear(act(F.linear(x, w, b)), v, c)


chain = chain_of(F.relu)


def conv_relu(x, w, b):
    return F.relu(F.conv2d(x, w, b))


def tanh_formula(x, scale=(2 / math.pi) ** 0.5, **into):
    return 0.5 * x * (1.0 + torch.tanh(scale * (x + 0.044715 * x.pow(3.0)), **into))
