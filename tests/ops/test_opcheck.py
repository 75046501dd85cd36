"""torch.library.opcheck on every operator; shape inference against real results; schemas, tags."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from layouts import ND_LAYOUTS
from operators import LINEAR, ODD, channels_last, dtype_param
from steps import ALL, PUBLIC, STEPS, arguments_of, samples
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_fused_linear.activations import NUMBERS

fused = torch.ops.fused
name_param = pytest.mark.parametrize("name", ALL)
QUICK = ["test_schema", "test_faketensor", "test_autograd_registration"]


def op_of(name):
    return getattr(fused, name).default


WITHOUT_IMAGES = [name for name in ALL if name not in ("conv2d_relu", "_channels_relu_backward")]
FORMS = [
    *((name, "contiguous", grad) for name in ALL for grad in (False, True)),
    *((name, laid, True) for name in WITHOUT_IMAGES for laid in ("transposed", "row_strided")),
]


@pytest.mark.parametrize("name, layout, grad", FORMS)
def test_opcheck(name, layout, grad, device):
    """Schema (no aliasing, no mutation), autograd registration, fake tensors, and tracing with
    dynamic shapes through AOTAutograd, forward and backward."""
    given = list(samples(name, device, layout=ND_LAYOUTS[layout], grad=grad))
    traced = 4 if grad and layout == "contiguous" else 2  # of every shape: one takes a second
    for k, (args, kwargs) in enumerate(given):
        is_traced = k % (len(given) // traced + 1) == 0
        tests = QUICK + ["test_aot_dispatch_dynamic"] * is_traced
        torch.library.opcheck(op_of(name), args, kwargs, test_utils=tests)


def strides(t):
    """The strides that matter: an image of one channel has the same layout in every format."""
    if t.dim() < 3 or not t.numel():
        return t.stride()
    return [s for n, s in zip(t.shape, t.stride()) if n != 1]


def assert_foretold(op, args, kwargs, fake=False):
    """By meta tensors, or by fake ones, which know the device as well."""
    real = op(*args, **kwargs)
    if fake:
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            told = op(*tree_map_only(torch.Tensor, mode.from_tensor, args), **kwargs)
    else:

        def as_meta(t):
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

        told = op(*tree_map_only(torch.Tensor, as_meta, args), **kwargs)
    shapes = [getattr(a, "shape", a) for a in tree_leaves(args)]
    results = [[t for t in tree_leaves(r) if t is not None] for r in (real, told)]
    for k, (a, b) in enumerate(zip(*results, strict=True)):
        ours, want = ((t.shape, t.dtype, strides(t)) for t in (b, a))
        assert ours == want, f"{op} {shapes}, result {k}: {ours}"
        assert not fake or b.device == a.device


@name_param
@dtype_param
def test_shapes_dtypes_and_strides_are_foretold(dtype, name, device):
    """Fake results have the real ones' strides, with padded rows and unwanted gradients."""
    for args, kwargs in samples(name, device, dtype):
        assert_foretold(op_of(name), args, kwargs, fake=True)
    for layout in ND_LAYOUTS if name in WITHOUT_IMAGES else ():
        if layout != "outer_swapped":
            for args, kwargs in samples(name, device, dtype, ND_LAYOUTS[layout]):
                assert_foretold(op_of(name), args, kwargs)


def test_odd_widths_and_empty_sizes_are_foretold(device):
    for t, i, o in itertools.product([0, 1, 3, 129], [0, 1, 7], [0, 1, 3, 8, 127, 128, 257]):
        case = LINEAR.case(t, i, o, torch.float32, device)
        for name in ("linear", "linear_relu", "linear_gelu", "linear_silu", "_linear_relu_bits"):
            assert_foretold(op_of(name), case.inputs, {})
        for activation in ("relu", "gelu_tanh"):
            assert_foretold(fused._linear_aux, (*case.inputs, NUMBERS[activation]), {})
        assert_foretold(fused._relu_mask, (case.g,), {})
        for weight in (case.w, case.w.t().contiguous().t()):
            args = case.g, case.x, weight, torch.double
            assert_foretold(fused._accumulated_weight_gradient, args, {})
        z = F.linear(*case.inputs)
        for wanted in itertools.product([False, True], repeat=3):
            args = (case.g, case.x, case.w, z.relu(), NUMBERS["relu"], list(wanted))
            assert_foretold(fused._linear_backward, args, {})


