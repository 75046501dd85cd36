"""A step of two layers on a GPU, beside eager's in the same dtype and in fp64."""

import torch
import torch.nn.functional as F
from helpers import captured
from numerics import assert_bits
from operators import ACTS as ACTIVATIONS
from operators import linear

import torch_fused_linear as tfl


class Block:
    """Two layers, the activation between them, and a gradient that comes."""

    def __init__(self, tokens, i, h, o, dtype, activation, bias=True, seed=0):
        torch.manual_seed(seed)

        def draw(*sizes):
            return torch.randn(sizes, device="cuda").to(dtype)

        self.activation = activation
        self.x, self.grad = draw(tokens, i), draw(tokens, o)
        self.weights = [draw(h, i) / i**0.5, draw(o, h) / h**0.5]
        self.biases = [draw(h), draw(o)] if bias else [None, None]
        self.x.requires_grad_()
        for tensor in (*self.weights, *filter(torch.is_tensor, self.biases)):
            tensor.requires_grad_()

    @property
    def leaves(self):
        return [self.x, *self.weights, *(b for b in self.biases if b is not None)]

    def fused(self, x, *parameters):
        count = len(self.weights)
        weights, biases = list(parameters[:count]), list(parameters[count:]) or [None] * count
        return tfl.mlp(x, weights, biases, activation=self.activation)

    def eager(self, x, w, v, b=None, c=None):
        return F.linear(ACTIVATIONS[self.activation](F.linear(x, w, b)), v, c)

    def place(self, change):
        """Puts the input and the weights elsewhere."""
        moved = [change(t.detach()).requires_grad_() for t in (self.x, *self.weights)]
        self.x, *self.weights = moved

    def results(self, call, leaves):
        y = call(*leaves)
        wanted = [t for t in leaves if t.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, wanted, self.grad.to(y.dtype))]

    def step(self):
        return self.results(self.fused, self.leaves)

    def inference(self):
        with torch.no_grad():
            return [linear(self.activation).call(self.x, self.weights[0], self.biases[0])]

    def plain(self, dtype, layers=2):
        """Computes the block by torch's functions, in another dtype."""
        leaves = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in self.leaves]
        if layers == 2:
            return self.results(self.eager, leaves)
        with torch.no_grad():
            x, w, _, *biases = leaves
            return [ACTIVATIONS[self.activation](F.linear(x, w, *biases[:1]))]


def apart(tensor, gap=24, offset=8):
    """Returns the numbers in rows that are further apart, at an offset, with NaN between them."""
    rows, cols = tensor.shape
    wide = tensor.new_full((rows * (cols + gap) + offset,), float("nan"))
    return wide[offset:].view(rows, cols + gap)[:, :cols].copy_(tensor.detach())


def assert_as_exact(got, eager, exact):
    assert len(got) == len(eager) == len(exact)
    for i, (ours, theirs, truth) in enumerate(zip(got, eager, exact)):
        size = truth.square().mean().sqrt() + 1e-30
        error = [float((r.double() - truth).square().mean().sqrt() / size) for r in (ours, theirs)]
        few = 8 / ours.numel() ** 0.5 if ours.numel() < 2048 else 0  # the largest are most of it
        assert error[0] <= (1.1 + few) * error[1] + 1e-6, f"result {i}: {error}"


def assert_near_eagers(got, block):
    """NaN in the same places, and near each other elsewhere."""
    with tfl.set_policy("eager"):
        want = block.step()
    for ours, theirs in zip(got, want):
        assert torch.equal(ours.isnan(), theirs.isnan())
        finite = theirs.isfinite()
        few = 0.1 * max(1.0, float(theirs[finite].double().std(correction=0)))
        torch.testing.assert_close(ours[finite], theirs[finite], rtol=0.1, atol=few)


def assert_same_bits_again(step, first):
    """Again and again, in several streams at once, and captured."""
    for _ in range(20):
        assert_bits(step(), first)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams * 4:
        with torch.cuda.stream(stream):
            results.append(step())
    torch.cuda.synchronize()
    for result in results:
        assert_bits(result, first)
    graph, replayed = captured(step)
    for tensor in replayed:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    graph.replay()
    torch.cuda.synchronize()
    assert_bits(replayed, first)
