"""fused::mlp under torch's systems: opcheck, autocast, functorch, script, compile, export."""

import io
import itertools

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from chains import ACTIVATIONS, Chain, activation_param
from helpers import DTYPES, one_thread, policy  # noqa: F401
from stacks import OPS, assert_same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import torch_fused_linear as tfl

mlp = torch.ops.fused.mlp


def samples(device, grad=False, dtype=torch.float32):
    """(args) of calls: every activation and rank, odd widths, some biases, none."""
    shapes = [((5,), [7, 9, 3]), ((2, 3), [8, 16]), ((), [4, 129, 1, 2]), ((1,), [1, 1, 1])]
    for (lead, widths), activation in itertools.product(shapes, ACTIVATIONS):
        layers = len(widths) - 1
        for some in (False, True):
            chain = Chain(activation, layers, lead=lead, widths=widths, dtype=dtype, device=device)
            if some:
                chain.without_some_biases()
            if not grad:
                for leaf in chain.leaves:
                    leaf.requires_grad_(False)
            yield chain.x, chain.weights, chain.biases, activation


@pytest.mark.parametrize("with_grad", [False, True], ids=["plain", "requires_grad"])
def test_opcheck(with_grad, device):
    for k, args in enumerate(samples(device, with_grad)):
        tests = ["test_schema", "test_faketensor", "test_autograd_registration"]
        if k % 3 == 0:  # tracing takes a second
            tests.append("test_aot_dispatch_dynamic")
        torch.library.opcheck(mlp.default, args, test_utils=tests)


