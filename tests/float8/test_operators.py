"""Schemas, opcheck, what is foretold of results, autocast, tracing, and what is refused."""

import pytest
import torch
from recipe import DTYPES, HIDDEN, parameters
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_fused_linear as tfl
from torch_fused_linear.activations import NUMBERS

fused = torch.ops.fused
SCHEMAS = {
    "float8_linear": "(Tensor input, Tensor weight, Tensor? bias=None, "
    'str activation="none") -> Tensor',
    "float8_mlp": "(Tensor input, Tensor[] weights, Tensor?[] biases, "
    'str activation="relu") -> Tensor',
    "float8_gated_mlp": "(Tensor input, Tensor gate, Tensor? up, Tensor down, "
    "Tensor? gate_bias=None, Tensor? up_bias=None, Tensor? down_bias=None, "
    'str activation="silu") -> Tensor',
}
CAST = "(Tensor rows, Tensor columns, Tensor inverse_scale"
STEPS = {
    "_float8_cast": "(Tensor input, bool gradient, bool sum, bool columns=True) -> "
    f"{CAST}, Tensor sum)",
    "_float8_activation": f"(Tensor z, int activation, bool columns=True) -> {CAST}, Tensor scale)",
    "_float8_activation_backward": "(Tensor grad, Tensor z, int activation, bool sum, "
    f"Tensor? scale=None) -> {CAST}, Tensor sum, Tensor hidden)",
    "_float8_gating": "(Tensor gate, Tensor up, int activation, bool columns=True) -> "
    f"{CAST}, Tensor scale)",
    "_float8_gating_backward": "(Tensor grad, Tensor gate, Tensor up, int activation, "
    "bool together, bool sum, Tensor? scale=None) -> (Tensor rows_gate, Tensor columns_gate, "
    "Tensor inverse_scale_gate, Tensor sum_gate, Tensor rows_up, Tensor columns_up, "
    "Tensor inverse_scale_up, Tensor sum_up, Tensor hidden)",
    "_float8_product": "(Tensor a, Tensor b, Tensor inverse_a, Tensor inverse_b, Tensor? bias, "
    "Tensor? add, ScalarType dtype, bool fast) -> Tensor",
}


def op_of(name):
    return getattr(fused, name).default


def samples(name, dtype=torch.float32, grad=False, device="cpu"):
    """Arguments of an operator, in each of its forms."""
    t = lambda *shape: torch.randn(shape, device=device).to(dtype)  # noqa: E731
    if name in SCHEMAS:
        (w, v), (b, c) = parameters([32, 48, 16], dtype, grad=grad, device=device)
        x = t(2, 16, 32).requires_grad_(grad)
        if name == "float8_linear":
            yield (x, w, b)
            yield from ((x, w, None, activation) for activation in HIDDEN)
            yield (x[0, :3], w[:40], None, "relu")  # no FP8
        elif name == "float8_mlp":
            yield from ((x, [w, v], [b, c], activation) for activation in HIDDEN)
            yield (x.flatten(0, 1), [w], [None], "silu")
            yield (x[:, :9], [w, v], [b, None], "gelu_tanh")  # no FP8, if weights are trained
        else:
            (up,), (d,) = parameters([32, 48], dtype, grad=grad, device=device)
            yield from ((x, w, up, v, b, d, c, activation) for activation in HIDDEN)
            yield (x, w, up, v)
            yield (x, torch.cat([w, up]), None, v, torch.cat([b, d]))
        return
    cast = fused._float8_cast
    if name == "_float8_cast":
        yield from ((t(32, 16), gradient, total) for gradient in (0, 1) for total in (0, 1))
        yield (t(32, 16), True, True, False)
    elif name == "_float8_product":
        (a, _, sa, _), (b, _, sb, _) = cast(t(32, 64), True, False), cast(t(48, 64), False, False)
        for bias in (None, t(48)):
            for add in (None, t(32, 48)):
                yield (a, b, sa, sb, bias, add, dtype, True)
    else:
        grad, z, up = t(32, 16), t(32, 16), t(32, 16)
        halves, scale = t(32, 32).chunk(2, 1), torch.tensor(3.0, device=device)
        for number in (NUMBERS[activation] for activation in HIDDEN):
            if name == "_float8_activation":
                yield (z, number)
                yield (z, number, False)
            elif name == "_float8_activation_backward":
                yield (grad, z, number, True)
                yield (grad, z, number, False)
                yield (grad, z, number, True, scale)
            elif name == "_float8_gating":
                yield (z, up, number)
                yield (*halves, number)
                yield (*halves, number, False)
            else:
                yield (grad, z, up, number, False, True)
                yield (grad, *halves, number, True, True)
                yield (grad, *halves, number, True, False)
                yield (grad, z, up, number, False, True, scale)
                yield (grad, *halves, number, True, True, scale)
        if name == "_float8_activation_backward":
            yield (grad, fused._relu_mask(z), NUMBERS["relu"], True)


