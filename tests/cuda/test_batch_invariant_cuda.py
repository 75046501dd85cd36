"""The policy "batch_invariant": rows' bits against the same rows' in other batches."""

import random

import pytest
import torch

import torch_fused_linear as tfl

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

MOST = 4096
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ACTIVATIONS = ["none", "relu", "gelu_tanh", "gelu_erf", "silu", "relu2"]
WIDTHS = [(64, 256), (768, 3072), (1000, 520), (1024, 4096), (77, 51), (4096, 1024), (8, 24)]


@pytest.fixture(autouse=True)
def policy():
    with tfl.set_policy("batch_invariant"):
        yield


def layer(name, x, w, b, memory):
    if name == "none":
        return tfl.linear(x, w, b)
    if name.startswith("gelu"):
        form = "tanh" if name == "gelu_tanh" else "none"
        return tfl.linear_gelu(x, w, b, approximate=form, memory=memory)
    return getattr(tfl, f"linear_{name}")(x, w, b, memory=memory)


def operators(dtype, inner, outer, activation, bias, memory, draw):
    """Functions of x, [rows, inner], whose parameters need no gradient or all need one."""

    def make(*shape):
        return (torch.randn(shape, generator=draw, device="cuda") / shape[-1] ** 0.5).to(dtype)

    w, down = make(outer, inner), make(inner, outer)
    up = make(outer, inner)
    b, c = (make(outer), make(inner)) if bias else (None, None)
    hidden = activation if activation != "none" else "relu"
    return {
        "layer": lambda x: layer(activation, x, w, b, memory),
        "mlp": lambda x: tfl.mlp(x, [w, down], [b, c], activation=hidden, memory=memory),
        "gated_mlp": lambda x: tfl.gated_mlp(
            x, w, up, down, b, b, c, activation=hidden, memory=memory
        ),
        "linear_glu": lambda x: tfl.linear_glu(x, w, up, b, b, activation=hidden),
    }


def placed(rows, how):
    """Returns the values elsewhere in memory: rows further apart, at an odd address, by columns."""
    if how == "apart":
        room = rows.new_full((rows.shape[0], rows.shape[1] + 24), float("nan"))
        return room[:, : rows.shape[1]].copy_(rows)
    if how == "odd":
        room = rows.new_full((rows.shape[0], rows.shape[1] + 3), float("nan"))
        return room[:, 1 : rows.shape[1] + 1].copy_(rows)
    return rows.t().contiguous().t() if how == "columns" else rows.clone()


def rows_of(run, x, grad):
    x = x.detach().requires_grad_(grad is not None)
    y = run(x)
    if grad is None:
        return y, None
    return y.detach(), torch.autograd.grad(y, x, grad)[0]


def assert_rows(got, want, what):
    if torch.equal(got, want):
        return
    wrong = (got != want).any(-1).nonzero().flatten()
    most = (got.float() - want.float()).abs().max().item()
    pytest.fail(f"{what}: {len(wrong)} of {len(got)} rows differ, by {most}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("memory", ["default", "low"])
def test_rows_are_those_of_another_batch(dtype, activation, memory):
    choice = random.Random(f"{dtype} {activation} {memory}")
    draw = torch.Generator("cuda").manual_seed(choice.randrange(1 << 30))
    for inner, outer in WIDTHS:
        run_of = operators(dtype, inner, outer, activation, choice.random() < 0.7, memory, draw)
        x = torch.randn(MOST, inner, generator=draw, device="cuda").to(dtype)
        for name, run in run_of.items():
            with torch.no_grad():
                want = run(x)
            grad = torch.randn(want.shape, generator=draw, device="cuda").to(dtype)
            y, dx = rows_of(run, x, grad)
            assert_rows(y, want, f"{name} {inner}->{outer} {dtype} {activation}, in training")
            for rows in [1, 2, choice.randrange(3, 130), choice.randrange(130, MOST)]:
                begin = choice.randrange(MOST - rows + 1)
                how = choice.choice(["as is", "apart", "odd", "columns"])
                part = placed(x[begin : begin + rows], how)
                what = f"{name} {inner}->{outer} {dtype} {activation} {memory}, {rows} rows {how}"
                with torch.no_grad():
                    assert_rows(run(part), want[begin : begin + rows], what)
                y, dx_part = rows_of(run, part, grad[begin : begin + rows].clone())
                assert_rows(y, want[begin : begin + rows], f"{what}, in training")
                assert_rows(dx_part, dx[begin : begin + rows], f"{what}, dx")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_hold_too(dtype):
    draw = torch.Generator("cuda").manual_seed(3)
    run = operators(dtype, 256, 512, "gelu_tanh", True, "default", draw)["mlp"]
    x = torch.randn(65536, 256, generator=draw, device="cuda").to(dtype)
    with torch.no_grad():
        want = run(x)
        for begin, rows in [(0, 1), (65535, 1), (31000, 777), (12345, 20000)]:
            assert_rows(run(x[begin : begin + rows]), want[begin : begin + rows], f"{rows} rows")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_captured_rows_are_the_same(dtype):
    draw = torch.Generator("cuda").manual_seed(4)
    run = operators(dtype, 512, 1024, "silu", True, "default", draw)["gated_mlp"]
    x = torch.randn(600, 512, generator=draw, device="cuda").to(dtype)
    with torch.no_grad():
        want = run(x)
        part = x[100:137].clone()
        run(part)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(part)
        graph.replay()
    assert_rows(y, want[100:137], "captured")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_error_is_at_most_eagers(dtype):
    torch.manual_seed(5)
    x, w = torch.randn(300, 1024, device="cuda"), torch.randn(512, 1024, device="cuda")
    x, w = x.to(dtype), w.to(dtype)
    exact = x.double() @ w.double().t()
    ours = (tfl.linear(x, w).double() - exact).square().mean().sqrt()
    eager = (torch.nn.functional.linear(x, w).double() - exact).square().mean().sqrt()
    assert ours <= 1.1 * eager + 1e-12


def test_weight_gradients_are_reproducible():
    x = torch.randn(1000, 256, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    b = torch.zeros(512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    first, *others = (
        torch.autograd.grad(tfl.linear_gelu(x, w, b).square().sum(), (w, b)) for _ in range(4)
    )
    for other in others:
        assert all(map(torch.equal, first, other))


def test_convolution_and_vmap_raise():
    x = torch.randn(1, 2, 4, 4, device="cuda")
    with pytest.raises(NotImplementedError, match="conv2d_relu"):
        tfl.conv2d_relu(x, torch.randn(2, 2, 3, 3, device="cuda"))
    with pytest.raises(NotImplementedError, match="linear"):
        x, w = torch.randn(3, 8, device="cuda"), torch.randn(2, 4, 8, device="cuda")
        torch.func.vmap(lambda w: tfl.linear(x, w))(w)


def test_explain_names_the_policy():
    x = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)
    with tfl.explain() as report:
        tfl.linear_gelu(x, torch.randn(128, 64, device="cuda", dtype=torch.bfloat16))
    assert "batch_invariant" in str(report)
