"""Whatever torch's own function takes is taken, with its result; what it refuses, with its class,
and with the operator, what was expected and what was got in the message.

Over a table of arguments: with gradients, without, in inference mode, under the policy "eager", and
on the meta device.
"""

import itertools
from functools import partial

import operators as ops
import pytest
import torch
import torch.nn.functional as F
from places import MODES
from watching import operators_of

import torch_fused_linear as tfl
from torch_fused_linear.activations import NUMBERS

FLOAT, DOUBLE, COMPLEX, BOOL = torch.float32, torch.float64, torch.complex64, torch.bool
fused = torch.ops.fused


def t(*shape, dtype=FLOAT):
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=COMPLEX if dtype.is_complex else FLOAT).to(dtype)
    return torch.randint(0, 2, shape).to(dtype)


def nested(layout=torch.strided):
    return torch.nested.nested_tensor([t(3, 4), t(2, 4)], layout=layout)


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
    "nested": lambda: (nested(), t(6, 4), t(6)),
    "nested, jagged": lambda: (nested(torch.jagged), t(6, 4), t(6)),
}
# And what the message has to show, where our words are in it.
REFUSED = {
    "in_features": (lambda: (t(5, 64), t(128, 32), None), ["64", "128, 32"]),
    "in_features, 1-D": (lambda: (t(5, 4), t(3), None), ["5, 4", "[3]"]),
    "weight transposed": (lambda: (t(5, 64), t(64, 128), None), ["64", "64, 128"]),
    "weight 3-D": (lambda: (t(5, 64), t(2, 3, 64), None), ["weight", "2, 3, 64"]),
    "weight 0-D": (lambda: (t(5, 1), t(), None), ["weight", "[]"]),
    "weight [in], bias [1]": (lambda: (t(4), t(4), t(1)), ["bias", "[1]"]),
    "weight [in], input 2-D, bias": (lambda: (t(5, 4), t(4), t()), []),
    "input 0-D": (lambda: (t(), t(3, 1), None), ["input", "[]"]),
    "bias too long": (lambda: (t(5, 4), t(6, 4), t(7)), ["bias", "6", "7"]),
    "bias of in_features": (lambda: (t(5, 4), t(6, 4), t(4)), ["bias", "6", "4"]),
    "bias larger than the output": (lambda: (t(4), t(6, 4), t(5, 6)), ["bias", "5, 6"]),
    "weight's dtype": (
        lambda: (t(5, 4), t(6, 4, dtype=torch.bfloat16), None),
        ["weight", "Float", "BFloat16"],
    ),
    "weight's dtype, integer": (lambda: (t(5, 4), t(6, 4, dtype=torch.int64), None), ["Long"]),
    "bias's dtype": (lambda: (t(5, 4), t(6, 4), t(6, dtype=DOUBLE)), ["bias", "Double"]),
    "booleans": (lambda: (t(5, 4, dtype=BOOL), t(6, 4, dtype=BOOL), None), ["input", "Bool"]),
    "sparse weight, bias": (lambda: (t(5, 4), t(6, 4).to_sparse(), t(6)), []),
    "nested, wrong size": (lambda: (nested(), t(6, 5), t(6)), []),
}
ARGUMENTS = {**TAKEN, **{name: make for name, (make, _) in REFUSED.items()}}
pytestmark = pytest.mark.filterwarnings("ignore")
# torch has no meta tensors of the other layouts.
ON_META = [name for name in ARGUMENTS if not name.startswith(("nested", "sparse", "com", "oneDNN"))]


def thinned(names, modes):
    """Every operator with gradients; else the product alone, and one of the activations."""
    for k, (name, mode) in enumerate(itertools.product(names, modes)):
        for op in ops.OPS if mode == "gradients" else (ops.LINEAR, ops.OPS[1 + k % 5]):
            yield pytest.param(name, mode, op, id=f"{name}-{mode}-{op}")


def outcome(function, args, grad):
    """The result with the gradients, or the error."""
    if grad:
        args = [None if a is None else a.detach().clone() for a in args]
        for a in args:
            if a is not None and (a.is_floating_point() or a.is_complex()):
                a.requires_grad_()
    try:
        y = function(*args)
        if not (grad and y.requires_grad):
            return [y]
        total = y.values().sum() if y.is_nested and y.layout == torch.jagged else None
        if y.is_nested and total is None:
            total = torch.nested.to_padded_tensor(y, 0.0).sum()
        total = y.to_dense().abs().sum() if total is None else total
        leaves = [a for a in args if a is not None and a.requires_grad]
        return [y, *torch.autograd.grad(total, leaves)]
    except ops.ERRORS as error:
        return error


