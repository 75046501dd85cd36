"""fused::mlp: values and gradients of a chain in one operator, against fp64 and torch's own."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from chains import ACTIVATIONS, Chain, activation_param
from helpers import (  # noqa: F401
    DTYPES,
    ERRORS,
    Tally,
    one_thread,
    policy,
    saved_bytes,
    typical_sizes,
    ulp,
)
from stacks import OPS, assert_same

import torch_fused_linear as tfl

policy_param = pytest.mark.parametrize("policy_name", ["auto", "cublaslt", "eager"])


def run(chain, call):
    y = call()
    return [y.detach(), *torch.autograd.grad(y, chain.leaves, chain.g)]


@activation_param
@policy_param
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
def test_values_and_gradients(layers, policy_name, activation, device):
    """Against torch's operators in fp64, every rank, odd widths, with, without and some biases."""
    leads = [(), (1,), (7,), (2, 3), (2, 1, 3), (0,), (2, 0)]
    widths = [None, [1] * (layers + 1), [3, 129, 1, 7, 2, 129][: layers + 1]]
    for lead, width, bias in itertools.product(leads, widths, ["all", "none", "some"]):
        chain = Chain(
            activation, layers, lead=lead, widths=width, bias=bias != "none", device=device
        )
        if bias == "some":
            chain.without_some_biases()
        want = run(chain, chain.eager)
        with policy(policy_name):
            got = run(chain, chain.mlp)
            with torch.no_grad():
                inference = chain.mlp()
        assert_same([*got, inference], [*want, want[0]], f"{lead} {width} {bias}")


def tokens_near_a_kink(chain, dtype):
    hidden, near = chain.x, torch.zeros(chain.g.shape[:-1], dtype=torch.bool, device=chain.g.device)
    for weight, bias in zip(chain.weights[:-1], chain.biases[:-1]):
        z = F.linear(hidden, weight, bias)
        near |= (z.abs() <= 4 * torch.finfo(dtype).eps * (1 + z.abs().mean())).any(-1)
        hidden = z.relu()
    return near if chain.activation == "relu" else near.zero_()


@activation_param
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_error_is_not_above_eagers(dtype, activation, device):
    """docs/numerics.md for the whole chain: fp64 is the truth, and eager the measure."""
    tallies = {}
    for layers, seed in itertools.product([1, 2, 3], range(6)):
        options = {"lead": (33,), "widths": [24, 40, 17, 8][: layers + 1], "seed": seed}
        mine = Chain(activation, layers, dtype=dtype, device=device, **options)
        wide = Chain(activation, layers, device=device, **options)
        with torch.no_grad():  # the same numbers, those that the narrow type can hold
            for a, b in zip([*wide.leaves, wide.g], [*mine.leaves, mine.g]):
                a.copy_(b)
            # there the sign, and with it ReLU's derivative, is a matter of rounding and no error
            mine.g[tokens_near_a_kink(wide, dtype)] = 0
            wide.g.copy_(mine.g)
        results = run(mine, mine.mlp), run(mine, mine.eager), run(wide, wide.eager)
        for k, (ours, eager, truth) in enumerate(zip(*results)):
            assert ours.dtype == dtype
            unit = ulp(dtype, float(truth.abs().max()))
            tallies.setdefault(k if k < 2 else 2, Tally()).add(ours, eager, truth, unit)
    for k, tally in tallies.items():
        tally.check(f"mlp {activation} {['output', 'grad_input', 'parameters'][k]}")


@activation_param
@pytest.mark.parametrize("layers, lead", [(1, (2,)), (2, (2,)), (3, ()), (3, (1, 2)), (4, (2,))])
def test_gradcheck_and_gradgradcheck(layers, lead, activation, device):
    chain = Chain(activation, layers, lead=lead, device=device, seed=3)

    def function(x, *parameters):
        return torch.ops.fused.mlp(x, parameters[::2], parameters[1::2], activation)

    assert torch.autograd.gradcheck(function, chain.leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, chain.leaves)


@activation_param
def test_double_backward_of_every_subset(activation, device):
    """The gradient of an upper weight alone depends on the layers below it."""
    for frozen, layer in itertools.product([None, 0, 1], [0, 1, 2]):
        if frozen == layer:
            continue
        results = []
        for fused in (True, False):
            chain = Chain(activation, 3, device=device)
            if frozen is not None:  # nothing below, and in the middle
                chain.x.requires_grad_(frozen == 1)
                for leaf in (chain.weights[frozen], chain.biases[frozen]):
                    leaf.requires_grad_(False)
            y = chain.mlp() if fused else chain.eager()
            (first,) = torch.autograd.grad(
                y.square().sum(), chain.weights[layer], create_graph=True
            )
            leaves = [leaf for leaf in chain.leaves if leaf.requires_grad]
            results.append(torch.autograd.grad(first.square().sum(), leaves, allow_unused=True))
        assert_same(*results, f"layer {layer}, frozen {frozen}")


