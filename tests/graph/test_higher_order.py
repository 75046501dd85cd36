"""Layers in the bodies of torch's higher-order operators: scan, cond, while_loop and their like."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import associative_scan, map, while_loop
from torch._higher_order_ops.scan import scan
from torch.utils.checkpoint import checkpoint

import torch_fused_linear as tfl

BODIES = {
    "scan": lambda m, x, c: scan(lambda c, t: ((c + m(t)).sin(), m(c)), c, x, dim=0)[1],
    "scan of one use": lambda m, x, c: scan(lambda c, t: (c + t, m(c).sin()), c, x, dim=0)[1],
    "scan of results": lambda m, x, c: scan(lambda c, t: (m(c), m(m(c)) + t), c, x, dim=0)[1],
    "cond": lambda m, x, c: torch.cond(x.sum() > 0, lambda x: m(x).sin(), lambda x: m(x) * 2, (x,)),
    "while_loop": lambda m, x, c: while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, m(x).sin()), (torch.tensor(0), x)
    )[1],
    "associative_scan": lambda m, x, c: associative_scan(
        lambda a, b: m(a) + b, x, 0, combine_mode="generic"
    ),
    "map": lambda m, x, c: map(lambda x, c: m(x) * 2 + c, x, c),
    "checkpoint": lambda m, x, c: checkpoint(m, x, use_reentrant=False) + c,
}
# Blocks of vectors, matrices and more, which are flattened in different ways.
CASES = [(name, (), "mlp", change) for name in BODIES for change in ("none", "fuse_", "own layers")]
CASES += [
    case
    for change in ("fuse_", "own layers")
    for case in (
        ("scan", (3,), "mlp", change),
        ("scan", (2, 3), "mlp", change),
        ("scan", (), "gated", change),
        ("scan", (2, 3), "gated", change),
        ("scan of results", (), "gated", change),
        ("cond", (), "gated", change),
    )
]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(6, 16), nn.Linear(8, 6)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Net(nn.Module):
    def __init__(self, body, block):
        super().__init__()
        self.m, self.body = block, body

    def forward(self, x, c):
        return self.body(self.m, x, c)


def own_mlp(plain):
    block = tfl.FusedMLP(6, 8, 6, activation="relu")
    block.load_state_dict(dict(zip(block.state_dict(), plain.state_dict().values(), strict=True)))
    return block


def own_gated(plain):
    block = tfl.FusedGatedMLP(6, 8, bias=True)
    with torch.no_grad():
        for name in ("weight", "bias"):
            halves = getattr(plain.both, name).chunk(2)
            for layer, half in zip((block.gate_proj, block.up_proj), halves, strict=True):
                getattr(layer, name).copy_(half)
    block.down_proj.load_state_dict(plain.down.state_dict())
    return block


BLOCKS = {"mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), "gated": Gated}
WAYS = {
    "eager": lambda net: net,
    "aot_eager": lambda net: torch.compile(net, backend="aot_eager"),
    "the pass": lambda net: torch.compile(net, backend=tfl.compile_backend("aot_eager")),
}


def results(way, net, x, c):
    torch._dynamo.reset()
    y = WAYS[way](net)(x, c)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *net.parameters()])]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name, leading, block, change", CASES)
def test_equals_the_plain_model(name, leading, block, change):
    """Forward and backward, in eager mode, compiled, and compiled with the pass."""
    plain = Net(BODIES[name], BLOCKS[block]())
    x, c = torch.randn(5, *leading, 6, requires_grad=True), torch.randn(*leading, 6)
    net = copy.deepcopy(plain)
    if change == "fuse_":
        tfl.fuse_(net)
    elif change == "own layers":
        net.m = {"mlp": own_mlp, "gated": own_gated}[block](plain.m)
    want = results("eager", plain, x, c)
    for way in WAYS if change != "none" else ("the pass",):
        try:
            got = results(way, net, x, c)
        except RuntimeError:
            with pytest.raises(RuntimeError):  # torch's own, of the plain model
                results("aot_eager", plain, x, c)
            continue
        count = 2 if block == "gated" and change == "own layers" else len(want)
        torch.testing.assert_close(got[:count], want[:count])