@pytest.mark.parametrize("name", SCHEMAS | STEPS)
def test_schema_and_tags(name):
    """They are an interface: scripts and exported programs name them."""
    schema = str(op_of(name)._schema)
    assert schema == f"fused::{name}{(SCHEMAS | STEPS)[name]}"
    assert torch.Tag.pt2_compliant_tag in op_of(name).tags


def test_every_operator_is_here():
    names = torch._C._dispatch_get_all_op_names()
    ours = {n.removeprefix("fused::") for n in names if n.startswith("fused::")}
    assert {n for n in ours if n.lstrip("_").startswith("float8_")} == {*SCHEMAS, *STEPS}


CASES = [(name, grad) for name in SCHEMAS for grad in (False, True)]
CASES += [(name, False) for name in STEPS]


@pytest.mark.parametrize("name, grad", CASES)
def test_opcheck(name, grad):
    tests = ["test_faketensor", "test_autograd_registration"]
    # It compares arguments before and after, which torch cannot in FP8; with gradients it looks at
    # the products inside as well.
    if name != "_float8_product" and not grad:
        tests += ["test_schema"]
    given = list(samples(name, grad=grad))
    for k, args in enumerate(given):
        is_traced = k in (0, len(given) - 1)
        more = ["test_aot_dispatch_dynamic"] if is_traced else []
        torch.library.opcheck(op_of(name), args, test_utils=tests + more)


@pytest.mark.parametrize("name", SCHEMAS | STEPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_dtypes_and_strides_are_foretold(name, dtype):
    for args in samples(name, dtype):
        real = op_of(name)(*args)
        with FakeTensorMode() as mode:
            told = op_of(name)(*tree_map_only(torch.Tensor, mode.from_tensor, args))
        for a, b in zip(tree_leaves(real), tree_leaves(told), strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        on_meta = op_of(name)(*tree_map_only(torch.Tensor, lambda t: t.to("meta"), args))
        for a, b in zip(tree_leaves(real), tree_leaves(on_meta), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_the_input_alone(dtype):
    """As torchao, whose weights go to FP8 from fp32."""
    (w, v), (b, c) = parameters([32, 48, 16])
    x = torch.randn(32, 32, requires_grad=True)
    calls = [
        lambda x: tfl.float8_linear(x, w, b, activation="silu"),
        lambda x: tfl.float8_mlp(x, [w, v], [b, c], "relu"),
        lambda x: tfl.float8_gated_mlp(x, w, w.detach() * 2, v, b),
    ]
    for call in calls:
        want = call(x.to(dtype))
        with torch.autocast("cpu", dtype):
            got = call(x)
        assert got.dtype == dtype and torch.equal(got, want)
        grad = torch.randn_like(got)
        a, b_ = (torch.autograd.grad(y, [x, w], grad) for y in (got, want))
        assert all(map(torch.equal, a, b_)) and [t.dtype for t in a] == [torch.float32] * 2


def test_autocast_where_fp8_cannot():
    (w,), (b,) = parameters([32, 40])
    with torch.autocast("cpu", torch.bfloat16):
        y = tfl.float8_linear(torch.randn(3, 32), w, b, activation="relu")
        y = tfl.float8_linear(torch.randn(3, 32), w, b)
    assert y.dtype == torch.bfloat16


# --- torch.compile and export ---------------------------------------------------------------------


def blocks():
    (w, v), (b, c) = parameters([32, 48, 16])
    (up,), (d,) = parameters([32, 48])
    yield "linear", [w, b], lambda x: tfl.float8_linear(x, w, b, activation="gelu_tanh")
    for activation in ("relu", "silu"):
        of_mlp = lambda x, a=activation: tfl.float8_mlp(x, [w, v], [b, c], a)  # noqa: E731
        yield f"mlp {activation}", [w, v, b, c], of_mlp
    yield "gated", [w, up, v, d], lambda x: tfl.float8_gated_mlp(x, w, up, v, b, d, c)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, fresh_compiler):
    for name, leaves, call in blocks():
        x = torch.randn(32, 32, requires_grad=True)
        compiled = torch.compile(call, backend=backend, fullgraph=True)
        y, want = compiled(x), call(x)
        grad = torch.randn_like(y)
        torch.testing.assert_close(y, want, msg=name)
        got, want = (torch.autograd.grad(out, [x, *leaves], grad) for out in (y, want))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, msg=name)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), call(x), msg=name)


