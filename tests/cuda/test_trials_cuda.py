"""A trial finds wrong results before a plan is used, and its failures do not reach the call."""

import cpp_programs
import processes
import pytest
import torch
from helpers import captured
from numerics import run
from operators import GELU_ERF, GELU_TANH, LINEAR, OPS, RELU, SILU
from plan_files import STEP, measuring, run_step, write_forced  # noqa: F401
from stacks import assert_same
from watching import operators_of

import torch_fused_linear as tfl
from torch_fused_linear import plans

pytestmark = pytest.mark.cuda


# ------------------------------------------------------------------------- what a trial must see


def sweep(op, dtype, layer=None, linear=tfl.linear):
    """z of [-8, 8], act(z), and act'(z) as the layer itself and as the next one applies it."""
    z = torch.linspace(-8, 8, 4096, device="cuda").to(dtype).unsqueeze(1).repeat(1, 256)
    eye, zero = torch.eye(256, device="cuda", dtype=dtype), torch.zeros_like(z[0])
    results = []
    for rest in (lambda y: y, lambda y: linear(y, eye)):
        x = z.clone().requires_grad_()
        y = (layer or op.call)(x, eye, zero)
        rest(y).sum().backward()
        results.append(x.grad)
    return z, y.detach(), *results


def exact_of(op, z):
    """act(z) and act'(z) in fp64; the tanh form without the difference that torch's takes."""
    exact = z.double().requires_grad_()
    if op is GELU_TANH:
        act = exact * (2 * (2 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3)).sigmoid()
    else:
        act = op.act(exact)
    (slope,) = torch.autograd.grad(act.sum(), exact)
    return act.detach(), slope


@pytest.mark.parametrize("op", [RELU, GELU_TANH, GELU_ERF, SILU], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["measured", "by rule", "hopper"])
def test_activations_are_exact_where_they_are_flat(op, dtype, way, tmp_path):
    if way == "hopper":
        if dtype is torch.float32 or torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("of 16 bits, and on Hopper GPUs")
        write_forced(lambda: sweep(op, dtype), tmp_path / "plans", way, lambda _: True)
        plans.load(tmp_path / "plans")
    with plans.budget(0 if way == "by rule" else 20), tfl.explain() as report:
        z, y, *slopes = sweep(op, dtype)
    if way == "hopper" and not any("own Hopper kernel" in call.path for call in report.calls):
        pytest.skip("no own products for Hopper in this build")
    act, slope = exact_of(op, z)
    # The unit behind an activation; and in fp32, as eager's, the functions' own.
    u, least = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * 2**-10
    of_functions = 2**-22 if dtype is torch.float32 else 0
    unit = u * ((slope * z).abs() + act.abs()) + of_functions * z.abs() + least
    slope_unit = 2 * u * slope.abs() + 2**-20 + least
    limits = [(y, act, unit), *((got, slope, slope_unit) for got in slopes)]
    if way != "measured":
        assert all(((got - true).abs() <= unit).all() for got, true, unit in limits)
        return
    # The library's ways are held to eager's, where the operands of trials lie.
    _, *eager = sweep(op, dtype, op.eager, torch.nn.functional.linear)
    for (got, true, unit), theirs in zip(limits, eager, strict=True):
        ours, theirs = (
            ((t.double() - true) / unit)[z.abs() <= 3].square().mean().sqrt() for t in (got, theirs)
        )
        assert ours <= 1.1 * theirs + 0.25


