"""On a GPU: PyTorch's precision switches, determinism, and sizes past 32 bits."""

import os
import sys
from functools import partial

import pytest
import torch
from fresh_process import LET_GO, python
from numerics import assert_bits, assert_contract, assert_exact, in_double, run
from operators import GELU_TANH, LINEAR, OPS, RELU, Case, op_param, policy_param
from tf32 import FLOAT32_LEVEL, TF32_LEVEL, error, errors, needs_tf32, off_zero

import torch_fused_linear as tfl
from torch_fused_linear.activations import NUMBERS

fused = torch.ops.fused
pytestmark = pytest.mark.cuda


@pytest.fixture
def switch():
    """Sets one of the switches of products; they are put back."""
    matmul, before = torch.backends.cuda.matmul, {}

    def set_to(name, on):
        before.setdefault(name, getattr(matmul, name))
        setattr(matmul, name, on)

    yield set_to
    for name, value in before.items():
        setattr(matmul, name, value)


@pytest.fixture
def tf32(switch):
    return partial(switch, "allow_tf32")


@needs_tf32
@op_param
@policy_param
def test_tf32_switch_is_obeyed_in_both_directions(policy, op, tf32):
    """Forward and backward, on and off and on again (an algorithm kept under a key without the
    switch would stay)."""
    case = off_zero(LINEAR, LINEAR.case(512, 1024, 768, torch.float32, "cuda"))
    with tfl.set_policy(policy):
        for on in (False, True, False, True):
            tf32(on)
            for name, off in errors(op, case).items():
                if on:
                    assert TF32_LEVEL < off < 5e-3, f"{name}: {off}, TF32 is not used"
                else:
                    assert off < FLOAT32_LEVEL, f"{name}: {off}, this is not fp32"


@needs_tf32
@op_param
def test_backward_follows_the_switch_as_it_is_then(op, tf32):
    case = off_zero(LINEAR, LINEAR.case(512, 1024, 768, torch.float32, "cuda"))
    leaves = case.leaves()
    tf32(True)
    y = op.call(*leaves)
    tf32(False)
    grads = torch.autograd.grad(y, leaves, case.g)
    if op.activation in ("none", "relu"):  # GELU's slope was rounded in the forward
        for got, want in zip(grads, run(op.eager, in_double(case))[1:], strict=True):
            assert error(got, want) < FLOAT32_LEVEL


# The newer switch must not be mixed with the older one in a process.
NEW_SWITCH = """
import torch
from operators import LINEAR
from tf32 import FLOAT32_LEVEL, TF32_LEVEL, errors

import torch_fused_linear as tfl
case = LINEAR.case(512, 1024, 768, torch.float32, "cuda")
for mode in ("ieee", "tf32", "ieee"):
    torch.backends.cuda.matmul.fp32_precision = mode
    for name, error in errors(LINEAR, case).items():
        assert (error > TF32_LEVEL) if mode == "tf32" else (error < FLOAT32_LEVEL), (mode, name)
print("obeyed")
"""


def said_by(program, **variables):
    return python(program + LET_GO, PYTHONPATH=os.pathsep.join(sys.path), **variables).stdout


@needs_tf32
def test_fp32_precision_is_the_same_switch():
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has only allow_tf32")
    assert said_by(NEW_SWITCH) == "obeyed\n"


