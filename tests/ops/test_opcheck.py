"""torch.library.opcheck on every operator; shape inference against real results; tags."""

import itertools

import pytest
import torch
from helpers import DTYPES, device_param, encode_mask, random_case
from layouts import ND_LAYOUTS
from meta_tensors import as_meta, results
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_fused_linear.activations import ACTIVATIONS

fused = torch.ops.fused
ALL_OPS = [
    "linear",
    "linear_relu",
    "linear_gelu",
    "linear_silu",
    "linear_relu2",
    "_linear_aux",
    "_linear_relu_bits",
    "_relu_mask",
    "_activation_backward",
    "_linear_backward",
    "_weight_gradient",
    "linear_glu",
    "gated_mlp",
    "_linear_glu_aux",
    "_glu",
    "_glu_backward",
]
FORWARD, GATED = ALL_OPS[:7], ALL_OPS[11:]
SHAPES = [((5,), 7, 9), ((2, 3), 8, 16), ((), 4, 129), ((1,), 1, 1)]  # leading, in, out


def samples(name, device, dtype=torch.float32, layouts=("contiguous",), grad=False):
    """(args, kwargs) of an operator: no bias, N-D, odd and even widths, each form of saved."""
    for (lead, i, o), layout in itertools.product(SHAPES, layouts):
        case = random_case(lead, i, o, dtype, device)
        x, g = (ND_LAYOUTS[layout](t) if lead else t for t in (case.x, case.g))
        w, b = case.w, case.b
        if grad:
            x, w, b, g = (t.detach().requires_grad_() for t in (x, w, b, g))
        if name in FORWARD:
            options = [{}]
            if name == "linear_gelu":
                options = [{"approximate": form} for form in ("tanh", "none")]
            if name == "_linear_aux":
                options = [{"activation": activation} for activation in ACTIVATIONS]
            for bias, given in itertools.product([b, None], options):
                yield (x, w, bias), given
            continue
        if name == "_relu_mask":
            yield (g,), {}
            continue
        if name == "_weight_gradient":
            if not grad:  # it writes, and is not differentiated
                yield from (((g, x, w.clone(), adds), {}) for adds in (True, False))
            continue
        if name in GATED:
            yield from gated_samples(name, x, w, b, g)
            continue
        z = torch.nn.functional.linear(case.x, case.w, case.b)
        saved = [("relu", z.relu()), ("relu", encode_mask(z >= 0))]
        saved += [
            ("silu", z),
            ("relu2", z),
            ("gelu_tanh", z),
            ("gelu_erf", torch.nn.functional.pad(z, (0, 7))[..., :o]),
        ]
        for activation, s in saved:
            if name == "_activation_backward":
                yield (g, s, activation, o != 16), {}
            else:
                yield (g, x, w, s, activation, [True, True, o != 16]), {}
        if name == "_linear_backward":
            yield (g, x, w, None, "none", [True, True, True]), {}
            yield (g, x, w, z.relu(), "relu", [False, True, False]), {}


def gated_samples(name, x, w, b, g):
    """Gate and up apart and as one, with biases and without."""

    def leaf(tensor):
        return tensor.detach().requires_grad_(g.requires_grad)

    up, features = leaf(w * 0.5), g.shape[-1]
    if not name.startswith("_"):
        ends = () if name == "linear_glu" else (leaf(up.t()),)
        for gate, second, biases in [
            (w, up, (b, None)),
            (leaf(torch.cat([w, up])), None, (None, None)),
        ]:
            yield (x, gate, second, *ends, *biases), {"activation": "gelu_tanh"}
        yield (x, w, up, *ends, b, b), {"memory": "low"}
        return
    if name == "_linear_glu_aux":
        yield (x, w, up, b, None, "silu", True), {}
        yield (x, leaf(torch.cat([w, up])), None, None, None, "gelu_erf", True), {}
        yield (x, w, up, None, b, "gelu_tanh", False), {}
        return
    both = leaf(torch.cat([g, g.cos()], -1))
    for gate, second, activation in [(g, leaf(g.cos()), "silu"), (both, None, "gelu_erf")]:
        if name == "_glu":
            yield (gate, second, activation), {}
        else:
            apart = second is not None
            yield (g, gate, second, activation, [True, apart, True, apart, features != 16]), {}
            yield (g, gate, second, activation, [False, apart, False, False, True]), {}
            y = leaf(torch.cat([g, g], -1))  # of a layer that makes it twice as wide
            weight = leaf(torch.ones(2 * features, features, dtype=g.dtype, device=g.device))
            yield (y, gate, second, activation, [True, apart, False, False, True], weight), {}


def op_of(name):
    return getattr(fused, name).default


@device_param
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.parametrize("name", ALL_OPS)
def test_opcheck(name, grad, device):
    """Schema (no aliasing, no mutation), autograd registration, fake tensors, and tracing with
    dynamic shapes through AOTAutograd, forward and backward."""
    given = list(samples(name, device, grad=grad))
    forms = len(given) // len(SHAPES)
    for k, (args, kwargs) in enumerate(given):
        tests = ["test_schema", "test_faketensor", "test_autograd_registration"]
        # tracing takes a second: a third of the samples, and every form once, shape after shape
        shape, form = divmod(k, forms)
        if k % 3 == 0 or form % len(SHAPES) == shape:
            tests.append("test_aot_dispatch_dynamic")
        torch.library.opcheck(op_of(name), args, kwargs, test_utils=tests)


@device_param
@pytest.mark.parametrize("name", ALL_OPS)
def test_opcheck_of_strided_inputs(name, device):
    layouts = ("transposed", "row_strided")
    for k, (args, kwargs) in enumerate(samples(name, device, layouts=layouts, grad=True)):
        tests = ["test_schema", "test_faketensor"]
        if k % 8 == 3:
            tests.append("test_aot_dispatch_dynamic")
        torch.library.opcheck(op_of(name), args, kwargs, test_utils=tests)


