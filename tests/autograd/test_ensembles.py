"""vmap over layers with a weight for each example: values and gradients are those of a loop."""

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap

import torch_fused_linear as tfl
from torch_fused_linear import FusedLinear, FusedMLP

MEMBERS, TOKENS, IN, OUT = 3, 5, 4, 6
LAYERS = {
    "none": tfl.linear,
    "relu": tfl.linear_relu,
    "gelu_tanh": lambda x, w, b: tfl.linear_gelu(x, w, b, approximate="tanh"),
    "gelu_erf": lambda x, w, b: tfl.linear_gelu(x, w, b, approximate="none"),
    "silu": tfl.linear_silu,
    "relu2": tfl.linear_relu2,
    "mlp": lambda x, w, b: tfl.mlp(x, [w, w.t()], [b, None], activation="silu"),
}
ROW = "_ensemble_linear"


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]


def draw(*sizes, device="cpu"):
    return torch.randn(sizes, dtype=torch.float64, device=device, requires_grad=True)


def operands(device="cpu"):
    torch.manual_seed(0)
    return (
        draw(MEMBERS, TOKENS, IN, device=device),
        draw(MEMBERS, OUT, IN, device=device),
        draw(MEMBERS, OUT, device=device),
    )


def loop(layer, x, w, b, dims=(0, 0, 0)):
    """Member by member."""
    parts = [
        t.unbind(dim) if t is not None and dim is not None else [t] * MEMBERS
        for t, dim in zip((x, w, b), dims)
    ]
    return torch.stack([layer(*member) for member in zip(*parts)])


def assert_alike(layer, x, w, b, dims=(0, 0, 0)):
    """Values and gradients, and that they come of the ensemble's operators."""
    leaves = [t for t in (x, w, b) if t is not None and t.requires_grad]
    given = [(t, dim) for t, dim in zip((x, w, b), dims) if t is not None]
    with tfl.explain() as report:
        fn = lambda *some: layer(*some, *[None] * (3 - len(some)))  # noqa: E731
        got = vmap(fn, tuple(dim for _, dim in given))(*[t for t, _ in given])
    assert ROW in [call.operator for call in report.calls]
    want = loop(layer, x, w, b, dims)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad)
    ):
        torch.testing.assert_close(ours, theirs)


def test_values_and_gradients(layer, device):
    assert_alike(layer, *operands(device))


@pytest.mark.parametrize("dims", [(0, 0, None), (None, 0, 0), (None, 0, None), (1, 2, 1)], ids=str)
def test_operands_that_are_shared_or_batched_elsewhere(dims, layer):
    x, w, b = operands()
    at = [t.detach().movedim(0, dim) if dim else t.detach() for t, dim in zip((x, w, b), dims)]
    at = [t[0] if dim is None else t for t, dim in zip(at, dims)]
    assert_alike(layer, *[t.clone().requires_grad_() for t in at], dims)


def test_no_bias_and_more_dimensions(layer):
    x, w, _ = operands()
    assert_alike(layer, x, w, None)
    assert_alike(layer, draw(MEMBERS, 2, 2, IN), w, None)
    assert_alike(layer, draw(MEMBERS, IN), w, None)


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_frozen_operands(frozen, layer):
    leaves = list(operands())
    for i in frozen:
        leaves[i].requires_grad_(False)
    assert_alike(layer, *leaves)


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,)], ids=str)
def test_second_derivatives(frozen, layer):
    leaves = list(operands())
    for i in frozen:
        leaves[i].requires_grad_(False)
    if layer is LAYERS["relu2"]:  # whose second derivative jumps at 0
        leaves[2] = (leaves[2].detach() + 9).requires_grad_(2 not in frozen)
    assert torch.autograd.gradcheck(vmap(layer), leaves)
    assert torch.autograd.gradgradcheck(vmap(layer), leaves)


def test_hooks_see_true_gradients():
    x, w, b = operands()
    seen = []
    hidden = vmap(tfl.linear_relu)(x, w, b)
    hidden.register_hook(seen.append)
    vmap(tfl.linear)(hidden, w.transpose(1, 2)).sum().backward()
    want = loop(tfl.linear_relu, x, w, b).detach().requires_grad_()
    (torch.bmm(want, w.detach()).sum()).backward()
    torch.testing.assert_close(seen[0], want.grad)


def test_a_write_to_what_is_kept_is_noticed():
    x, w, b = operands()
    y = vmap(tfl.linear_relu)(x, w, b)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_kept_is_no_more_than_a_loop_of_torchs_keeps():
    x, w, b = operands()
    x.requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        vmap(tfl.linear_relu)(x, w, b)
    sizes = sorted(t.untyped_storage().nbytes() // 8 for t in kept)
    assert sizes == [1, MEMBERS * TOKENS * IN, MEMBERS * TOKENS * OUT]  # a placeholder, x, y


@pytest.mark.parametrize("make", [FusedMLP, FusedLinear])
def test_modules_stacked_by_torch_func(make):
    torch.manual_seed(0)
    sizes = (IN, 8, OUT) if make is FusedMLP else (IN, OUT)
    modules = [make(*sizes, dtype=torch.float64) for _ in range(MEMBERS)]
    parameters, buffers = stack_module_state(modules)
    x = torch.randn(TOKENS, IN, dtype=torch.float64)
    got = vmap(lambda p, b: functional_call(modules[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(got, torch.stack([module(x) for module in modules]))
    got.square().sum().backward()
    for i, module in enumerate(modules):
        module(x).square().sum().backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameters[name].grad[i], parameter.grad)


@pytest.mark.parametrize(
    "x, w, b",
    [
        ((3, 5, 4), (3, 6, 5), None),
        ((3, 5, 4), (2, 6, 4), None),
        ((5, 4), (3, 6, 4), None),
        ((3, 5, 4), (3, 6, 4), (3, 5)),
        ((3, 5, 4), (3, 6, 4), (6,)),
    ],
    ids=str,
)
def test_operands_that_do_not_fit(x, w, b):
    op = torch.ops.fused._ensemble_linear
    bias = torch.zeros(b) if b else None
    with pytest.raises(RuntimeError, match=r"_ensemble_linear: expected input \[members"):
        op(torch.zeros(x), torch.zeros(w), bias, "relu")
