"""fused::linear_glu and fused::gated_mlp: values, layouts, errors, what torch does instead."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from gated import ACTS, FORMS, Gated, activation_param, form_param
from helpers import DTYPES, ERRORS, Tally, add_checked, device_param, one_thread, policy  # noqa: F401
from layouts import ND_LAYOUTS
from stacks import assert_same
from subclasses import Negated
from torch.utils.flop_counter import FlopCounterMode

import torch_fused_linear as tfl

fused = torch.ops.fused
SIZES = [(6, 8, None), (7, 9, 5), (1, 1, 1), (64, 40, 48), (33, 129, None)]


def results(gated, call):
    y = call()
    return [y, *gated.grads(y)]


@device_param
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
@activation_param
def test_errors_against_fp64_are_eagers(activation, dtype, device):
    """Every form and gradient, with biases and without: docs/numerics.md."""
    tallies = {}
    for k, (sizes, lead, bias) in enumerate(
        itertools.product(SIZES, [(), (1,), (33,), (2, 3)], [True, False])
    ):
        form = FORMS[k % 4]
        gated = Gated(form, lead, sizes, dtype, device, bias, activation, seed=k)
        if activation == "relu" and dtype != torch.float64:
            gated.g = without_kink(gated)
        truth_of = gated.map(torch.Tensor.double)
        columns = results(truth_of, truth_of.eager), results(gated, gated.call)
        with torch.no_grad():
            columns[1][0] = torch.where(gated.call() == columns[1][0], columns[1][0], torch.nan)
        for i, (truth, mine, theirs) in enumerate(
            zip(*columns, results(gated, gated.eager), strict=True)
        ):
            assert mine.dtype == theirs.dtype == dtype and mine.shape == theirs.shape
            size = float(truth.abs().mean()) + 1
            tally = tallies.setdefault(i == 0, Tally())
            add_checked(tally, mine, theirs, truth, size, f"{form} {lead} {sizes} result {i}")
    for is_output, tally in tallies.items():  # the worst of few is a matter of luck
        assert tally.totals[0] <= 1.1 * tally.totals[1] + 0.25 * tally.count, is_output


def without_kink(gated):
    """No gradient where ReLU's derivative is a matter of rounding."""
    if gated.down is not None:
        return gated.g * 0
    wide = gated.map(torch.Tensor.double)
    (gate, _), (bias, _) = wide.pair(wide.weights), wide.pair(wide.biases)
    z = F.linear(wide.x, gate, bias)[..., : gated.g.shape[-1]]
    eps = torch.finfo(gated.x.dtype).eps
    return gated.g.masked_fill(z.abs() <= 4 * eps * (1 + z.abs().mean()), 0)


@device_param
@activation_param
def test_large_enough_for_blocks_on_every_thread(activation, device):
    for dtype, form in itertools.product([torch.float32, torch.bfloat16], ["apart", "stacked"]):
        gated = Gated(form, (3, 171), (24, 258, 16), dtype, device, activation=activation)
        if activation == "relu":
            gated.g = gated.g * 0
        truth = gated.map(torch.Tensor.double)
        for a, b, c in zip(
            results(gated, gated.call), results(gated, gated.eager), results(truth, truth.eager)
        ):
            ours, eager = ((t.double() - c).square().mean().sqrt() for t in (a, b))
            assert ours <= 1.1 * eager + 1e-6 * (1 + c.abs().max()), (dtype, form)


@device_param
@form_param
def test_layouts(form, device):
    for dtype in (torch.float64, torch.bfloat16):
        gated = Gated(form, (4, 3), (8, 6, 5), dtype, device)
        for name, layout in ND_LAYOUTS.items():
            x = layout(gated.x.detach()).requires_grad_()
            given = gated.of([x, *gated.leaves[1:]])
            given.g = layout(gated.g)
            want = given.of([x.detach().contiguous().requires_grad_(), *gated.leaves[1:]])
            want.g = given.g.contiguous()
            assert_same(results(given, given.call), results(want, want.eager), name)
        turned = [
            t.detach().t().contiguous().t().requires_grad_() if t.dim() == 2 else t
            for t in gated.leaves[1:]
        ]
        given = gated.of([gated.x, *turned])
        want = results(gated, gated.eager)
        assert_same(results(given, given.call), want, "column-major weights")