def assert_same_layout(real, other, label):
    for k, (a, b) in enumerate(zip(results(real), results(other), strict=True)):
        told = (tuple(b.shape), b.dtype, b.stride())
        assert told == (tuple(a.shape), a.dtype, a.stride()), f"{label}, result {k}: {told}"


@device_param
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
@pytest.mark.parametrize("name", ALL_OPS)
def test_meta_tells_shape_dtype_and_strides(name, dtype, device):
    """What the compiler plans with must be what comes: padded rows, unwanted gradients, all."""
    layouts = [n for n in ND_LAYOUTS if n != "outer_swapped"]
    for args, kwargs in samples(name, device, dtype, layouts):
        real = op_of(name)(*args, **kwargs)
        meta = op_of(name)(*[as_meta(a) for a in args], **kwargs)
        assert_same_layout(real, meta, f"{name} {[getattr(a, 'shape', a) for a in args]}")


@device_param
def test_meta_over_odd_widths_and_empty_sizes(device):
    for t, i, o in itertools.product([0, 1, 3, 129], [0, 1, 7], [0, 1, 3, 8, 127, 128, 257]):
        case = random_case(t, i, o, torch.float32, device)
        for name in FORWARD:
            given = {"activation": "gelu_tanh"} if name == "_linear_aux" else {}
            real = op_of(name)(*case.inputs, **given)
            meta = op_of(name)(*(as_meta(a) for a in case.inputs), **given)
            assert_same_layout(real, meta, f"{name} {t}x{i}->{o}")
        real, meta = fused._relu_mask(case.g), fused._relu_mask(as_meta(case.g))
        assert_same_layout(real, meta, f"_relu_mask {t}x{o}")
        z = torch.nn.functional.linear(*case.inputs)
        for wanted in itertools.product([False, True], repeat=3):
            args = (case.g, case.x, case.w, z.relu(), "relu", list(wanted))
            real = fused._linear_backward(*args)
            meta = fused._linear_backward(*(as_meta(a) for a in args))
            assert_same_layout(real, meta, f"_linear_backward {t}x{i}->{o} {wanted}")


@device_param
@pytest.mark.parametrize("name", ALL_OPS)
def test_fake_tensors_know_the_device(name, device):
    for args, kwargs in samples(name, device, torch.bfloat16):
        real = op_of(name)(*args, **kwargs)
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            fake = op_of(name)(*fakes, **kwargs)
        assert_same_layout(real, fake, name)
        assert all(f.device.type == device for f in results(fake))


@pytest.mark.parametrize("name", ALL_OPS)
def test_tags_and_registrations(name):
    op = op_of(name)
    assert torch.Tag.pt2_compliant_tag in op.tags
    layout = {torch.Tag.needs_exact_strides, torch.Tag.needs_fixed_stride_order}
    assert layout & set(op.tags), "Inductor must not hand over other strides than were traced"
    for key in ("CPU", "Meta", "Autograd"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key), key
    # a composite kernel would be bypassed by tensor subclasses and hide the operator
    composite = "CompositeImplicitAutograd"
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), composite)
    for key in ("AutocastCPU", "AutocastCUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key), key


def test_schemas():
    """The schemas are an interface: scripts and exported programs name them."""
    arguments = "Tensor input, Tensor weight, Tensor? bias=None"
    gelu, memory = ', *, str approximate="tanh"', 'str memory="default"'
    want = {
        "linear": f"({arguments}) -> Tensor",
        "linear_relu": f"({arguments}, *, {memory}) -> Tensor",
        "linear_gelu": f"({arguments}{gelu}, {memory}) -> Tensor",
        "linear_silu": f"({arguments}, *, {memory}) -> Tensor",
        "linear_relu2": f"({arguments}, *, {memory}) -> Tensor",
        "_linear_aux": "(Tensor input, Tensor weight, Tensor? bias, str activation)"
        " -> (Tensor output, Tensor saved)",
        "_linear_relu_bits": f"({arguments}) -> (Tensor output, Tensor mask)",
        "_relu_mask": "(Tensor output) -> Tensor",
        "_activation_backward": "(Tensor grad_output, Tensor saved, str activation, bool bias_grad)"
        " -> (Tensor grad_preactivation, Tensor grad_bias)",
        "_linear_backward": "(Tensor grad_output, Tensor input, Tensor weight, Tensor? saved, "
        "str activation, bool[3] output_mask)"
        " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    }
    weights = "Tensor input, Tensor gate, Tensor? up"
    biases = "Tensor? gate_bias=None, Tensor? up_bias=None"
    options = '*, str activation="silu", str memory="default"'
    want |= {
        "linear_glu": f"({weights}=None, {biases}, {options}) -> Tensor",
        "gated_mlp": f"({weights}, Tensor down, {biases}, Tensor? down_bias=None, {options})"
        " -> Tensor",
        "_linear_glu_aux": "(Tensor input, Tensor gate, Tensor? up, Tensor? gate_bias, "
        "Tensor? up_bias, str activation, bool keeps) -> (Tensor output, "
        "Tensor gate_preactivation, Tensor up_preactivation)",
        "_glu": "(Tensor gate, Tensor? up, str activation) -> Tensor",
        "_glu_backward": "(Tensor grad_output, Tensor gate, Tensor? up, str activation, "
        "bool[5] output_mask, Tensor? down=None) -> (Tensor grad_gate, Tensor grad_up, "
        "Tensor grad_gate_bias, Tensor grad_up_bias, Tensor output)",
    }
    for name, schema in want.items():
        assert str(op_of(name)._schema) == f"fused::{name}{schema}"
