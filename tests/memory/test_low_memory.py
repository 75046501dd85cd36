"""memory='low': exactly the bytes that are promised, and the bits that keeping more would give."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import (  # noqa: F401
    ERRORS,
    GELU_ERF,
    GELU_TANH,
    assert_bits,
    decode_mask,
    kept_bytes,
    one_thread,
    policy,
    random_case,
    saved_bytes,
)
from low_memory import FORMS, ROWS, Net, dtype_param, form_param, identity
from stacks import HANDED, assert_same
from torch.autograd.graph import saved_tensors_hooks

import torch_fused_linear as tfl

fused = torch.ops.fused


# --- GELU, SiLU: one tensor for each hidden activation instead of two ---------------------------


@form_param
@dtype_param
def test_bytes_of_gelu(dtype, form, device):
    net = Net(form, dtype, device)
    for call in (net.stack, net.mlp):
        assert kept_bytes(partial(call, "default")) == 2 * net.hidden_bytes
        assert kept_bytes(call) == net.hidden_bytes
    assert kept_bytes(net.eager) == 2 * net.hidden_bytes
    # the operator for a chain keeps its promise where hooks are asked as well
    inputs = net.x.numel() * dtype.itemsize
    assert saved_bytes(net.mlp, net.leaves[1:]) == net.hidden_bytes + inputs


@form_param
@dtype_param
def test_what_is_computed_anew_has_the_bits_of_what_was_kept(dtype, form, device):
    """Under hooks, identities here, the very same layers keep both tensors."""
    net = Net(form, dtype, device, lead=(5, 7), widths=(16, 33, 24, 9))
    kept_both = saved_tensors_hooks(identity, identity)
    with kept_both:
        y = net.stack()
    want = [y, *net.grads(y)]
    for call in (net.stack, net.mlp):
        y = call()
        assert_bits([y, *net.grads(y)], want)
    with tfl.handover(False):
        y = net.stack()
        plain = net.grads(y)
    assert_same(plain, want[1:])


@dtype_param
def test_numerics_are_eagers(dtype, device):
    """The pre-activation is rounded before GELU, as eager rounds it: on a CPU bit for bit."""
    net = Net(dtype=dtype, device=device, lead=(9,), widths=(16, 24, 8))
    y, eager = net.mlp(), net.eager()
    compare = assert_bits if device.type == "cpu" else assert_same
    compare([y, *net.grads(y)], [eager, *net.grads(eager)])


def test_every_kind_of_layer_can_be_the_next(device):
    net = Net(device=device, widths=(128, 256, 128))
    w, b = net.weights[1], net.biases[1]
    consumers = {
        "linear": (fused.linear, 0),
        "relu": (fused.linear_relu, 1),
        "gelu": (GELU_TANH.call, 1),
        "gelu low": (lambda *a: fused.linear_gelu(*a, memory="low"), 1),
    }
    for name, (consumer, own) in consumers.items():
        want = net.hidden_bytes + own * ROWS * 128 * 8
        assert kept_bytes(lambda c=consumer: c(net.hidden(0, net.x), w, b)) == want, name
    # a linear layer of torch keeps its input
    assert kept_bytes(lambda: F.linear(net.hidden(0, net.x), w, b)) == 2 * net.hidden_bytes


@form_param
def test_handed_over_and_told(form, device):
    net = Net(form, device=device)
    with tfl.explain() as report:
        y = net.stack()
        forward = len(report.calls)
        net.grads(y)
    assert report.handed_over == 2 and forward == 0
    name = form.partition("_")[0]
    steps = [(call.operator, call.path) for call in report.calls if call.operator == name]
    assert steps == [(name, f"ATen {name}")] * 2 + [(name, f"ATen {name}, recomputed")] * 2
    assert not any("aux" in call.operator for call in report.calls)
    assert [c.operator for c in report.calls if c.handover == HANDED] == (
        ["_linear_backward_across"] * 2
    )
    with tfl.explain() as report:
        net.grads(net.mlp())
    assert sum("recomputed" in call.path for call in report.calls) == 2


def test_nothing_is_computed_anew_for_a_frozen_weight(device):
    net = Net(device=device)
    for call in (net.stack, net.mlp):
        with tfl.explain() as report:
            torch.autograd.grad(call(), net.x, net.g)
        assert not any("recomputed" in call.path for call in report.calls), report


def test_never_more_than_eager(device):
    """Whatever is frozen: subsets of the leaves, in 16 bits."""
    net = Net(dtype=torch.bfloat16, device=device)
    for wanted in itertools.product([False, True], repeat=len(net.leaves)):
        for leaf, flag in zip(net.leaves, wanted):
            leaf.requires_grad_(flag)
        if any(wanted):
            eager = kept_bytes(net.eager)
            for call in (net.stack, net.mlp):
                assert kept_bytes(call) <= eager, wanted


@form_param
def test_gradcheck_and_gradgradcheck(form, device):
    net = Net(form, device=device, lead=(2,), widths=(3, 4, 5, 2))
    operator, _, options = FORMS[form]

    def stack(x, *parameters):
        for w, b in zip(parameters[0:4:2], parameters[1:4:2]):
            x = operator(x, w, b, memory="low", **options)
        return fused.linear(x, *parameters[4:])

    def mlp(x, *parameters):
        return fused.mlp(x, parameters[::2], parameters[1::2], form, memory="low")

    for function in (stack, mlp):
        assert torch.autograd.gradcheck(function, net.leaves, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, net.leaves)


@form_param
def test_double_backward_of_every_weight_alone(form, device):
    for k in range(3):
        results = []
        for name in ("stack", "mlp", "eager"):
            net = Net(form, device=device, lead=(4,), widths=(3, 4, 5, 2))
            (first,) = torch.autograd.grad(
                getattr(net, name)(), net.weights[k], net.g, create_graph=True
            )
            results.append(torch.autograd.grad(first.square().sum(), net.leaves, allow_unused=True))
        assert_same(results[0], results[2], f"stack, weight {k}")
        assert_same(results[1], results[2], f"mlp, weight {k}")


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 0), (2, 1, 3)], ids=str)
def test_every_rank_and_no_rows(lead, device):
    net = Net(device=device, lead=lead, widths=(3, 17, 1, 2))
    want = net.eager()
    for call in (net.stack, net.mlp):
        y = call()
        assert_same([y, *net.grads(y)], [want, *net.grads(want, retain_graph=True)])


def test_nan_passes(device):
    net = Net(device=device, lead=(4,), widths=(3, 5, 2))
    with torch.no_grad():
        net.x[1, 0] = torch.nan
    want = net.eager()
    want = [want, *net.grads(want)]
    for call in (net.stack, net.mlp):
        y = call()
        for a, b in zip([y, *net.grads(y)], want):
            assert torch.equal(a.isnan(), b.isnan())
        assert y.isnan().any() and not y.isnan().all()


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["auto", "eager"])
def test_wrong_values(name, grad, device):
    net = Net(device=device, widths=(3, 4, 2))
    calls = {
        "linear_relu": lambda m: fused.linear_relu(net.x, net.weights[0], memory=m),
        "linear_gelu": lambda m: fused.linear_gelu(net.x, net.weights[0], memory=m),
        "mlp": lambda m: fused.mlp(net.x, net.weights, net.biases, "relu", memory=m),
    }
    for op, call in calls.items():
        for bad in ("", "Low", "lowest"):
            with (
                torch.set_grad_enabled(grad),
                policy(name),
                pytest.raises(
                    ERRORS, match=f"{op}: memory must be 'default' or 'low', got '{bad}'"
                ),
            ):
                call(bad)
        call("default"), call("low")


@pytest.mark.parametrize("name", ["auto", "cublaslt", "eager"])
def test_policies(name, device):
    net = Net(device=device, widths=(16, 24, 8))
    want = net.grads(net.eager())
    with policy(name):
        for call in (net.stack, net.mlp):
            assert_same(net.grads(call()), want)


def test_functional_forms(device):
    net = Net(device=device, widths=(128, 256, 128))
    x, w, b = net.x, net.weights, net.biases

    def layers():
        return tfl.linear(tfl.linear_gelu(x, w[0], b[0], memory="low"), w[1], b[1])

    assert kept_bytes(layers) == net.hidden_bytes
    assert kept_bytes(lambda: tfl.mlp(x, w, b, "gelu_tanh", memory="low")) == net.hidden_bytes
    assert kept_bytes(lambda: tfl.linear_relu(x, w[0], memory="low")) == ROWS * 256 // 8
    erf = tfl.linear_gelu(x, w[0], b[0], approximate="none", memory="low")
    assert_same([erf], [GELU_ERF.eager(x, w[0], b[0])])