def dense(tensor):
    if tensor.is_nested:
        return torch.cat([part.flatten() for part in tensor.detach().unbind()])
    return tensor.detach().to_dense()


def assert_same_outcome(ours, torchs, label):
    if isinstance(torchs, Exception):
        assert type(ours) is type(torchs), f"{label}: {ours}, torch raises {torchs}"
        return
    assert not isinstance(ours, Exception), f"{label}: {ours}, torch takes it"
    for a, b in zip(ours, torchs, strict=True):
        assert (a.dtype, a.layout, a.is_nested) == (b.dtype, b.layout, b.is_nested), label
        if not b.is_meta:
            torch.testing.assert_close(dense(a), dense(b), msg=lambda m: f"{label}: {m}")
        assert a.is_nested or a.shape == b.shape, label


def assert_words(error, name, shown):
    message = str(error)
    assert name in message and "got" in message, message
    assert all(part in message for part in shown), f"{shown} in: {message}"


def outcome_beside_torchs(op, args, mode, label, shown):
    """The function and the operator return or raise as torch does."""
    grad = mode in ("gradients", "eager")
    with MODES[mode]():
        torchs = outcome(op.eager, args, grad)
        for call in (op.call, op.function):
            ours = outcome(call, args, grad)
            assert_same_outcome(ours, torchs, f"{op!r}, {label}, {mode}")
            if shown:
                assert_words(ours, op.name, shown)
    return torchs


@pytest.mark.parametrize("name, mode, op", thinned(ARGUMENTS, MODES))
def test_a_layer_does_as_torch_does(name, mode, op):
    shown = REFUSED[name][1] if name in REFUSED else []
    torchs = outcome_beside_torchs(op, ARGUMENTS[name](), mode, name, shown)
    assert name in TAKEN or isinstance(torchs, Exception), "torch takes it now"
    assert torch.equal(op.call(t(5, 4) * 0, t(6, 4)), torch.zeros(5, 6)), "it is usable still"


@pytest.mark.parametrize("name, mode, op", thinned(ON_META, ["no_grad"]))
def test_on_the_meta_device(name, mode, op):
    """Tracing gives the shapes of a real call, and the messages of its errors."""
    args = ARGUMENTS[name]()
    real = outcome(op.call, args, False)
    metas = [a if a is None else a.to("meta") for a in args]
    ours, torchs = (outcome(call, metas, False) for call in (op.call, op.eager))
    if isinstance(ours, Exception):  # torch does not see every fault there
        assert type(ours) is type(real)
        if not isinstance(torchs, Exception):
            assert_words(ours, op.name, REFUSED[name][1])
        return
    assert (ours[0].shape, ours[0].layout) == (torchs[0].shape, torchs[0].layout)
    if not isinstance(real, Exception):
        torch.testing.assert_close(ours[0], real[0].to("meta"), check_stride=True)


@ops.op_param
def test_compiled(op, fresh_compiler):
    names = ["weight [in]", "integers", "bias [1]", "bias [rows, out]"]
    name = names[ops.OPS.index(op) % len(names)]
    args = TAKEN[name]()
    compiled = torch.compile(op.call, backend="aot_eager", fullgraph=True)
    grad = args[0].is_floating_point()
    assert_same_outcome(outcome(compiled, args, grad), outcome(op.eager, args, grad), name)


@pytest.mark.cuda
@ops.policy_param
@ops.op_param
@pytest.mark.parametrize("wrong", ["in_features", "weight 3-D", "bias too long", "bias's dtype"])
def test_words_on_a_gpu(wrong, op, policy, cuda):
    make, shown = REFUSED[wrong]
    args = [None if a is None else a.to(cuda) for a in make()]
    with tfl.set_policy(policy):
        for grad in (False, True):
            assert_words(outcome(op.call, args, grad), op.name, shown)


@ops.rows([*ops.OPS, *ops.GATED, *ops.CHAINS, ops.CONV])
def test_mixed_devices(op, device):
    inputs = op.case(dtype=FLOAT, device=device).inputs
    for other in {"meta", "cpu"} - {device.type}:
        for k, moved in enumerate(inputs):
            args = [*inputs[:k], moved.to(other), *inputs[k + 1 :]]
            assert_words(outcome(op.call, args, False), op.name, [other, device.type])


# --- options -------------------------------------------------------------------------------------

