"""Whatever torch's own function takes is taken, with its result; what it refuses, with its class.

The operators beside F.linear (F.conv2d) and the activation, over a table of arguments: on the CPU
with gradients, without, in inference mode, and on the meta device.
"""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import OPS, one_thread, op_param, policy  # noqa: F401

import torch_fused_linear as tfl

FUNCTIONS = {
    "none": tfl.linear,
    "relu": tfl.linear_relu,
    "gelu_tanh": tfl.linear_gelu,
    "gelu_erf": lambda *args: tfl.linear_gelu(*args, approximate="none"),
    "silu": tfl.linear_silu,
    "relu2": tfl.linear_relu2,
}
FLOAT, DOUBLE, COMPLEX = torch.float32, torch.float64, torch.complex64


def t(*shape, dtype=FLOAT):
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else FLOAT).to(dtype)
    return torch.randint(0, 2, shape).to(dtype)


TAKEN = {
    "usual": lambda: (t(5, 4), t(6, 4), t(6)),
    "weight [in]": lambda: (t(5, 4), t(4), None),
    "weight [in], input 1-D": lambda: (t(4), t(4), None),
    "weight [in], input 3-D, bias": lambda: (t(2, 5, 4), t(4), t()),
    "weight [in], input 1-D, bias": lambda: (t(4), t(4), t()),
    "bias [1]": lambda: (t(5, 4), t(6, 4), t(1)),
    "bias []": lambda: (t(5, 4), t(6, 4), t()),
    "bias [1, out]": lambda: (t(5, 4), t(6, 4), t(1, 6)),
    "bias [rows, out]": lambda: (t(5, 4), t(6, 4), t(5, 6)),
    "bias [rows, 1]": lambda: (t(5, 4), t(6, 4), t(5, 1)),
    "bias [1], input 1-D": lambda: (t(4), t(6, 4), t(1)),
    "bias [5, out], input 3-D, strided": lambda: (t(2, 4, 5).mT, t(6, 4), t(5, 6)),
    "bias [1], input 4-D": lambda: (t(2, 2, 5, 4), t(6, 4), t(1)),
    "bias of one output": lambda: (t(5, 4), t(1, 4), t(5, 1)),
    "bias of another dtype, strided": lambda: (t(2, 4, 5).mT, t(6, 4), t(6, dtype=DOUBLE)),
    "integers": lambda: (t(5, 4, dtype=torch.int64), t(6, 4, dtype=torch.int64), None),
    "complex": lambda: (t(5, 4, dtype=COMPLEX), t(6, 4, dtype=COMPLEX), None),
    "sparse input": lambda: (t(5, 4).to_sparse(), t(6, 4), t(6)),
    "sparse input, no bias": lambda: (t(5, 4).to_sparse(), t(6, 4), None),
    "sparse weight": lambda: (t(5, 4), t(6, 4).to_sparse(), None),
    "compressed weight": lambda: (t(5, 4), t(6, 4).to_sparse_csr(), t(6)),
    "compressed input": lambda: (t(5, 4).to_sparse_csr(), t(6, 4), None),
    "oneDNN's layout": lambda: (t(5, 4).to_mkldnn(), t(6, 4).to_mkldnn(), t(6).to_mkldnn()),
    "nested": lambda: (torch.nested.nested_tensor([t(3, 4), t(2, 4)]), t(6, 4), t(6)),
    "nested, jagged": lambda: (
        torch.nested.nested_tensor([t(3, 4), t(2, 4)], layout=torch.jagged),
        t(6, 4),
        t(6),
    ),
}
REFUSED = {
    "in_features": lambda: (t(5, 64), t(128, 32), None),
    "in_features, 1-D": lambda: (t(5, 4), t(3), None),
    "weight transposed": lambda: (t(5, 64), t(64, 128), None),
    "weight 3-D": lambda: (t(5, 64), t(2, 3, 64), None),
    "weight 0-D": lambda: (t(5, 1), t(), None),
    "weight [in], bias [1]": lambda: (t(4), t(4), t(1)),
    "weight [in], input 2-D, bias": lambda: (t(5, 4), t(4), t()),
    "input 0-D": lambda: (t(), t(3, 1), None),
    "bias too long": lambda: (t(5, 4), t(6, 4), t(7)),
    "bias of in_features": lambda: (t(5, 4), t(6, 4), t(4)),
    "bias larger than the output": lambda: (t(4), t(6, 4), t(5, 6)),
    "weight's dtype": lambda: (t(5, 4), t(6, 4, dtype=torch.bfloat16), None),
    "weight's dtype, integer": lambda: (t(5, 4), t(6, 4, dtype=torch.int64), None),
    "bias's dtype": lambda: (t(5, 4), t(6, 4), t(6, dtype=DOUBLE)),
    "booleans": lambda: (t(5, 4, dtype=torch.bool), t(6, 4, dtype=torch.bool), None),
    "sparse weight, bias": lambda: (t(5, 4), t(6, 4).to_sparse(), t(6)),
    "nested, wrong size": lambda: (torch.nested.nested_tensor([t(3, 4), t(2, 4)]), t(6, 5), t(6)),
}
MODES = {
    "gradients": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "eager": lambda: policy("eager"),
}


