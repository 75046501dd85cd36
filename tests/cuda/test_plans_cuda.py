"""Measuring on a GPU: right results, no trace left, one decision for all, files."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import captured, setting
from numerics import assert_contract
from operators import GELU_ERF, GELU_TANH, LINEAR, OPS, RELU
from plan_files import ALGORITHM, FOREIGN, file_text, measuring, run_step  # noqa: F401
from stacks import assert_same
from watching import explained

import torch_fused_linear as tfl
from torch_fused_linear import plans

pytestmark = pytest.mark.cuda


def lines(word):
    return [line for line in plans.show().splitlines() if word in line]


def deterministic():
    return setting(torch.use_deterministic_algorithms, True, False)


def network(*widths, dtype=torch.bfloat16, layer=tfl.FusedLinearGELU):
    *hidden, last = itertools.pairwise(widths)
    modules = [*(layer(i, o) for i, o in hidden), tfl.FusedLinear(*last)]
    return torch.nn.Sequential(*modules).to("cuda", dtype)


def gradients(model, x):
    return torch.autograd.grad(model(x).float().square().mean(), model.parameters())


# ------------------------------------------------------------------------------------ results


@pytest.mark.parametrize("op", OPS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_keep_the_contract(op, dtype):
    sizes = [(64, 64, 64), (300, 128, 256), (33, 65, 129), (1, 64, 8), (2048, 96, 200), (5, 7, 1)]
    for _ in range(2):  # measured, then known
        assert_contract((op, size, op.case(*size, dtype, "cuda")) for size in sizes)
    assert lines("measured")


@pytest.mark.parametrize("layer", [tfl.FusedLinearReLU, tfl.FusedLinearGELU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["auto", "cublaslt"])
def test_steps_across_layers(layer, dtype, name):
    torch.manual_seed(1)
    model = network(64, 256, 128, 32, dtype=dtype, layer=layer)
    x = torch.randn(500, 64, device="cuda", dtype=dtype)

    with tfl.set_policy("eager"):
        want = gradients(model, x)
    with tfl.set_policy(name):
        measured, known = gradients(model, x), gradients(model, x)
    assert_same(measured, want)
    assert all(torch.equal(a, b) for a, b in zip(measured, known)), "same plans, same bits"
    assert lines("measured") and bool(lines(" cublaslt ")) == (name == "cublaslt")


def test_policy_cublaslt_keeps_to_the_library():
    x = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16)
    block = tfl.FusedMLP(64, 256, 64, activation="gelu_tanh").to("cuda", torch.bfloat16)
    with tfl.set_policy("cublaslt"):
        block(x).sum().backward()
    assert len(lines("d_bgrad DGELU_BGRAD")) == 1
    assert len(lines("GELU_AUX_BIAS")) == 1 and lines("bgradb BGRADB")


# ----------------------------------------------------------------------------------- when, once


def test_a_problem_is_measured_once(capfd):
    """And a report shows the calls, not the trials."""
    with setting(plans.verbose, 1, 0), tfl.explain() as report:
        for _ in range(3):
            tfl.linear_relu(*LINEAR.case(128, 64, 96, torch.bfloat16, "cuda").inputs)
        said = capfd.readouterr().err
    assert len(report.calls) == 3 and len({call.path for call in report.calls}) == 1
    assert said.count("fused: fprop relu bias bf16 128x64x96: ") == 1
    assert "candidates run" in said and "measured" in said
    tfl.linear_relu(*LINEAR.case(256, 64, 96, torch.bfloat16, "cuda").inputs)
    assert capfd.readouterr().err == ""
    assert len(lines("measured")) == 2


def test_token_counts_share_plans():
    for tokens in (1024, 513, 700, 1023, 999, 1000):
        assert_contract([(RELU, tokens, LINEAR.case(tokens, 64, 64, torch.float16, "cuda"))])
    assert len(lines("measured")) == 3
    assert all("1024x" in line or "x1024x" in line for line in lines("measured"))


def test_nothing_is_measured_without_a_budget_or_when_deterministic():
    call = LINEAR.case(128, 64, 64, torch.bfloat16, "cuda").inputs
    with plans.budget(0):
        first = tfl.linear_gelu(*call)
    with deterministic():
        second = tfl.linear_gelu(*call)
    assert not lines("measured") and len(lines("by rule")) == 2
    assert torch.equal(first, second)
    tfl.linear_gelu(*call)
    assert len(lines("measured")) == 1


def test_deterministic_mode_takes_neither_what_was_timed_nor_a_neighbours():
    calls = [LINEAR.case(tokens, 64, 64, torch.bfloat16, "cuda").inputs for tokens in (1024, 500)]
    with plans.patience(5):
        tfl.linear_relu(*calls[0])
        with deterministic():
            for call in calls:
                tfl.linear_relu(*call)
    assert len(lines("measured")) == 1 and len(lines("by rule")) == 2
    assert not lines("its neighbour's")


def test_nothing_is_measured_while_capturing():
    case = LINEAR.case(128, 64, 72, torch.bfloat16, "cuda")
    torch.mm(case.x, case.w.t())  # cuBLAS's own workspace
    torch.cuda.synchronize()
    (graph, out), report = explained(lambda: captured(lambda: tfl.linear_relu(*case.inputs)))
    assert plans.show() == ""
    assert "unknown while capturing" in report.calls[0].path
    graph.replay()
    torch.cuda.synchronize()
    assert_same([out], [RELU.eager(*case.inputs)])


def test_warmup_before_a_capture():
    model = network(64, 256, 64)
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    plans.warmup(model, x)
    with torch.no_grad():
        plans.warmup(model, x)
    known = plans.show()
    assert len(lines("measured")) >= 5
    (graph, grads), report = explained(lambda: captured(lambda: gradients(model, x)))
    assert not any("capturing" in call.path for call in report.calls), report
    assert plans.show() == known
    graph.replay()
    torch.cuda.synchronize()
    with tfl.set_policy("eager"):
        want = gradients(model, x)
    assert_same(grads, want)


def test_a_capture_pins_nothing():
    """A thread that captured by a neighbour's plan, or by rule, measures afterwards."""
    cases = [LINEAR.case(tokens, 64, 64, torch.bfloat16, "cuda").inputs for tokens in (1024, 500)]
    alone = LINEAR.case(384, 64, 72, torch.bfloat16, "cuda").inputs
    torch.mm(cases[0][0], cases[0][1].t())
    with plans.patience(3):
        tfl.linear_relu(*cases[0])
        tfl.linear_relu(*cases[1])  # borrowed
        assert len(lines("its neighbour's")) == 1
        with plans.budget(0):
            tfl.linear_relu(*alone)  # by rule
        tfl.linear_relu(*cases[1])

        def capture_and_go_on():
            torch.mm(cases[0][0], cases[0][1].t())
            torch.cuda.synchronize()
            captured(lambda: [tfl.linear_relu(*inputs) for inputs in (cases[1], alone)])
            for _ in range(8):
                for inputs in (cases[1], alone):
                    tfl.linear_relu(*inputs)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(capture_and_go_on).result()
    assert len(lines("measured")) == 3, plans.show()