@activation_param
def test_every_subset_of_wanted_gradients(activation, device):
    """What is not wanted is None, and what is wanted does not depend on it. Also inputs=[...]."""
    full = Chain(activation, 2, device=device)
    want = torch.autograd.grad(full.eager(), full.leaves, full.g)
    for wanted in itertools.product([False, True], repeat=5):
        chain = Chain(activation, 2, device=device)
        for leaf, flag in zip(chain.leaves, wanted):
            leaf.requires_grad_(flag)
        y = chain.mlp()
        assert y.requires_grad == any(wanted)
        if not any(wanted):
            continue
        chain.backward(y)
        expected = [g if flag else None for g, flag in zip(want, wanted)]
        assert_same(chain.grads(), expected, f"requires_grad {wanted}")

        whole = Chain(activation, 2, device=device)
        chosen = [leaf for leaf, flag in zip(whole.leaves, wanted) if flag]
        whole.backward(whole.mlp(), inputs=chosen)
        assert_same(whole.grads(), expected, f"inputs {wanted}")


def test_unwanted_gradients_are_not_computed(device):
    """Below the lowest layer with anything to do no step runs."""
    chain = Chain("relu", 4, device=device)
    with tfl.explain() as report:
        torch.autograd.grad(chain.mlp(), chain.weights[2:], chain.g)
    backward = [c for c in report.calls if "backward" in c.operator]
    assert len(backward) == 2, report
    with tfl.explain() as report:
        torch.autograd.grad(chain.mlp(), chain.leaves, chain.g)
    across = [c.operator for c in report.calls if "backward" in c.operator]
    assert across == ["_linear_backward_across"] * 3 + ["_linear_backward"], report


@activation_param
def test_equals_the_stack_of_single_layers(activation, device):
    for dtype in DTYPES:
        chain = Chain(activation, 3, lead=(5,), dtype=dtype, device=device)
        y, stacked = chain.mlp(), chain()
        assert_same([y.detach()], [stacked.detach()])
        grads = [torch.autograd.grad(out, chain.leaves, chain.g) for out in (y, stacked)]
        assert_same(*grads)


@activation_param
def test_retain_graph_create_graph_and_hooks(activation, device):
    chain = Chain(activation, 3, device=device)
    results = []
    for call in (chain.mlp, chain.eager):
        y, seen = call(), []
        y.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        once = torch.autograd.grad(y, chain.leaves, chain.g, retain_graph=True)
        twice = torch.autograd.grad(y, chain.leaves, chain.g, create_graph=True)
        total = sum(g.square().sum() for g in twice)
        results.append([*seen, *once, *(g.detach() for g in twice)])
        results[-1] += torch.autograd.grad(total, chain.leaves, allow_unused=True)
    assert_same(*results)


def test_relu_at_zero_and_nan(device):
    """torch's rules inside the chain: gradient 0 at exactly 0, NaN passed on both ways."""
    x = torch.zeros(2, 3, dtype=torch.float64, device=device, requires_grad=True)
    weights = [torch.ones(4, 3), torch.ones(2, 4)]
    weights = [w.to(x).requires_grad_() for w in weights]
    y = torch.ops.fused.mlp(x, weights, [None, None], "relu")
    y.sum().backward()
    assert torch.count_nonzero(x.grad) == 0
    with torch.no_grad():
        x[0, 0] = torch.nan
    y = torch.ops.fused.mlp(x, weights, [None, None], "relu")
    assert y[0].isnan().all() and not y[1].isnan().any()
    want = F.linear(F.relu(F.linear(x, weights[0])), weights[1])
    grads = [torch.autograd.grad(out.sum(), [x, *weights]) for out in (y, want)]
    for got, truth in zip(*grads):
        assert torch.equal(got.isnan(), truth.isnan())


# --- memory -------------------------------------------------------------------------------------


@activation_param
@policy_param
@pytest.mark.parametrize("x_grad", [True, False])
def test_keeps_no_more_than_eager(x_grad, policy_name, activation, device):
    """Widths are multiples of 128, so that no padding is measured."""
    for dtype in (torch.float32, torch.bfloat16):
        chain = Chain(
            activation, 4, lead=(64,), widths=[128, 256, 128, 384, 128], dtype=dtype, device=device
        )
        chain.x.requires_grad_(x_grad)
        parameters = chain.leaves[1:]
        with policy(policy_name):
            ours = saved_bytes(chain.mlp, parameters)
        eager = saved_bytes(chain.eager, parameters)
        # 'cublaslt' keeps ReLU's bit masks beside the outputs that the next layers need
        masks = (
            64 * (256 + 128 + 384) // 8 if (activation, policy_name) == ("relu", "cublaslt") else 0
        )
        assert ours <= eager + masks, f"{dtype}: keeps {ours} bytes, eager {eager}"