def outcome(function, args, grad):
    """The result, or the class of the error, and the gradients."""
    if grad:
        args = [None if a is None else a.detach().clone() for a in args]
        for a in args:
            if a is not None and (a.is_floating_point() or a.is_complex()):
                a.requires_grad_()
    try:
        y = function(*args)
        if not (grad and y.requires_grad):
            return y
        total = y.values().sum() if y.is_nested and y.layout == torch.jagged else None
        if y.is_nested and total is None:
            total = torch.nested.to_padded_tensor(y, 0.0).sum()
        total = y.to_dense().abs().sum() if total is None else total
        leaves = [a for a in args if a is not None and a.requires_grad]
        return y, *torch.autograd.grad(total, leaves)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return type(error)


def dense(tensor):
    if tensor.is_nested:
        return torch.cat([part.flatten() for part in tensor.detach().unbind()])
    return tensor.detach().to_dense()


def assert_same_outcome(ours, torchs, label):
    if isinstance(torchs, type):
        assert ours is torchs, f"{label}: {ours}, torch raises {torchs}"
        return
    assert not isinstance(ours, type), f"{label}: {ours}, torch takes it"
    ours, torchs = ([r] if isinstance(r, torch.Tensor) else r for r in (ours, torchs))
    for a, b in zip(ours, torchs, strict=True):
        assert (a.dtype, a.layout, a.is_nested) == (b.dtype, b.layout, b.is_nested), label
        if not b.is_meta:
            torch.testing.assert_close(dense(a), dense(b), msg=lambda m: f"{label}: {m}")
        assert a.is_nested or a.shape == b.shape, label


@pytest.fixture(autouse=True)
def quiet():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@op_param
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
def test_function_and_operator_do_as_torch_does(name, mode, op):
    args = (TAKEN | REFUSED)[name]()
    grad = mode in ("gradients", "eager")
    with MODES[mode]():
        torchs = outcome(op.eager, args, grad)
        assert (name in TAKEN) or isinstance(torchs, type), "torch takes it now"
        for call in (op.call, FUNCTIONS[op.activation]):
            assert_same_outcome(outcome(call, args, grad), torchs, f"{op!r}, {name}, {mode}")


@op_param
@pytest.mark.parametrize("name", [n for n in [*TAKEN, *REFUSED] if "nested" not in n])
def test_on_the_meta_device(name, op):
    """What is traced has the shape of what is run."""
    args = (TAKEN | REFUSED)[name]()
    if any(a is not None and a.layout != torch.strided for a in args):
        pytest.skip("torch has no meta tensors of the layout")
    real = outcome(op.call, args, False)
    metas = [a if a is None else a.to("meta") for a in args]
    ours, torchs = (outcome(call, metas, False) for call in (op.call, op.eager))
    if isinstance(ours, type):  # torch does not see every fault there
        assert ours is real
        return
    assert_same_outcome(ours, torchs, name)
    if not isinstance(real, type) and torchs.dtype == real.dtype:
        assert real.shape == ours.shape and real.stride() == ours.stride()


@op_param
@pytest.mark.parametrize("name", ["weight [in]", "bias [1]", "bias [rows, out]", "integers"])
def test_compiled(name, op):
    args = TAKEN[name]()
    torch._dynamo.reset()
    compiled = torch.compile(op.call, backend="aot_eager", fullgraph=True)
    grad = args[0].is_floating_point()
    torchs = outcome(op.eager, args, grad)
    assert_same_outcome(outcome(compiled, args, grad), torchs, name)