def test_compiled_with_sizes_that_change(fresh_compiler):
    """A number of rows that FP8 cannot have takes a graph of its own."""
    (w, v), (b, c) = parameters([32, 48, 16])
    call = lambda x: tfl.float8_mlp(x, [w, v], [b, c], "silu")  # noqa: E731
    compiled = torch.compile(call, backend="aot_eager", dynamic=True)
    for rows in (32, 64, 48, 20, 96):
        x = torch.randn(rows, 32)
        y, want = compiled(x), call(x)
        torch.testing.assert_close(y, want)
        got, want = (torch.autograd.grad(out.sum(), [w, v, b, c]) for out in (y, want))
        for a, b_ in zip(got, want, strict=True):
            torch.testing.assert_close(a, b_)


def test_a_graph_without_gradients_has_one_operator():
    (w, v), (b, c) = parameters([32, 48, 16], grad=False)

    class Model(nn.Module):
        def forward(self, x):
            return tfl.float8_mlp(x, [w, v], [b, c], "silu")

    x = torch.randn(32, 32)
    exported = torch.export.export(Model(), (x,))
    assert [str(n.target) for n in exported.graph.nodes if "fused" in str(n.target)] == [
        "fused.float8_mlp.default"
    ]
    torch.testing.assert_close(exported.module()(x), Model()(x))


@pytest.mark.filterwarnings("ignore")
def test_compiled_autograd(fresh_compiler):
    for _, leaves, call in blocks():
        x = torch.randn(32, 32, requires_grad=True)
        call(x).sum().backward()
        want = [t.grad for t in (x, *leaves)]
        for t in (x, *leaves):
            t.grad = None
        compiler = torch.compile(backend="aot_eager", fullgraph=True)
        with torch._dynamo.compiled_autograd._enable(compiler):
            call(x).sum().backward()
        for t, b in zip((x, *leaves), want, strict=True):
            torch.testing.assert_close(t.grad, b)
            t.grad = None


# --- where FP8 cannot -----------------------------------------------------------------------------


def path_of(call):
    with tfl.explain() as report:
        call()
    return " ".join(c.path for c in report.calls), {c.operator for c in report.calls}