@pytest.mark.parametrize("odd", ODD)
@dtype_param
def test_convolutions_are_foretold(dtype, odd, device):
    for which in ("", "x", "w", "xw", "xwg"):
        case = channels_last(ODD[odd].case(dtype=dtype, device=device), which)
        args, kwargs = arguments_of(ODD[odd], case.inputs)
        for fake in (False, True):
            assert_foretold(fused.conv2d_relu, args, kwargs, fake)
        if case.g.dim() == 4:
            y = fused.conv2d_relu(*args)
            assert_foretold(fused._channels_relu_backward, (case.g, y, True), {})


@name_param
def test_tags_and_registrations(name):
    op = op_of(name)
    assert torch.Tag.pt2_compliant_tag in op.tags
    layout = {torch.Tag.needs_exact_strides, torch.Tag.needs_fixed_stride_order}
    assert layout & set(op.tags), "Inductor must not hand over other strides than were traced"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    above = ("AutocastCPU", "AutocastCUDA", "FuncTorchBatched")  # of which vmap's own is the end
    for key in ("CPU", "Meta", "Autograd", *(above if name != "_ensemble_linear" else ())):
        assert has(op.name(), key), key
    # a composite kernel would be bypassed by tensor subclasses and hide the operator
    assert not has(op.name(), "CompositeImplicitAutograd")


LAYER = "Tensor input, Tensor weight, Tensor? bias=None"
MEMORY = 'str memory="default"'
GATE_AND_UP = "Tensor input, Tensor gate, Tensor? up"
TWO_BIASES = "Tensor? gate_bias=None, Tensor? up_bias=None"
GATED = f'*, str activation="silu", {MEMORY}'
SCHEMAS = {
    "linear": f"({LAYER}) -> Tensor",
    "linear_relu": f"({LAYER}, *, {MEMORY}) -> Tensor",
    "linear_gelu": f'({LAYER}, *, str approximate="tanh", {MEMORY}) -> Tensor',
    "linear_silu": f"({LAYER}, *, {MEMORY}) -> Tensor",
    "linear_relu2": f"({LAYER}, *, {MEMORY}) -> Tensor",
    "mlp": "(Tensor input, Tensor[] weights, Tensor?[] biases, "
    f'str activation="relu", *, {MEMORY}) -> Tensor',
    "linear_glu": f"({GATE_AND_UP}=None, {TWO_BIASES}, {GATED}) -> Tensor",
    "gated_mlp": f"({GATE_AND_UP}, Tensor down, {TWO_BIASES}, Tensor? down_bias=None, {GATED})"
    " -> Tensor",
    "conv2d_relu": f"({LAYER}, SymInt[2] stride=[1, 1], SymInt[2] padding=[0, 0], "
    "SymInt[2] dilation=[1, 1], SymInt groups=1) -> Tensor",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(name):
    """They are an interface: scripts and exported programs name them."""
    assert str(op_of(name)._schema) == f"fused::{name}{SCHEMAS[name]}"


def test_every_operator_is_here():
    names = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fused::")}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    inferred = {n.removeprefix("fused::") for n in names if has(n, "Meta")}
    inferred = {n for n in inferred if not n.startswith("_float8_")}  # tests/float8 has these
    # The last two are put into a compiled backward, where there is no key above the kernels'.
    assert inferred == {*PUBLIC, *STEPS, "_accumulated_weight_gradient", "_storages"}