@policy_param
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reduced_precision_reduction_switch(policy, dtype, switch):
    """Switched off, partial sums of a split product may not pass through 16 bits: the first half
    of each sum overflows fp16, and in bf16 it would lose its ones."""
    name = f"allow_{'fp16' if dtype == torch.float16 else 'bf16'}_reduced_precision_reduction"
    k = 32768
    x = torch.ones(16, k, dtype=dtype, device="cuda")
    w = torch.full((24, k), 8.0, dtype=dtype, device="cuda")
    w[:, k // 2 :] = -8.0
    w[:, 0] = 11.0  # the sum is 3
    tall = Case.of(w.t().contiguous(), torch.ones(16, 24).to(w), None, torch.ones(k, 16).to(w))
    with tfl.set_policy(policy):
        switch(name, False)
        for op in (LINEAR, RELU):
            assert torch.equal(op.call(x, w), torch.full_like(op.call(x, w), 3.0))
        # the weight gradient sums over the tokens
        assert torch.equal(run(LINEAR.call, tall)[2], torch.full_like(tall.w, 3.0))
        switch(name, True)
        assert op.call(x, w).shape == (16, 24)


@op_param
@policy_param
def test_fifty_repeats_give_the_same_bits(policy, op):
    """With other shapes in between, and in memory that held other things (atomics in a bias
    gradient, or an uninitialised workspace, would show here)."""
    with tfl.set_policy(policy):
        case = LINEAR.case(1000, 256, 385, torch.bfloat16, "cuda")
        other = LINEAR.case(77, 64, 129, torch.bfloat16, "cuda")
        want = run(op.call, case)
        for k in range(50):
            junk = torch.full((1 << 18,), float(k), device="cuda")
            run(op.call, other)
            del junk
            assert_bits(run(op.call, case), want, f"repeat {k}")


DETERMINISTIC = """
import torch
from numerics import assert_bits, run
from operators import LINEAR, OPS
from torch_fused_linear import set_policy
torch.use_deterministic_algorithms(True)
for name in ("auto", "cublaslt", "eager"):
    for op in OPS:
        for dtype in (torch.float32, torch.bfloat16):
            case = LINEAR.case(1000, 64, 129, dtype, "cuda")
            with set_policy(name):
                first = run(op.call, case)
                for _ in range(5):
                    assert_bits(run(op.call, case), first)
    print(name, *(f"{float(t.double().sum()):.17g}" for t in first))
"""


def test_deterministic_algorithms_and_two_processes_agree():
    """The mode raises nowhere, and another process gets the same bits."""
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    first, second = said_by(DETERMINISTIC, **env), said_by(DETERMINISTIC, **env)
    assert len(first.splitlines()) == 3
    assert first == second


@pytest.mark.parametrize("policy", ["auto", "cublaslt"])
@pytest.mark.parametrize("widths", [(165, 126), (433, 478), (465, 486)], ids=str)
def test_nothing_is_rounded_before_the_bias_unless_by_eager(policy, widths):
    """At odd sizes the library has algorithms that do; eager takes them for some numbers of tokens,
    and for no strided bias."""

    def error(z):
        return float((z.double() - exact).square().mean().sqrt())

    inner, out = widths
    gen = torch.Generator("cuda").manual_seed(0)
    for tokens in (65, 88, 128, 227, 339):
        x, w, b = (
            torch.randn(*sizes, generator=gen, device="cuda").to(torch.bfloat16)
            for sizes in ((tokens, inner), (out, inner), (2 * out,))
        )
        w /= inner**0.5
        for bias in (b[:out].clone(), b[::2]):
            exact = torch.nn.functional.linear(x.double(), w.double(), bias.double()).relu()
            eager = torch.nn.functional.linear(x, w, bias).relu()
            with tfl.set_policy(policy):
                aux = fused._linear_aux(x, w, bias, NUMBERS["relu"])[0]
                both = fused.linear_relu(x, w, bias), aux
                for ours in both:
                    assert error(ours) <= 1.1 * error(eager), (tokens, bias.stride())


@policy_param
def test_many_tokens_and_few_features(policy):
    """655360 x 10 x 10: sizes at which cuBLASLt's bias epilogues have failed to launch."""
    with tfl.set_policy(policy):
        case = LINEAR.exact_case(655360, 10, 10, torch.float32, "cuda")
        for op in (LINEAR, RELU):
            assert_exact(op, case, "655360x10->10")
        for dtype in (torch.bfloat16, torch.float16):
            case = off_zero(LINEAR, LINEAR.case(655360, 10, 10, dtype, "cuda"), 1e-1)
            for op in OPS:
                assert_contract([(op, "655360x10->10", case)])


@pytest.mark.parametrize("op", [RELU, GELU_TANH], ids=repr)
def test_more_elements_than_32_bits_count(op):
    """T * O just above 2^31: an int32 index would wrap, and the last rows stay unwritten."""
    t, i, o = (1 << 22) + 7, 8, 513
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of free GPU memory")
    small = LINEAR.case(1024, i, o, torch.bfloat16, "cuda")
    x = small.x.repeat(-(-t // 1024), 1)[:t].requires_grad_()
    _, w, b = small.leaves()
    y = op.call(x, w, b)
    ones = torch.ones(1, device="cuda", dtype=torch.bfloat16).expand(t, o)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), ones)
    leaves = [v.double().requires_grad_() for v in small.inputs]
    want = op.eager(*leaves)
    wx, ww, wb = torch.autograd.grad(want.sum(), leaves)
    for start in (0, t // 1024 // 2 * 1024, t // 1024 * 1024 - 1024):
        rows = slice(start, start + 1024)
        torch.testing.assert_close(y[rows].double(), want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(dx[rows].double(), wx, rtol=5e-2, atol=5e-1)
    for got, truth in ((dw, ww), (db, wb)):
        error = (got.double() / (t / 1024) - truth).abs().max() / truth.abs().max()
        assert error < 2e-2, "tokens are missing from the sum"
    assert torch.equal(y[-7:], y[:7]), "the last rows"