X, W, V, D = torch.randn(3, 4), torch.randn(6, 4), torch.randn(6, 4), torch.randn(3, 6)
G, Y, IMAGES = torch.randn(3, 6), torch.ones(3, 6), torch.randn(2, 4, 7, 6)
CHOICES = "must be 'relu', 'gelu_tanh', 'gelu_erf', 'silu' or 'relu2'"
LOWER = "memory must be 'default' or 'low', got 'less'"
NONE, RELU, GELU, SILU = (NUMBERS[name] for name in ("none", "relu", "gelu_tanh", "silu"))
PREVIOUS = (X, X, W[:4], None, NONE, [True, True, False], X)
OPTIONS = {  # the operator or step, its arguments, the error and its words
    "approximate": ("linear_gelu", (X, W), {"approximate": "erf"}, ValueError,
                    "approximate must be .*'tanh'.*'none'.*got 'erf'"),
    **{f"memory of {name}": (name, args, {"memory": "less"}, ValueError, LOWER)
       for name, args in (("linear_relu", (X, W)), ("linear_gelu", (X, W)), ("linear_silu", (X, W)),
                          ("linear_relu2", (X, W)), ("linear_glu", (X, W, V)),
                          ("gated_mlp", (X, W, V, D)), ("mlp", (X, [W], [None], "relu")))},
    **{f"activation {text!r} of mlp": ("mlp", (X, [W, D], [None] * 2, text), {}, ValueError,
                                       f"activation {CHOICES}, got '{text}'")
       for text in ("none", "gelu", "ReLU", "")},
    **{f"activation {text!r} of linear_glu": ("linear_glu", (X, W, V), {"activation": text},
                                              ValueError, f"activation {CHOICES}, got '{text}'")
       for text in ("none", "tanh")},
    **{f"{name}: {words}": (name, args, {}, ops.ERRORS, f"got.*{words}") for name, args, words in (
        ("_activation_backward", (G, Y[:2], RELU, True), "2, 6"),
        ("_activation_backward", (G, Y.double(), RELU, True), "Double"),
        ("_activation_backward", (G, Y.byte(), GELU, True), "Byte"),
        ("_linear_backward", (G, X, W, None, RELU, [True] * 3), "None"),
        ("_linear_backward", (G, X, W[:, :3], Y, RELU, [True] * 3), "6, 3"),
        ("_linear_backward", (G[None], X[None], W[None], None, SILU, [True] * 3), "None"),
        ("_linear_backward", (G[:2], X, W, Y, RELU, [True] * 3), "2, 6"),
        ("_linear_aux", (X, W.t(), None, RELU), "4, 6"),
        ("_relu_mask", (Y.byte(),), "Byte"),
        ("_relu_mask", (Y[0, 0],), "0-dim"),
        ("_glu_backward", (D, X, X, SILU, [True] * 5, W[:, :3]), "6, 3"),
        ("_glu_backward", (D, X, X, SILU, [True] * 5, W[:5]), "3, 6"),
        ("_glu_backward", (D, X, X, SILU, [True] * 5, W.double()), "Double"),
        ("_channels_relu_backward", (IMAGES, IMAGES[:1], True), "1, 4, 7, 6"),
        ("_channels_relu_backward", (IMAGES[0], IMAGES[0], True), "4, 7, 6"),
        ("_channels_relu_backward", (IMAGES, IMAGES.double(), True), "Double"),
        ("_channels_relu_backward", (IMAGES.long(), IMAGES.long(), True), "Long"))},
    "no layers": ("mlp", (X, [], [], "relu"), {}, ValueError, "at least one tensor, got none"),
    "biases": ("mlp", (X, [W, D], [None], "relu"), {}, ValueError, "the 2 weights, got 1"),
    "biases too many": ("mlp", (X, [W], [None] * 2, "relu"), {}, ValueError, "1 weights, got 2"),
    "odd": ("linear_glu", (X, W[:5]), {}, ValueError,
            r"must have shape \[2 \* hidden, in\].*got \[5, 4\]"),
    "up's bias alone": ("linear_glu", (X, W, None, None, V[0]), {}, ValueError,
                        "up_bias must be None"),
    "features": ("linear_glu", (X, W[:, :3], V), {}, RuntimeError, r"got .*gate Float \[6, 3\]"),
    "sizes": ("linear_glu", (X, W, V[:5]), {}, RuntimeError, r"got .*up Float \[5, 4\]"),
    "dtypes": ("linear_glu", (X, W, V.double()), {}, RuntimeError, "got .*up Double"),
    "down": ("gated_mlp", (X, W, V, D[:, :5]), {}, RuntimeError, r"got .*down Float \[3, 5\]"),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["auto", "eager"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("wrong", OPTIONS)
def test_wrong_options_and_sizes(wrong, grad, policy):
    name, args, options, error, words = OPTIONS[wrong]

    def leaf(a):
        if isinstance(a, torch.Tensor):
            return a.clone().requires_grad_(grad and a.is_floating_point())
        return [leaf(b) for b in a] if isinstance(a, list) else a

    for functions in (fused, tfl) if hasattr(tfl, name) else (fused,):
        with tfl.set_policy(policy), pytest.raises(error, match=f"(?s){name}.*{words}"):
            getattr(functions, name)(*map(leaf, args), **options)


# --- chains, gated layers ------------------------------------------------------------------------

DEEP = {  # input, weights, biases; the layer that is to blame and what is said of it
    "usual": (t(5, 4), [t(6, 4), t(3, 6)], [t(6), None], []),
    "bias [1]": (t(5, 4), [t(6, 4), t(3, 6)], [t(1), t(5, 3)], []),
    "last weight [in]": (t(5, 4), [t(6, 4), t(6)], [t(6), None], []),
    "nested": (nested(), [t(6, 4), t(3, 6)], [None, None], []),
    "sizes": (t(5, 4), [t(6, 4), t(3, 5)], [None, None], ["layer 1:", "weight Float [3, 5]"]),
    "first sizes": (t(5, 3), [t(6, 4), t(3, 6)], [None] * 2, ["layer 0:", "input Float [5, 3]"]),
    "dtype": (t(5, 4), [t(6, 4), t(3, 6, dtype=DOUBLE)], [None] * 2, ["layer 1:", "Double"]),
    "bias's dtype": (t(5, 4), [t(6, 4)], [t(6, dtype=DOUBLE)], ["layer 0:", "bias Double"]),
    "bias's size": (t(5, 4), [t(6, 4), t(3, 6)], [None, t(6)], ["layer 1:", "bias Float [6]"]),
    "first weight [in]": (t(5, 4), [t(4), t(3, 6)], [None, None], ["layer 1:", "[5]"]),
    "integers": (t(5, 4, dtype=torch.int64), [t(6, 4)], [None], ["layer 0:", "input Long"]),
    "input 0-D": (t(), [t(6, 4)], [None], ["layer 0:", "input Float []"]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DEEP)
def test_a_chain_does_as_torch_does(name, mode):
    x, weights, biases, shown = DEEP[name]
    op = ops.mlp("relu", len(weights))
    outcome_beside_torchs(op, [x, *weights, *biases], mode, name, shown)


def test_gated_layers_that_no_kernel_takes():
    wide = [a.to(COMPLEX) for a in (X, W, V)]
    with pytest.raises(ops.ERRORS):
        fused.linear_glu(*wide, activation="gelu_erf")  # torch has none either
    want = F.silu(wide[0] @ wide[1].t()) * F.linear(wide[0], wide[2])
    torch.testing.assert_close(fused.linear_glu(*wide), want)
    got = fused.linear_glu(torch.nested.nested_tensor([X, X[:2]]), W, V)
    for part, x in zip(got.unbind(), (X, X[:2])):
        torch.testing.assert_close(part, F.silu(x @ W.t()) * (x @ V.t()))


# --- convolutions --------------------------------------------------------------------------------

IMAGE, KERNEL = (2, 4, 7, 6), (6, 4, 3, 3)
HALF = torch.float16
UNUSUAL_CONV = {  # what is unusual, and what the message has to show; None where torch takes it
    "usual": ({"b": (6,)}, None),
    "integers": ({"change": torch.Tensor.long}, None),
    "complex": ({"change": lambda a: a.to(COMPLEX)}, None),
    "oneDNN's layout": ({"change": torch.Tensor.to_mkldnn}, None),
    "input 2-D": ({"x": (4, 4)}, ["input", "4, 4"]),
    "input 5-D": ({"x": (1, 1, 4, 7, 6)}, ["input", "1, 1, 4, 7, 6"]),
    "weight 2-D": ({"w": (6, 4)}, ["weight", "6, 4"]),
    "channels": ({"w": (6, 3, 3, 3)}, ["weight", "4 channels", "6, 3, 3, 3"]),
    "channels of a group": ({"groups": 2}, ["weight", "2 groups"]),
    "groups and out_channels": ({"w": (7, 2, 3, 3), "groups": 2}, ["groups", "7"]),
    "no groups": ({"groups": 0}, ["groups", "0"]),
    "empty kernel": ({"w": (6, 4, 0, 3)}, ["weight", "6, 4, 0, 3"]),
    "kernel too large": ({"w": (6, 4, 3, 9), "padding": [1, 1]}, ["width", "9", "8"]),
    "no pixels": ({"x": (2, 4, 7, 0), "padding": [1, 2]}, ["pixel", "2, 4, 7, 0"]),
    "dilated too far": ({"dilation": [4, 1]}, ["height", "9", "7"]),
    "bias length": ({"b": (7,)}, ["bias", "6", "7"]),
    "bias [1]": ({"b": (1,)}, ["bias", "6", "1"]),
    "bias 2-D": ({"b": (6, 1)}, ["bias", "6, 1"]),
    "stride 0": ({"stride": [0, 1]}, ["stride", "0, 1"]),
    "three strides": ({"stride": [1, 1, 1]}, ["stride", "1, 1, 1"]),
    "padding": ({"padding": [0, -1]}, ["padding", "0, -1"]),
    "dilation": ({"dilation": [0, 0]}, ["dilation", "0, 0"]),
    "weight dtype": ({"w": t(*KERNEL).to(HALF)}, ["weight", "Float", "Half"]),
    "bias dtype": ({"b": t(6).to(HALF)}, ["bias", "Half"]),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", UNUSUAL_CONV)
def test_convolution_does_as_torch_does(name, mode, device):
    given, shown = UNUSUAL_CONV[name]
    geometry = {"x": IMAGE, "w": KERNEL, "b": None, **given}
    tensors = [geometry.pop(letter) for letter in "xwb"]
    tensors = [a if a is None or torch.is_tensor(a) else t(*a) for a in tensors]
    change = geometry.pop("change", None)
    if change and device.type == "cuda":
        pytest.skip("of the CPU")
    tensors = [a if a is None else change(a) if change else a.to(device) for a in tensors]
    op = ops.conv(**geometry)
    torchs = outcome_beside_torchs(op, tensors, mode, name, shown)
    assert isinstance(torchs, Exception) or shown is None
    if shown:
        metas = [a if a is None else a.to("meta") for a in tensors]
        assert_words(outcome(op.call, metas, False), "", shown)


# --- what explain says ---------------------------------------------------------------------------

REASONS = {
    "nested": "nested tensor",
    "sparse input": "layout",
    "integers": "dtype",
    "bias of another dtype, strided": "dtypes differ",
    "weight [in]": "shape of weight",
    "bias [1]": "shape of bias",
    "nested, jagged": "tensor subclass",
}


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("grad", [False, True])
def test_explain_says_why(grad, name):
    args = TAKEN[name]()
    ran = operators_of(lambda: outcome(ops.OPS[1].function, args, grad), "operator", "path")
    assert ran == [("linear_relu", f"(no kernel: {REASONS[name]}) + PyTorch's own (not fused)")]


def test_an_argument_that_is_no_tensor_is_named():
    x, w = t(5, 4), t(6, 4)
    calls = {
        "linear_relu: expected weight": lambda: tfl.linear_relu(x, None),
        "linear_gelu: expected input": lambda: tfl.linear_gelu(3, w),
        "mlp: expected input": lambda: tfl.mlp(None, [w], [None]),
        "linear_glu: expected gate": lambda: tfl.linear_glu(x, None, w),
        "gated_mlp: expected down": lambda: tfl.gated_mlp(x, w, w, None),
        "conv2d_relu: expected weight": lambda: tfl.conv2d_relu(x, "same"),
        "linear_relu: expected bias to be": lambda: tfl.linear_relu(x, w, 1.0),
        "mlp: expected weights to be": lambda: tfl.mlp(x, w, [None]),
        r"mlp: expected biases\[0\] to be": lambda: tfl.mlp(x, [w], [1.0]),
        "linear_silu: expected input and weight to be": lambda: fused.linear_silu(x, None),
        "mlp, layer 0: expected input and weight to be": lambda: fused.mlp(None, [w], [None]),
        "linear_glu: expected input and weight to be": lambda: fused.linear_glu(None, w),
        "conv2d_relu: expected input and weight to be": lambda: fused.conv2d_relu(None, w),
        "gated_mlp: expected down to be a tensor, got None": lambda: fused.gated_mlp(x, w, w, None),
        "accumulate_gradients: expected a .*, got int": lambda: tfl.accumulate_gradients(3),
    }
    names = ("fuse_", "unfuse_", "gain", "pack_weights", "unpack_weights")
    calls |= {
        f"^{n}: expected an nn.Module, got Tensor": partial(getattr(tfl, n), x) for n in names
    }
    for message, call in calls.items():
        with pytest.raises(TypeError, match=message):
            call()