@pytest.mark.parametrize(
    "rows, sizes, why",
    [
        (32, (32, 40, 16), "40 features, which is no multiple of 16"),
        (32, (24, 48, 16), "24 features, which is no multiple of 16"),
        (20, (32, 48, 16), "20 rows, which is no multiple of 16"),
        (0, (32, 48, 16), "an empty input"),
    ],
)
def test_sizes_that_fp8_cannot_have(rows, sizes, why):
    """The layers run in the input's dtype, and the report says why."""
    weights, biases = parameters(sizes, torch.bfloat16)
    x = torch.randn(rows, sizes[0], dtype=torch.bfloat16, requires_grad=True)
    results = []
    for precision in ("float8", "default"):
        y = tfl.mlp(x, weights, biases, "silu", precision=precision)
        results.append([y, *torch.autograd.grad(y.sum(), [x, *weights, *biases])])
    assert all(map(torch.equal, *results))
    path, operators = path_of(lambda: tfl.float8_mlp(x, weights, biases, "silu"))
    assert f"(no FP8: {why})" in path
    assert not any(operator.startswith("_float8") for operator in operators)
    for activation in ("none", "gelu_erf"):
        call = lambda a=activation: tfl.float8_linear(  # noqa: E731
            x, weights[0], biases[0], activation=a
        )
        path, _ = path_of(call)
        assert "no FP8" in path


def test_any_number_of_rows_without_weights_gradients():
    """Only a weight's gradient is summed over the rows."""
    weights, biases = parameters([32, 48, 16], grad=False)
    x = torch.randn(3, 32, requires_grad=True)
    _, operators = path_of(lambda: tfl.float8_mlp(x, weights, biases).sum().backward())
    assert "_float8_product" in operators and x.grad.shape == (3, 32)
    weights[0].requires_grad_()
    with torch.no_grad():
        _, operators = path_of(lambda: tfl.float8_mlp(x, weights, biases))
    assert "_float8_product" in operators


def test_gated_sizes_that_fp8_cannot_have():
    (gate, up), (down,) = (parameters([32, 40])[0][0] for _ in range(2)), parameters([40, 16])[0]
    x = torch.randn(32, 32)
    want = tfl.gated_mlp(x, gate, up, down)
    assert torch.equal(tfl.gated_mlp(x, gate, up, down, precision="float8"), want)
    half = x.bfloat16()
    y = tfl.float8_gated_mlp(half, gate, up, down)
    assert y.dtype == torch.bfloat16  # of master weights in fp32, too
    path, _ = path_of(lambda: tfl.float8_gated_mlp(x, gate, up, down))
    assert "(no FP8: 40 features" in path


# --- what is refused ------------------------------------------------------------------------------


def test_refused_where_rows_must_not_depend_on_others():
    (w,), _ = parameters([32, 48], grad=False)
    tfl.set_policy("batch_invariant")
    try:
        with pytest.raises(NotImplementedError, match="expected precision 'default', got FP8 with"):
            tfl.float8_linear(torch.randn(4, 32), w)
    finally:
        tfl.set_policy("auto")