@device_param
def test_empty_sizes(device):
    for lead, sizes in itertools.product(
        [(), (0,), (3,), (2, 0)], [(4, 6, None), (0, 6, 3), (4, 0, 3), (4, 6, 0)]
    ):
        for form in ("apart", "stacked"):
            gated = Gated(form, lead, sizes, device=device)
            assert_same(results(gated, gated.call), results(gated, gated.eager), f"{lead} {sizes}")


@device_param
def test_nan_and_infinity(device):
    z = torch.tensor([[float("nan"), float("inf"), -float("inf"), -200.0, 200.0, 0.0, -0.0]])
    identity = torch.eye(7, dtype=torch.float64, device=device)
    x = z.double().to(device)
    for activation, act in ACTS.items():
        # of an infinity's row every product with 0 is NaN: one column at a time
        for k in range(7):
            one = x[:, k : k + 1]
            got = fused.linear_glu(one, identity[:1, :1], identity[:1, :1], activation=activation)
            torch.testing.assert_close(got, act(one) * one, equal_nan=True)


@pytest.mark.parametrize("rows, features", [(513, 64), (3, 32768)])
def test_the_last_row_is_as_in_torch(rows, features):
    """Of a half, a lone row is contiguous, which torch computes in another way than many rows."""
    both = torch.linspace(-4, 4, rows * 2 * features).view(rows, -1)
    both[-1, ::7] = float("inf")
    gate, up = both.chunk(2, -1)
    grad_gate = torch.ops.aten.gelu_backward(up * up, gate)
    forward = fused._glu(both, None, "gelu_erf")
    backward = fused._glu_backward(up, both, None, "gelu_erf", [True, False, False, False, True])
    got = [forward, backward[4], backward[0][:, :features]]
    for a, b in zip(got, [F.gelu(gate) * up, F.gelu(gate) * up, grad_gate]):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@device_param
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTS)
def test_backward_through_the_layer_after(activation, dtype, device):
    """In one step what the product and the pass are in two."""
    tokens, hidden, out = (3, 50), 24, 40
    gen = torch.Generator().manual_seed(0)
    draw = lambda *sizes: torch.randn(*sizes, generator=gen).to(device, dtype)  # noqa: E731
    grad, down = draw(*tokens, out), draw(out, hidden) / out**0.5
    gate, up = draw(*tokens, hidden), draw(*tokens, hidden)
    both = torch.cat([gate, up], -1)
    apart, joined = [True, True, False, False, True], [True, False, False, False, True]
    exact = fused._glu_backward(
        (grad.double() @ down.double()), gate.double(), up.double(), activation, apart
    )
    for wanted_hidden in (True, False):
        apart[4] = joined[4] = wanted_hidden
        of_two = fused._glu_backward(grad, gate, up, activation, apart, down)
        of_one = fused._glu_backward(grad, both, None, activation, joined, down)
        results = [of_two, (*of_one[0].chunk(2, -1), *of_one[2:])]
        for gate_grad, up_grad, *sums, h in results:
            assert not sum(s.numel() for s in sums) and bool(h.numel()) == wanted_hidden
            found = [gate_grad, up_grad, *([h] if wanted_hidden else [])]
            for got, want in zip(found, (*exact[:2], exact[4])):
                tolerance = 1e-12 if dtype == torch.float64 else 2e-2
                torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_errors_of_the_layer_after():
    grad, gate, up = torch.zeros(2, 5), torch.zeros(2, 4), torch.zeros(2, 4)
    for down, text in [
        (torch.zeros(5, 3), r"_glu_backward: down must have shape \[out, 4\], got \[5, 3\]"),
        (torch.zeros(6, 4), "_glu_backward: grad_output"),
        (torch.zeros(5, 4).double(), "_glu_backward: down"),
    ]:
        with pytest.raises((RuntimeError, ValueError), match=text):
            fused._glu_backward(grad, gate, up, "silu", [True] * 5, down)


def test_flops_of_the_layer_after():
    grad, gate, up, down = (torch.zeros(s) for s in ((2, 5), (2, 4), (2, 4), (5, 4)))
    for given, flops in ((None, 0), (down, 2 * 2 * 5 * 4)):
        with FlopCounterMode(display=False) as counter:
            fused._glu_backward(
                gate if given is None else grad, gate, up, "silu", [True] * 5, given
            )
        assert counter.get_total_flops() == flops


@form_param
def test_policies_agree(form):
    gated = Gated(form, (7,), (8, 6, 5))
    want = results(gated, gated.eager)
    for name in ("auto", "cublaslt", "eager"):
        with policy(name):
            assert_same(results(gated, gated.call), want, name)