def test_threads_agree():
    case = LINEAR.case(640, 128, 192, torch.float16, "cuda")
    barrier = threading.Barrier(6)

    def work(_):
        barrier.wait()
        output = tfl.linear_gelu(*case.inputs)
        torch.cuda.synchronize()
        return output

    with ThreadPoolExecutor(6) as pool:
        outputs = list(pool.map(work, range(6)))
    assert len(lines("measured")) == 1
    assert all(torch.equal(outputs[0], other) for other in outputs)


# ----------------------------------------------------------------------------------- no trace


def test_measuring_leaves_no_trace():
    case = LINEAR.case(4096, 512, 1024, torch.bfloat16, "cuda")

    def step():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        leaves = [t.detach().requires_grad_() for t in case.inputs]
        tfl.linear_gelu(*leaves).backward(case.g)
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        keys = ("allocated_bytes.all.current", "allocated_bytes.all.peak")
        return [stats[key] for key in keys], torch.cuda.get_rng_state()

    # cuBLAS, which eager's own way calls, keeps a workspace from its first call on.
    torch.mm(case.x, case.w.t())
    with plans.budget(0):
        step()
        plain, random = step()
    measured, random_after = step()
    assert lines("measured")
    # By another algorithm, which may want more workspace or less.
    assert abs(measured[1] - plain[1]) <= 40 << 20, (measured, plain)
    assert measured[0] == plain[0]
    assert torch.equal(random, random_after)