def r(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


BAD = {
    "in_features": (
        lambda f: f.float8_linear(r(4, 32), r(16, 48)),
        RuntimeError,
        "float8_linear: weight must have shape [out_features, 32], got [16, 48]",
    ),
    "bias": (
        lambda f: f.float8_linear(r(4, 32), r(16, 32), r(32)),
        RuntimeError,
        "float8_linear: the bias of weight must have shape [16], got [32]",
    ),
    "double": (
        lambda f: f.float8_linear(r(4, 32, dtype=torch.double), r(16, 32)),
        NotImplementedError,
        "float8_linear: input must have dtype BFloat16, Half or Float, got Double",
    ),
    "double weight": (
        lambda f: f.float8_linear(r(4, 32), r(16, 32, dtype=torch.double)),
        NotImplementedError,
        "float8_linear: weight must have dtype",
    ),
    "0-dimensional": (
        lambda f: f.float8_linear(r(), r(16, 32)),
        RuntimeError,
        "float8_linear: input must have shape [*, in_features]",
    ),
    "activation": (
        lambda f: f.float8_linear(r(4, 32), r(16, 32), activation="tanh"),
        ValueError,
        "float8_linear: activation must be 'none', 'relu'",
    ),
    "hidden activation": (
        lambda f: f.float8_mlp(r(4, 32), [r(16, 32)], [None], "none"),
        ValueError,
        "float8_mlp: activation must be 'relu'",
    ),
    "no weights": (
        lambda f: f.float8_mlp(r(4, 32), [], []),
        ValueError,
        "float8_mlp: weights must hold at least one tensor",
    ),
    "biases": (
        lambda f: f.float8_mlp(r(4, 32), [r(16, 32)], []),
        ValueError,
        "float8_mlp: biases must hold a tensor or None for each of the 1 weights, got 0",
    ),
    "second weight": (
        lambda f: f.float8_mlp(r(4, 32), [r(16, 32), r(16, 32)], [None, None]),
        RuntimeError,
        "float8_mlp: weights[1] must have shape [out_features, 16], got [16, 32]",
    ),
    "up": (
        lambda f: f.float8_gated_mlp(r(4, 32), r(16, 32), r(32, 32), r(16, 16)),
        RuntimeError,
        "float8_gated_mlp: up must have shape [16, 32] as gate, got [32, 32]",
    ),
    "odd gate": (
        lambda f: f.float8_gated_mlp(r(4, 32), r(17, 32), None, r(16, 16)),
        ValueError,
        "float8_gated_mlp: without up, gate must have shape [2 * hidden, in]",
    ),
    "up_bias": (
        lambda f: f.float8_gated_mlp(r(4, 32), r(32, 32), None, r(16, 16), up_bias=r(16)),
        ValueError,
        "float8_gated_mlp: up_bias must be None without up",
    ),
    "down": (
        lambda f: f.float8_gated_mlp(r(4, 32), r(16, 32), r(16, 32), r(16, 32)),
        RuntimeError,
        "float8_gated_mlp: down must have shape [out_features, 16], got [16, 32]",
    ),
    "sparse": (
        lambda f: f.float8_linear(r(4, 32).to_sparse(), r(16, 32)),
        NotImplementedError,
        "float8_linear",
    ),
    "device": (
        lambda f: f.float8_linear(r(4, 32), r(16, 32).to("meta")),
        RuntimeError,
        "float8_linear: weight must be on the device of input, cpu, got meta",
    ),
}


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("case", BAD)
def test_errors_say_what_was_expected(case, grad):
    call, error, text = BAD[case]
    for functions in (tfl, fused):
        with torch.set_grad_enabled(grad), pytest.raises(error) as raised:
            call(functions)
        assert text in str(raised.value)


def test_errors_of_arguments_that_want_gradients():
    with pytest.raises(RuntimeError, match=r"weights\[0\] must have shape"):
        tfl.float8_mlp(r(4, 32), [r(16, 48).requires_grad_()], [None])


def test_precision_and_memory():
    args = r(4, 32), [r(16, 32)], [None], "silu"
    with pytest.raises(ValueError, match="mlp: precision must be 'default' or 'float8', got 'fp8'"):
        tfl.mlp(*args, precision="fp8")
    with pytest.raises(ValueError, match="mlp: memory must be 'default' with precision='float8'"):
        tfl.mlp(*args, precision="float8", memory="low")
    args = r(4, 32), r(16, 32), r(16, 32), r(16, 16)
    with pytest.raises(ValueError, match="gated_mlp: precision must be"):
        tfl.gated_mlp(*args, precision="fp8")
    with pytest.raises(ValueError, match="gated_mlp: memory must be 'default'"):
        tfl.gated_mlp(*args, precision="float8", memory="low")


def test_transforms_are_refused():
    w, x = r(16, 32), r(16, 32)
    call = lambda x, w: tfl.float8_linear(x, w)  # noqa: E731
    with pytest.raises(NotImplementedError, match="float8_linear: vmap"):
        torch.vmap(call, in_dims=(0, None))(x, w)
    with pytest.raises(NotImplementedError, match=r"float8_linear: torch\.func"):
        torch.func.grad(lambda x: call(x, w).sum())(x)
    with pytest.raises(NotImplementedError, match=r"float8_linear: (forward-mode|torch\.func)"):
        torch.func.jvp(lambda x: call(x, w), (x,), (x,))
    import torch.autograd.forward_ad as fwad

    with fwad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode AD"):
        call(fwad.make_dual(x, x), w)


def test_classes_of_tensors_are_refused():
    class Own(torch.Tensor):
        pass

    with pytest.raises(NotImplementedError, match="float8_linear: tensors of the class Own"):
        tfl.float8_linear(r(16, 32).as_subclass(Own), r(16, 32))


STEP_ERRORS = {
    "empty": (
        lambda: fused._float8_cast(r(0, 16), False, False),
        "_float8_cast: input must not be empty",
    ),
    "dims": (
        lambda: fused._float8_cast(r(2, 4, 16), False, False),
        "_float8_cast: input must be a strided matrix",
    ),
    "double": (
        lambda: fused._float8_cast(r(4, 4, dtype=torch.double), False, False),
        "_float8_cast: input must have dtype",
    ),
    "number": (
        lambda: fused._float8_activation(r(4, 16), 6),
        "_float8_activation: activation must be a number from 0 to 5, got 6",
    ),
    "z": (
        lambda: fused._float8_activation_backward(r(4, 16), r(4, 32), 2, True),
        "_float8_activation_backward: z must be Float [4, 16] on cpu, got Float [4, 32]",
    ),
    "mask": (
        lambda: fused._float8_activation_backward(
            r(4, 16), torch.zeros(4, 2, dtype=torch.uint8), 1, True
        ),
        "the ReLU mask must have 16 features",
    ),
    "scale": (
        lambda: fused._float8_activation_backward(r(4, 16), r(4, 16), 2, True, r(1)),
        "_float8_activation_backward: scale must be Float [] on cpu, got Float [1]",
    ),
    "scale of a mask": (
        lambda: fused._float8_activation_backward(
            r(4, 16), fused._relu_mask(r(4, 16)), 1, True, torch.tensor(1.0)
        ),
        "_float8_activation_backward: scale must be None where z is a bit mask",
    ),
    "none": (
        lambda: fused._float8_activation_backward(r(4, 16), r(4, 16), 0, True),
        "expected an activation, got 'none'",
    ),
    "up": (
        lambda: fused._float8_gating(r(4, 16), r(4, 16).half(), 4),
        "_float8_gating: up must be Float [4, 16]",
    ),
    "operands": (
        lambda: fused._float8_product(
            r(4, 16), r(4, 16), r(), r(), None, None, torch.float32, True
        ),
        "_float8_product: expected contiguous a [M, K] and b [N, K] in FP8",
    ),
}


@pytest.mark.parametrize("case", STEP_ERRORS)
def test_errors_of_steps(case):
    call, text = STEP_ERRORS[case]
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as raised:
        call()
    assert text in str(raised.value)


def test_errors_of_products():
    a, _, s, _ = fused._float8_cast(r(16, 32), True, False)
    b, _, t, _ = fused._float8_cast(r(16, 32), False, False)
    product = fused._float8_product
    with pytest.raises(RuntimeError, match="at most one of them e5m2"):
        product(a, a, s, s, None, None, torch.float32, True)
    with pytest.raises(RuntimeError, match="inverse scales must be Float"):
        product(a, b, s[None], t, None, None, torch.float32, True)
    with pytest.raises(RuntimeError, match=r"bias must be BFloat16 \[16\]"):
        product(a, b, s, t, r(16), None, torch.bfloat16, True)
    with pytest.raises(RuntimeError, match="add must be contiguous"):
        product(a, b, s, t, None, r(16, 4), torch.float32, True)
    with pytest.raises(NotImplementedError, match="dtype must be"):
        product(a, b, s, t, None, None, torch.double, True)