@device_param
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
def test_forward_with_preactivations(keeps, bias, device):
    gen = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(*s, generator=gen).to(device) for s in ((7, 8), (12, 8), (12,)))
    want = torch.nn.functional.linear(x, weight, b if bias else None)
    gate, up = want.chunk(2, -1)
    one = (weight, None, b if bias else None, None)
    two = (*weight.chunk(2), *(b.chunk(2) if bias else (None, None)))
    for given, kept in ((one, [want]), (two, [gate, up])):
        output, *got = fused._linear_glu_aux(x, *given, "silu", keeps)
        torch.testing.assert_close(output, torch.nn.functional.silu(gate) * up)
        got = [z for z in got if z.numel()]
        assert len(got) == (len(kept) if keeps else 0)
        for z, wanted in zip(got, kept):
            torch.testing.assert_close(z, wanted)


def test_one_product_where_the_weights_are_neighbours():
    for form, products in (("apart", 2), ("stacked", 1), ("halves", 1), ("up first", 2)):
        gated = Gated(form, (7,), (8, 6, None))
        with torch.no_grad(), tfl.explain() as report:
            gated.call()
        assert [c.operator for c in report.calls] == ["linear"] * products + ["_glu"], form


@device_param
def test_autocast(device):
    gated = Gated("apart", (7,), (8, 6, 5), torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y, want = gated.call(), gated.eager()
    assert y.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(y, want, rtol=3e-2, atol=3e-2)
    for a, b in zip(gated.grads(y), gated.grads(want), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


X, W, V = torch.randn(3, 4), torch.randn(6, 4), torch.randn(6, 4)
WRONG = {
    "activation": ((X, W, V), {"activation": "tanh"}, ValueError, "activation must be 'relu'"),
    "no activation": ((X, W, V), {"activation": "none"}, ValueError, "activation must be"),
    "odd": ((X, W[:5]), {}, ValueError, r"must have shape \[2 \* hidden, in\].*got \[5, 4\]"),
    "up's bias alone": ((X, W, None, None, V[0]), {}, ValueError, "up_bias must be None"),
    "features": ((X, W[:, :3], V), {}, RuntimeError, r"gate Float \[6, 3\]"),
    "sizes": ((X, W, V[:5]), {}, RuntimeError, r"up Float \[5, 4\]"),
    "dtypes": ((X, W, V.double()), {}, RuntimeError, "up Double"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("grad", [False, True])
def test_wrong_arguments(name, grad):
    args, options, error, text = WRONG[name]
    args = [t.clone().requires_grad_(grad) if isinstance(t, torch.Tensor) else t for t in args]
    for call in (fused.linear_glu, tfl.linear_glu):
        with pytest.raises(error, match=f"(?s)linear_glu.*{text}"):
            call(*args, **options)


def test_down_that_does_not_fit():
    with pytest.raises(RuntimeError, match=r"(?s)gated_mlp.*down Float \[3, 5\]"):
        tfl.gated_mlp(X, W, V, torch.randn(3, 5))


def test_what_no_kernel_takes():
    wide = [t.to(torch.complex64) for t in (X, W, V)]
    with pytest.raises(ERRORS):
        fused.linear_glu(*wide, activation="gelu_erf")  # torch has none either
    torch.testing.assert_close(
        fused.linear_glu(*wide), F.silu(wide[0] @ wide[1].t()) * F.linear(wide[0], wide[2])
    )
    nested = torch.nested.nested_tensor([X, X[:2]])
    got = fused.linear_glu(nested, W, V)
    for part, x in zip(got.unbind(), (X, X[:2])):
        torch.testing.assert_close(part, F.silu(x @ W.t()) * (x @ V.t()))


def test_classes_of_tensors_see_torchs_functions():
    want = F.silu(-F.linear(X, W)) * -F.linear(X, V)
    special = W.as_subclass(Negated)
    got = tfl.linear_glu(X, special, V.as_subclass(Negated))
    torch.testing.assert_close(got.as_subclass(torch.Tensor), want)


def test_functional_forms():
    down = torch.randn(5, 6)
    assert torch.equal(tfl.linear_glu(X, W, V), fused.linear_glu(X, W, V))
    both = torch.cat([W, V])
    torch.testing.assert_close(
        tfl.linear_glu(X, both, activation="relu"), F.relu(X @ W.t()) * (X @ V.t())
    )
    torch.testing.assert_close(
        tfl.gated_mlp(X, W, V, down, activation="gelu_tanh"),
        (F.gelu(X @ W.t(), approximate="tanh") * (X @ V.t())) @ down.t(),
    )