def test_the_order_of_the_stream_is_kept():
    """Measuring waits for the kernels that write the operands, and reads no result early."""
    x = torch.zeros(2048, 512, device="cuda")
    w, b = torch.ones(256, 512, device="cuda"), torch.zeros(256, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x += 1
        out = tfl.linear_relu(x, w, b)
        x.zero_()
    side.synchronize()
    assert torch.equal(out, torch.full_like(out, 512))


def test_infinities_and_zeros_do_not_disturb():
    x = torch.full((256, 64), float("inf"), device="cuda", dtype=torch.float16)
    w, b = torch.zeros(64, 64, device="cuda", dtype=torch.float16), torch.zeros_like(x[0])
    assert tfl.linear_relu(x, w, b).isnan().all()
    assert (tfl.linear_gelu(torch.zeros_like(x), w, b) == 0).all()
    # Trials use other operands.
    assert len(lines("measured")) == 2


# -------------------------------------------------------------------------------------- files


def test_two_processes_with_one_file_have_the_same_bits(tmp_path):
    file = tmp_path / "plans"
    known = {"TORCH_FUSED_LINEAR_PLANS": str(file)}
    first, _, a = run_step(tmp_path / "a", **known)
    assert "measured" in first and "from a file" not in first
    assert file.exists()
    second, _, b = run_step(tmp_path / "b", **known)
    assert "measured" not in second and "from a file" in second
    third, _, c = run_step(tmp_path / "c", **known, TORCH_FUSED_LINEAR_BUDGET_MS="0")
    assert third == second
    assert all(map(torch.equal, a, b)) and all(map(torch.equal, a, c))


def test_a_foreign_files_plans_are_told_of_and_stay(tmp_path):
    file = tmp_path / "plans"
    file.write_text(file_text(FOREIGN))
    with pytest.raises(ValueError, match="was made for GPU A, this is NVIDIA"):
        plans.load(file)
    out, err, _ = run_step(tmp_path / "a", TORCH_FUSED_LINEAR_PLANS=str(file))
    assert err.count("was made for GPU A, this is NVIDIA") == 1 and "frame #" not in err
    assert "measured" in out
    assert FOREIGN in file.read_text().splitlines()
    assert plans.load(file) == out.count("measured")
    out, err, _ = run_step(tmp_path / "b", TORCH_FUSED_LINEAR_PLANS=str(file))
    assert "measured" not in out and err == ""


def test_a_file_without_plans_is_of_any_machine(tmp_path):
    """Where nothing was measured, as with a budget of 0, plans.broadcast sends such a file."""
    path = tmp_path / "plans.txt"
    plans.clear()
    plans.save(path)
    assert plans.load(path) == 0


def test_save_clear_and_load(tmp_path):
    file, call = tmp_path / "plans", LINEAR.case(128, 64, 64, torch.bfloat16, "cuda").inputs
    tfl.linear_relu(*call)
    before = plans.show()
    plans.save(file)
    plans.clear()
    assert plans.show() == ""
    assert plans.load(file) == 1
    assert plans.show() == before.replace("measured", "from a file")
    tfl.linear_relu(*call)
    assert not lines("measured")
    # With a file deterministic mode takes the file's choice.
    with deterministic():
        tfl.linear_relu(*call)
    assert not lines("by rule")
    gpu, library, driver, *rest = file.read_text().splitlines()[1].split("\t")
    assert driver not in ("", "1")
    file.write_text(file_text("\t".join([gpu, library, "1", *rest])))
    with pytest.raises(ValueError, match="made with driver 1, this is "):
        plans.load(file)


def test_an_algorithm_that_does_not_exist_is_not_run(tmp_path):
    case = LINEAR.case(1024, 64, 64, torch.bfloat16, "cuda")
    tfl.linear_relu(*case.inputs)
    path = tmp_path / "plans"
    plans.save(path)
    _, line, _ = path.read_text().splitlines()
    *origin, plan = line.split("\t")
    words = plan.split(" ")
    assert words[0] in ("epilogue", "bias+activation"), words
    words[ALGORITHM] = ["123456789"] * 8  # cuBLASLt's description of the algorithm
    path.write_text(file_text("\t".join([*origin, " ".join(words)])))
    assert plans.load(path) == 1
    assert_same([tfl.linear_relu(*case.inputs)], [RELU.eager(*case.inputs)])


# ------------------------------------------------------------------------------------ neighbours


def test_a_neighbour_lends_its_plan_for_a_while():
    call = [LINEAR.case(tokens, 64, 64, torch.bfloat16, "cuda").inputs for tokens in (1024, 500)]
    with plans.patience(5):
        tfl.linear_relu(*call[0])
        for _ in range(5):
            got = tfl.linear_relu(*call[1])
        assert len(lines("measured")) == 1 and len(lines("its neighbour's")) == 1
        assert_same([got], [RELU.eager(*call[1])])
        for _ in range(2):
            tfl.linear_relu(*call[1])
        assert len(lines("measured")) == 2 and not lines("its neighbour's")


def test_warmup_measures_at_once():
    model = network(64, 256, 64)
    with plans.patience(1000), torch.no_grad():
        for tokens in (1024, 512):
            plans.warmup(model, torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16))
    assert len(lines("measured")) == 4 and not lines("its neighbour's")