@pytest.mark.parametrize("op", OPS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_pass_as_in_eager(op, dtype, value):
    for tokens in (300, 1):
        for which in range(3):
            case = LINEAR.case(tokens, 64, 128, dtype, "cuda")
            case.inputs[which].view(-1)[-1] = value
            for ours, eager in zip(run(op.call, case), run(op.eager, case), strict=True):
                assert torch.equal(ours.isnan(), eager.isnan())
                assert torch.equal(ours.isinf(), eager.isinf())


# ------------------------------------------------------------------- what must not reach the call

UNFAITHFUL = """
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
static bool asked(const char* what) {
  const char* wish = std::getenv("UNFAITHFUL");
  return wish != nullptr && std::strcmp(wish, what) == 0;
}
// Torch loads these libraries for itself, where RTLD_NEXT does not look.
static void* real_one(const char* library, const char* function) {
  return dlsym(dlopen(library, RTLD_LAZY | RTLD_NOLOAD), function);
}
// The library's products for this package do nothing, and say that they did; or fail at the lower
// end of the token counts from 513 to 1024.
using W = void*;
static bool is_lower_end(W layout) {
  using Get = int (*)(W, int, W, std::size_t, std::size_t*);
  static auto* get = (Get)real_one(CUBLASLT, "cublasLtMatrixLayoutGetAttribute");
  constexpr int columns = 3;  // CUBLASLT_MATRIX_LAYOUT_COLS
  unsigned long tokens = 0;
  std::size_t written = 0;
  get(layout, columns, &tokens, sizeof(tokens), &written);
  return tokens == 513;
}
extern "C" int cublasLtMatmul(W a, W b, W c, W d, W e, W f, W g, W h, W i, W j, W k, W l, W m,
                              W n, std::size_t o, W p) {
  using Real = int (*)(W, W, W, W, W, W, W, W, W, W, W, W, W, W, std::size_t, W);
  static auto* real = (Real)real_one(CUBLASLT, "cublasLtMatmul");
  Dl_info caller;
  const bool ours = dladdr(__builtin_return_address(0), &caller) != 0 &&
                    std::strstr(caller.dli_fname, "libfused_kernels") != nullptr;
  if (ours && asked("product")) return 0;
  if (ours && asked("end") && is_lower_end(l)) return 15;  // CUBLAS_STATUS_NOT_SUPPORTED
  return real(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p);
}
// cuBLAS's workspace is had, and what the model needs; what a trial needs is not.
extern "C" cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  using Real = cudaError_t (*)(void**, std::size_t);
  static auto* real = (Real)real_one(CUDART, "cudaMalloc");
  if (bytes <= 32 << 20 || !asked("memory")) return real(pointer, bytes);
  std::fprintf(stderr, "refused\\n");
  return cudaErrorMemoryAllocation;
}
// A trial's first call fails.
extern "C" cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t s) {
  using Real = cudaError_t (*)(void*, int, std::size_t, cudaStream_t);
  static auto* real = (Real)real_one(CUDART, "cudaMemsetAsync");
  if (value == 0xff && asked("trial")) return cudaErrorUnknown;
  return real(to, value, bytes, s);
}
"""


@pytest.fixture
def unfaithful(tmp_path):
    """The environment of a process in which products, memory or trials go wrong."""
    source, library = tmp_path / "unfaithful.cpp", tmp_path / "unfaithful.so"
    source.write_text(UNFAITHFUL)
    include = f"{cpp_programs.CUDA[0]}/include"
    major = torch.version.cuda.partition(".")[0]
    names = [f'-D{n.upper()}="lib{n}.so.{major}"' for n in ("cublasLt", "cudart")]
    command = ("g++", "-shared", "-fPIC", f"-I{include}", *names, source, "-o", library, "-ldl")
    processes.run(*command)
    return lambda what: {"LD_PRELOAD": str(library), "UNFAITHFUL": what}


@pytest.mark.parametrize("budget", ["20", "0"])
def test_plans_from_a_file_are_judged_before_they_are_used(unfaithful, budget, tmp_path):
    file = tmp_path / "plans"
    settings = {"TORCH_FUSED_LINEAR_PLANS": str(file), "TORCH_FUSED_LINEAR_VERBOSE": "1"}
    settings["TORCH_FUSED_LINEAR_POLICY"] = "cublaslt"  # the library's ways alone
    first, _, want = run_step(tmp_path / "a", **settings)
    assert "measured" in first
    settings["TORCH_FUSED_LINEAR_BUDGET_MS"] = budget
    _, err, got = run_step(tmp_path / "b", **settings, **unfaithful("product"))
    assert "fused: refused: fprop" in err and "fused: refused: wgrad" in err
    assert_same(got, want)


def test_a_plan_that_runs_at_one_end_of_its_bucket_is_not_taken(unfaithful, tmp_path):
    _, _, want = run_step(tmp_path / "a", TORCH_FUSED_LINEAR_POLICY="eager")
    variables = {**unfaithful("end"), "TORCH_FUSED_LINEAR_POLICY": "cublaslt"}
    out, _, got = run_step(tmp_path / "b", **variables)
    forwards = [line for line in out.splitlines() if line.startswith("fprop")]
    assert len(forwards) == 2 and all(": aten" in line for line in forwards), out
    assert_same(got, want)


def test_a_capture_takes_from_a_file_what_has_been_judged(tmp_path):
    call = LINEAR.case(256, 64, 128, torch.bfloat16, "cuda").inputs
    torch.mm(call[0], call[1].t())
    tfl.linear_relu(*call)  # judged here
    plans.save(tmp_path / "plans")
    plans.clear()
    plans.load(tmp_path / "plans")
    torch.cuda.synchronize()
    paths = operators_of(lambda: captured(lambda: tfl.linear_relu(*call)), "path")
    assert "capturing" not in paths[0]


STEP_AGAIN = """
import os
os.environ["UNFAITHFUL"] = "nothing"
tfl.plans.clear()
with tfl.explain() as report:
    torch.autograd.grad(model(x).float().square().mean(), model.parameters())
print("again", report)
"""


@pytest.mark.parametrize("budget", ["20", "0"])
def test_a_failing_trial_does_not_reach_the_call(unfaithful, budget, tmp_path):
    _, _, want = run_step(tmp_path / "a", TORCH_FUSED_LINEAR_POLICY="eager")
    code = STEP.replace("grads = ", "with tfl.explain() as report:\n    grads = ")
    code += "print(report)\n" + STEP_AGAIN
    variables = {**unfaithful("trial"), "TORCH_FUSED_LINEAR_BUDGET_MS": budget}
    out, _, got = run_step(tmp_path / "b", code, **variables)
    before, _, after = out.partition("again")
    assert "its trial failed" in before and "its trial failed" not in after
    assert_same(got, want)


def test_too_little_memory_to_measure_is_survived(unfaithful, tmp_path):
    _, _, want = run_step(tmp_path / "a", TORCH_FUSED_LINEAR_POLICY="eager")
    variables = {**unfaithful("memory"), "TORCH_FUSED_LINEAR_VERBOSE": "1"}
    out, err, got = run_step(tmp_path / "b", **variables)
    assert "refused" in err and "not measured, by rule: fprop gelu_tanh" in err
    assert "measured" not in out  # and it is tried again later
    assert_same(got, want)