@pytest.mark.parametrize("mode", MODES)
def test_a_chain_does_as_torch_does(mode):
    cases = {
        "usual": (t(5, 4), [t(6, 4), t(3, 6)], [t(6), None]),
        "bias [1]": (t(5, 4), [t(6, 4), t(3, 6)], [t(1), t(5, 3)]),
        "last weight [in]": (t(5, 4), [t(6, 4), t(6)], [t(6), None]),
        "nested": (torch.nested.nested_tensor([t(3, 4)]), [t(6, 4), t(3, 6)], [None, None]),
        "sizes": (t(5, 4), [t(6, 4), t(3, 5)], [None, None]),
        "first sizes": (t(5, 3), [t(6, 4), t(3, 6)], [None, None]),
        "dtype": (t(5, 4), [t(6, 4), t(3, 6, dtype=DOUBLE)], [None, None]),
    }
    for name, (x, weights, biases) in cases.items():

        def chain(function, x=x, weights=weights, biases=biases):
            def run(*tensors):
                n = len(weights)
                return function(tensors[0], list(tensors[1 : n + 1]), list(tensors[n + 1 :]))

            return outcome(run, [x, *weights, *biases], mode in ("gradients", "eager"))

        def eager(x, weights, biases):
            for w, b in zip(weights[:-1], biases[:-1]):
                x = F.relu(F.linear(x, w, b))
            return F.linear(x, weights[-1], biases[-1])

        with MODES[mode]():
            torchs = chain(eager)
            for function in (tfl.mlp, lambda *a: torch.ops.fused.mlp(*a, "relu")):
                assert_same_outcome(chain(function), torchs, name)


# --- convolution --------------------------------------------------------------------------------

IMAGE = (2, 3, 8, 8)
CONV = {
    "usual": lambda: (t(*IMAGE), t(4, 3, 3, 3), t(4)),
    "integers": lambda: (t(*IMAGE, dtype=torch.int64), t(4, 3, 3, 3, dtype=torch.int64), None),
    "complex": lambda: (t(*IMAGE, dtype=COMPLEX), t(4, 3, 3, 3, dtype=COMPLEX), None),
    "dtypes": lambda: (t(*IMAGE), t(4, 3, 3, 3, dtype=DOUBLE), None),
    "bias's dtype": lambda: (t(*IMAGE), t(4, 3, 3, 3), t(4, dtype=DOUBLE)),
    "bias's size": lambda: (t(*IMAGE), t(4, 3, 3, 3), t(5)),
    "bias [1]": lambda: (t(*IMAGE), t(4, 3, 3, 3), t(1)),
    "channels": lambda: (t(2, 5, 8, 8), t(4, 3, 3, 3), None),
    "small": lambda: (t(2, 3, 2, 2), t(4, 3, 3, 3), None),
    "5-D": lambda: (t(1, *IMAGE), t(4, 3, 3, 3), None),
    "stride": lambda: (t(*IMAGE), t(4, 3, 3, 3), None, [0, 0]),
    "padding": lambda: (t(*IMAGE), t(4, 3, 3, 3), None, [1, 1], [-1, -1]),
    "dilation": lambda: (t(*IMAGE), t(4, 3, 3, 3), None, [1, 1], [0, 0], [0, 0]),
    "groups": lambda: (t(*IMAGE), t(4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], 0),
    "groups of channels": lambda: (t(*IMAGE), t(4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], 2),
    "three strides": lambda: (t(*IMAGE), t(4, 3, 3, 3), None, [1, 1, 1]),
    "oneDNN's layout": lambda: (t(*IMAGE).to_mkldnn(), t(4, 3, 3, 3).to_mkldnn(), None),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["gradients", "inference"])
@pytest.mark.parametrize("name", CONV)
def test_convolution_does_as_torch_does(name, mode):
    tensors, geometry = CONV[name]()[:3], CONV[name]()[3:]
    grad = mode == "gradients"
    with MODES[mode]():
        torchs = outcome(lambda *a: F.relu(F.conv2d(*a, *geometry)), tensors, grad)
        for call in (tfl.conv2d_relu, torch.ops.fused.conv2d_relu):
            ours = outcome(lambda *a, call=call: call(*a, *geometry), tensors, grad)
            assert_same_outcome(ours, torchs, f"{name}, {mode}")


# --- what explain says --------------------------------------------------------------------------


def test_explain_says_why():
    reasons = {
        "nested": "nested tensor",
        "sparse input": "layout",
        "integers": "dtype",
        "bias of another dtype, strided": "dtypes differ",
        "weight [in]": "shape of weight",
        "bias [1]": "shape of bias",
        "nested, jagged": "tensor subclass",
    }
    for name, reason in reasons.items():
        for grad in (False, True):
            with tfl.explain() as report:
                outcome(tfl.linear_relu, TAKEN[name](), grad)
            paths = [(call.operator, call.path) for call in report.calls]
            assert paths == [
                ("linear_relu", f"(no kernel: {reason}) + PyTorch's own (not fused)")
            ], name
    assert len(OPS) == len(FUNCTIONS)


def test_an_unknown_approximate_is_the_layers_error():
    x, w = t(5, 4), t(6, 4)
    for call in (tfl.linear_gelu, torch.ops.fused.linear_gelu):
        with pytest.raises(ValueError, match=r"linear_gelu: approximate must be .*got 'erf'"):
            call(x, w, approximate="erf")