def test_opcheck_of_backward_across(device):
    for o, i, bias in itertools.product([1, 9], [3, 16], [True, False]):
        x, w, g = (torch.randn(*s, device=device) for s in ((5, i), (o, i), (5, o)))
        mask = torch.randint(0, 256, (5, (i + 127) // 128 * 16), dtype=torch.uint8, device=device)
        for previous, kept in (("relu", x), ("relu", mask), ("gelu_tanh", x), ("gelu_erf", x)):
            for own, saved in (("none", None), ("gelu_tanh", g.cos()), ("relu", g.relu())):
                args = (g, x, w, saved, own, [True, o == 1, bias], kept, previous, bias)
                tests = ["test_schema", "test_faketensor", "test_autograd_registration"]
                torch.library.opcheck(
                    torch.ops.fused._linear_backward_across.default, args, test_utils=tests
                )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_meta_tells_shape_dtype_and_strides(dtype, device):
    def to_meta(t):
        return (
            None
            if t is None
            else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        )

    for x, weights, biases, activation in samples(device, dtype=dtype):
        real = mlp(x, weights, biases, activation)
        meta = mlp(to_meta(x), [*map(to_meta, weights)], [*map(to_meta, biases)], activation)
        with FakeTensorMode() as mode:
            f = [mode.from_tensor(t) for t in (x, *weights)]
            b = [None if t is None else mode.from_tensor(t) for t in biases]
            fake = mlp(f[0], f[1:], b, activation)
        for told in (meta, fake):
            assert (told.shape, told.dtype) == (real.shape, real.dtype)
            assert told.stride() == real.stride()
        assert fake.device.type == device.type


def test_schema_and_registrations():
    schema = (
        "fused::mlp(Tensor input, Tensor[] weights, Tensor?[] biases, "
        'str activation="relu", *, '
        'str memory="default") -> Tensor'
    )
    assert str(mlp.default._schema) == schema
    for key in ("CPU", "Meta", "Autograd", "AutocastCPU", "AutocastCUDA", "FuncTorchBatched"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("fused::mlp", key), key
    assert torch.Tag.pt2_compliant_tag in mlp.default.tags


# --- autocast -----------------------------------------------------------------------------------


@activation_param
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(cast, activation, device):
    """As the single layers under autocast: 16 bits inside, gradients in the parameters' dtype."""
    chain = Chain(activation, 3, lead=(9,), dtype=torch.float32, device=device)
    with torch.autocast(device.type, dtype=cast):
        y = chain.mlp()
        stacked = chain()
        with torch.no_grad():
            inference = chain.mlp()
    assert y.dtype == inference.dtype == cast
    assert_same([y, inference], [stacked, stacked])
    got, want = (torch.autograd.grad(t, chain.leaves, chain.g.to(cast)) for t in (y, stacked))
    assert all(g.dtype == torch.float32 for g in got)
    assert_same([g.to(cast) for g in got], [g.to(cast) for g in want])


def test_autocast_leaves_double_alone_as_torch_does(device):
    chain = Chain("relu", 2, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert chain.mlp().dtype == chain.eager().dtype
    with torch.autocast(device.type, enabled=False):
        assert chain.mlp().dtype == torch.float64


# --- functorch ----------------------------------------------------------------------------------


def flat(call, activation):
    """mlp of two layers with tensors as arguments."""

    def function(x, w1, b1, w2, b2):
        return call(x, [w1, w2], [b1, b2], activation)

    return function


def eager(x, weights, biases, activation):
    x = OPS[activation].eager(x, weights[0], biases[0])
    return F.linear(x, weights[1], biases[1])


def tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result for t in tensors(part)]


def assert_both(activation, transform, args):
    ours, theirs = (tensors(transform(flat(call, activation))(*args)) for call in (mlp, eager))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@activation_param
def test_torch_func(activation, device):
    chain = Chain(activation, 2, device=device)
    args = [leaf.detach() for leaf in chain.leaves]
    tangents = tuple(t.cos() for t in args)
    every = (0, 1, 2, 3, 4)

    def scalar(fn):
        return lambda *a: fn(*a).square().sum()

    assert_both(activation, lambda fn: grad(scalar(fn), every), args)
    assert_both(activation, lambda fn: lambda *a: vjp(fn, *a)[1](chain.g), args)
    assert_both(activation, lambda fn: lambda *a: jvp(fn, tuple(a), tangents), args)
    assert_both(activation, lambda fn: jacrev(fn, every), args)
    assert_both(activation, lambda fn: jacfwd(fn, every), args)
    assert_both(activation, lambda fn: hessian(scalar(fn), (0, 1)), args)
    assert_both(activation, lambda fn: vmap(grad(scalar(fn), 1), (0,) + (None,) * 4), args)


@activation_param
@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap(dims, activation, device):
    """Over tokens, over the parameters (an ensemble), over both; equal to a loop."""
    chain = Chain(activation, 2, device=device)
    args = [leaf.detach() for leaf in chain.leaves]
    where = (dims[0],) + (dims[1],) * 4
    stacks = [t if d is None else torch.stack([t, -t, 2 * t]) for t, d in zip(args, where)]
    got = vmap(flat(mlp, activation), where)(*stacks)
    for k in range(3):
        one = [t if d is None else t[k] for t, d in zip(stacks, where)]
        torch.testing.assert_close(got[k], flat(eager, activation)(*one))


@activation_param
def test_forward_ad(activation, device):
    chain = Chain(activation, 2, device=device)
    args = [leaf.detach() for leaf in chain.leaves]
    for chosen in range(5):
        rates = []
        for call in (mlp, eager):
            with fwAD.dual_level():
                duals = [
                    fwAD.make_dual(t, t.cos()) if k == chosen else t for k, t in enumerate(args)
                ]
                rates.append(fwAD.unpack_dual(flat(call, activation)(*duals)))
        torch.testing.assert_close(*rates)


def test_functional_call(device):
    model = tfl.FusedMLP(4, 6, 3, device=device)
    x = torch.randn(5, 4, device=device)
    doubled = {name: 2 * p for name, p in model.named_parameters()}
    got = functional_call(model, doubled, (x,))
    torch.testing.assert_close(got, functional_call(model.to_sequential(), doubled, (x,)))


# --- script, compile, export --------------------------------------------------------------------


def saved_and_loaded(module):
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


@activation_param
def test_script(activation, device):
    for bias in (True, False):
        model = tfl.FusedMLP(4, 6, 5, 3, activation=activation, bias=bias, device=device)
        x = torch.randn(2, 3, 4, device=device)
        scripted = torch.jit.script(model)
        assert "fused::mlp" in str(scripted.inlined_graph)
        for module in (scripted, saved_and_loaded(scripted)):
            for _ in range(3):  # the profiling executor changes its mind after the first runs
                for a, b in zip(gradients(module, x), gradients(model, x), strict=True):
                    torch.testing.assert_close(a, b)


# Inductor takes its time, and with it one activation tells as much as three.
@pytest.mark.parametrize(
    "backend, activation", [*(("aot_eager", a) for a in ACTIVATIONS), ("inductor", "relu")]
)
def test_compile(backend, activation, device):
    torch._dynamo.reset()
    model = tfl.FusedMLP(4, 6, 3, activation=activation, device=device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for lead in ((5,), (7,), (2, 3)):
        x = torch.randn(*lead, 4, device=device)
        for a, b in zip(gradients(compiled, x), gradients(model, x), strict=True):
            torch.testing.assert_close(a, b)
    torch._dynamo.reset()


def test_compile_with_dynamic_shapes(device):
    torch._dynamo.reset()
    model = tfl.FusedMLP(4, 6, 3, device=device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 4, device=device)
    torch._dynamo.mark_dynamic(x, 0)
    compiled(x).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 50):
            x = torch.randn(tokens, 4, device=device)
            torch.testing.assert_close(compiled(x), model(x))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict, device):
    model = tfl.FusedMLP(4, 6, 3, activation="gelu_tanh", device=device).eval()
    tokens = torch.export.Dim("tokens", min=2, max=64)
    x = torch.randn(6, 4, device=device)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: tokens},), strict=strict)
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert targets == ["fused.mlp.default"]
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    x = torch.randn(9, 4, device=device)
    torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize("name", ["auto", "cublaslt", "eager"])
def test_policies_compile(name, device):
    torch._dynamo.reset()
    with policy(name):
        model = tfl.FusedMLP(4, 6, 3, device=device)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        x = torch.randn(5, 4, device=device)
        for a, b in zip(gradients(compiled, x), gradients(model, x), strict=True):
            torch.testing.assert_close(a, b)
    torch._dynamo.reset()
