"""vmap over layers with a weight for each example: values and gradients are those of a loop."""

import pytest
import torch
from operators import OPS
from torch.func import functional_call, stack_module_state, vmap
from watching import explained

import torch_fused_linear as tfl
from torch_fused_linear import FusedLinear, FusedMLP
from torch_fused_linear.activations import NUMBERS

MEMBERS, TOKENS, IN, OUT = 3, 5, 4, 6
LAYERS = {
    **{op.label: op.function for op in OPS},
    "mlp": lambda x, w, b: tfl.mlp(x, [w, w.t()], [b, None], activation="silu"),
}
ROW = "_ensemble_linear"


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]


def operands(device="cpu", lead=(TOKENS,), frozen=()):
    torch.manual_seed(0)
    sizes = (MEMBERS, *lead, IN), (MEMBERS, OUT, IN), (MEMBERS, OUT)
    drawn = [torch.randn(size, dtype=torch.float64, device=device) for size in sizes]
    return [t.requires_grad_(k not in frozen) for k, t in enumerate(drawn)]


def loop(layer, x, w, b, dims=(0, 0, 0)):
    """Member by member."""
    parts = [
        t.unbind(dim) if t is not None and dim is not None else [t] * MEMBERS
        for t, dim in zip((x, w, b), dims)
    ]
    return torch.stack([layer(*member) for member in zip(*parts)])


@pytest.mark.parametrize(
    "case",
    [
        {},
        *({"dims": dims} for dims in ((0, 0, None), (None, 0, 0), (None, 0, None), (1, 2, 1))),
        *({"bias": False, "lead": lead} for lead in ((TOKENS,), (2, 2), ())),
        *({"frozen": frozen} for frozen in ((0,), (1,), (0, 1), (0, 2), (1, 2))),
    ],
    ids=str,
)
def test_values_and_gradients(case, layer, device):
    """Operands that are shared, batched elsewhere or frozen; and that the ensemble's operators
    run."""
    dims = case.get("dims", (0, 0, 0))
    given = operands(device, case.get("lead", (TOKENS,)), case.get("frozen", ()))
    for k, dim in enumerate(dims):
        moved = given[k].detach()[0] if dim is None else given[k].detach().movedim(0, dim)
        given[k] = moved.clone().requires_grad_(given[k].requires_grad)
    if not case.get("bias", True):
        dims, given[2] = (0, 0, None), None
    leaves = [t for t in given if t is not None and t.requires_grad]
    got, report = explained(lambda: vmap(layer, dims)(*given))
    assert ROW in [call.operator for call in report.calls]
    want = loop(layer, *given, dims=dims)
    grad = torch.randn_like(want)
    ours, theirs = (torch.autograd.grad(y, leaves, grad) for y in (got, want))
    torch.testing.assert_close([got, *ours], [want, *theirs])


def test_no_members(layer):
    assert vmap(layer)(*(t[:0] for t in operands())).shape == loop(layer, *operands())[:0].shape


def test_a_number_of_members_that_is_a_symbol(layer):
    compiled = torch.compile(vmap(layer), backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(*operands()), loop(layer, *operands()))


def test_autocast(layer):
    leaves = [t.detach().float().requires_grad_() for t in operands()]
    with torch.autocast("cpu"):
        results = [vmap(layer)(*leaves).float(), loop(layer, *leaves).float()]
    results = [(y, *torch.autograd.grad(y.square().sum(), leaves)) for y in results]
    torch.testing.assert_close(*results, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (2,)], ids=str)
def test_second_derivatives(frozen, layer):
    leaves = operands(frozen=frozen)
    if layer is LAYERS["relu2"]:  # whose second derivative jumps at 0
        leaves[2] = (leaves[2].detach() + 9).requires_grad_(2 not in frozen)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(vmap(layer), leaves, fast_mode=True)


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


def test_ensembles_keep_no_more_memory_than_a_loop():
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
    with pytest.raises(RuntimeError, match=r"_ensemble_linear: expected input \[members"):
        op(torch.zeros(x), torch.zeros(w), torch.zeros(b) if b else None, NUMBERS["relu"])