@activation_param
def test_keeps_nothing_that_frozen_parameters_do_not_need(activation, device):
    """As eager does: with frozen weights no hidden output, with frozen layers nothing at all."""
    chain = Chain(activation, 3, lead=(64,), widths=[128, 256, 384, 128], device=device)
    for frozen in (chain.weights, [*chain.weights[:2], *chain.biases[:2], chain.x]):
        for leaf in chain.leaves:
            leaf.requires_grad_(all(leaf is not f for f in frozen))
        parameters = chain.leaves[1:]
        ours, eager = (saved_bytes(c, parameters) for c in (chain.mlp, chain.eager))
        assert ours <= eager, f"keeps {ours} bytes, eager {eager}"


@activation_param
def test_keeps_nothing_without_a_gradient(activation, device):
    chain = Chain(activation, 3, lead=(64,), device=device)
    with torch.no_grad():
        assert saved_bytes(chain.mlp, []) == 0


# --- errors -------------------------------------------------------------------------------------


def test_wrong_arguments(device):
    """With the operator's name, the layer, what was expected and what was got."""
    chain = Chain("relu", 3, device=device)
    x, w, b = chain.x, chain.weights, chain.biases
    bad = [
        ((x, [], [], "relu"), "at least one", "none"),
        ((x, w, b[:2], "relu"), "3 weights", "2"),
        ((x, w, [*b, None], "relu"), "3 weights", "4"),
        ((x, w, b, "swish"), "activation must be", "swish"),
        ((x, w[1:], b[1:], "relu"), "layer 0: expected", r"weight Double \[6, 5\]"),
        ((x, [w[0], w[2]], [b[0], b[2]], "relu"), "layer 1: expected", r"weight Double \[7, 6\]"),
        ((x, [w[0], w[1][0], w[2]], b, "relu"), "layer 1: expected", r"weight Double \[5\]"),
        ((x, w, [b[1], b[1], b[2]], "relu"), "layer 0: expected", r"bias Double \[6\]"),
        ((x, w, [b[0], b[1], b[1]], "relu"), "layer 2: expected", r"bias Double \[6\]"),
        ((x, [w[0], w[1].float(), w[2]], b, "relu"), "layer 1: .* one dtype", "weight Float"),
        ((x, w, [b[0], b[1].float(), b[2]], "relu"), "layer 1: .* one dtype", "bias Float"),
        ((x.long(), w, b, "relu"), "layer 0: .* one dtype", "input Long"),
        ((x.sum(), w, b, "relu"), "layer 0: expected", r"input Double \[\]"),
        ((x, [w[0], w[1].to("meta"), w[2]], b, "relu"), "device", "meta"),
    ]
    for args, expected, got in bad:
        for grad in (True, False):
            with (
                torch.set_grad_enabled(grad),
                pytest.raises(ERRORS, match=f"(?s)mlp.*{expected}.*got.*{got}"),
            ):
                torch.ops.fused.mlp(*args)


@pytest.mark.parametrize("text", ["none", "gelu", "ReLU", ""])
def test_what_is_no_activation_of_a_hidden_layer(text, device):
    """The message offers what is taken, and 'none' is not."""
    chain = Chain("relu", 3, device=device)
    offered = "must be 'relu', 'gelu_tanh', 'gelu_erf', 'silu' or 'relu2', got"
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError) as error:
            torch.ops.fused.mlp(chain.x, chain.weights, chain.biases, text)
        assert f"mlp: activation {offered} '{text}'" in str(error.value)
    x, w = torch.randn(4, 3, device=device), torch.randn(3, 3, device=device)
    with pytest.raises(ValueError) as error:
        torch.ops.fused._linear_backward_across(
            x, x, w, None, "none", [True, True, False], x, text, False
        )
    assert f"_linear_backward_across: previous_activation {offered} '{text}'" in str(error.value)


def test_the_last_layer_has_no_activation(device):
    chain = Chain("relu", 1, lead=(40,), device=device)
    assert (chain.mlp() < 0).any()
    assert set(OPS) > set(ACTIVATIONS)


def test_functional_form(device):
    chain = Chain("relu", 2, device=device)
    assert torch.equal(tfl.mlp(chain.x, chain.weights, chain.biases), chain.mlp())
    gelu = tfl.mlp(chain.x, chain.weights, chain.biases, activation="gelu_tanh")
    assert_same([gelu], [Chain("gelu_tanh", 2, device=device).eager()])