def test_an_unaligned_view_has_plans_of_its_own():
    for offset in (0, 1, 2):
        buffer = torch.randn(128 * 64 + offset, device="cuda", dtype=torch.bfloat16)
        x = buffer[offset:].view(128, 64)
        _, w, b = LINEAR.case(1, 64, 64, torch.bfloat16, "cuda").inputs
        assert_same([GELU_TANH.call(x, w, b)], [GELU_TANH.eager(x, w, b)])
        assert_same([GELU_ERF.call(x, w, b)], [GELU_ERF.eager(x, w, b)])
        assert_same([LINEAR.call(x, w, b)], [LINEAR.eager(x, w, b)])
    assert len(lines("measured")) == 6  # for both that are not aligned the same


@pytest.mark.parametrize("name", ["auto", "cublaslt"])
@pytest.mark.parametrize("op", [LINEAR, RELU, GELU_TANH], ids=repr)
def test_a_bias_at_any_address(op, name):
    """For each the library's heuristic offers kernels that read two elements of it at a time."""
    for dtype in (torch.bfloat16, torch.float16):
        for offset in (1, 2, 3, 7):
            x, w, _ = LINEAR.case(360, 48, 24, dtype, "cuda").inputs
            bias = torch.randn(24 + offset, device="cuda").to(dtype)[offset:]
            with tfl.set_policy(name), plans.budget(200):
                assert_same([op.call(x, w, bias)], [op.eager(x, w, bias)])


def test_another_threads_capture_survives():
    """Loading kernels, allocating and waiting would end a capture in the default, global, mode."""
    room = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")  # for the allocator to keep
    case = LINEAR.case(384, 64, 96, torch.bfloat16, "cuda")
    other = LINEAR.case(8, 8, 8, torch.float32, "cuda")
    torch.mm(other.x, other.w.t())
    graph, begun, done = torch.cuda.CUDAGraph(), threading.Event(), threading.Event()
    del room
    torch.cuda.synchronize()

    def capture():
        try:
            with torch.cuda.graph(graph):
                first = other.x + 1
                begun.set()
                assert done.wait(60)
                first += 1
        finally:
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        capturing = pool.submit(capture)
        assert begun.wait(60)
        out = tfl.linear_relu(*case.inputs)
        done.set()
        capturing.result()
    assert len(lines("measured")) == 1
    assert_same([out], [RELU.eager(*case.inputs)])
