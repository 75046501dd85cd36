"""Arrangements of torch.distributed beside one process with the whole batch, in fp64.

Four processes on the CPU; the same checks on two GPUs are in test_two_gpus.py.
"""

import parallel_checks as checks
import pytest


def operators(calls):
    return [name for name, *_ in calls]


@pytest.mark.parametrize(
    "kind, ranks, sequence, local",
    [
        *((kind, 2, False, False) for kind in ("layers", "mlp", "gated", "fuse_", "fuse_ after")),
        *((kind, 2, True, False) for kind in ("gated", "fuse_", "fuse_ after")),
        *((kind, 4, True, False) for kind in ("layers", "mlp")),
        *((kind, 2, False, True) for kind in ("layers", "fuse_", "fuse_ after")),
    ],
)
def test_tensor_parallel(kind, ranks, sequence, local, four):
    """Fused at both ends, whether `fuse_` or torch's plan comes first."""
    calls = four.run(checks.tp, kind, ranks, sequence, local)[0]
    if kind == "gated":
        halves = {shapes for name, shapes, *_ in calls if name in ("_glu", "_glu_backward")}
        assert halves == {"[8, 4, 8]"}
        assert operators(calls).count("_glu_backward") == 2
        return
    assert calls[0][:2] == ("_linear_aux", f"[8, 4, 8] x [{checks.HIDDEN // ranks}, 8]")
    assert operators(calls).count("_linear_aux") == 2
    if kind == "mlp":
        across = [shapes for name, shapes, _ in calls if name == "_linear_backward_across"]
        hidden = checks.HIDDEN // ranks
        assert across == [f"[8, 4, {hidden}] x [8, {hidden}]"] * 2
    if kind == "layers":
        assert operators(calls).count("_linear_backward") == 4


@pytest.mark.parametrize("kind", ["mlp children", "gated children"])
@pytest.mark.parametrize("sequence", [False, True])
def test_children_with_plans_of_their_own_run_one_by_one(kind, sequence, four):
    assert four.run(checks.tp, kind, 2, sequence, True)[0] == []


def test_where_fused_models_run_as_written(four):
    """An activation after a sum that is not made yet, a hook of somebody else, odd layouts."""
    for how, operators_of in four.run(checks.hooks_around_layers)[0].items():
        assert operators_of == (["linear_relu"] if how == "fused" else []), how


def test_tensor_parallel_compiled(four):
    four.run(checks.tp, "layers", 2, False, False, True, "relu")


@pytest.mark.parametrize(
    "kind, how, accumulate, checkpoints",
    [
        ("layers", "ddp", True, False),
        ("mlp", "ddp", True, False),
        ("mlp", "ddp static", False, False),
        ("mlp", "ddp compiled", False, False),
        ("mlp", "fsdp", True, False),
        ("mlp", "fsdp", False, True),
        ("layers", "ddp static", False, False),
        ("layers", "ddp compiled", False, False),
        ("gated", "ddp", True, False),
        ("layers", "fsdp", False, False),
        ("layers", "fsdp", True, False),
        ("layers", "fsdp", False, True),
        ("gated", "fsdp", False, True),
    ],
)
def test_data_parallel(kind, how, accumulate, checkpoints, four):
    """Two blocks, in two or four backwards."""
    backward, each = {
        "layers": ("_linear_backward", 2),
        "mlp": ("_linear_backward_across", 1),
        "gated": ("_glu_backward", 1),
    }[kind]
    for operators in four.run(checks.data_parallel, kind, how, accumulate, checkpoints):
        count = 2 * each * (4 if accumulate else 2)
        assert how == "ddp compiled" or operators.count(backward) == count, operators


@pytest.mark.parametrize("kind", ["layers", "mlp", "fuse_"])
def test_fsdp_by_layer(kind, four):
    """A block that FSDP wraps is one operator; after `fuse_` wrapped layers run as written."""
    for operators in four.run(checks.data_parallel, kind, "fsdp by layer"):
        assert bool(operators) == (kind != "fuse_")
        assert ("_linear_backward_across" in operators) == (kind == "mlp")


@pytest.mark.parametrize("how", ["ddp", "ddp views", "fsdp"])
@pytest.mark.parametrize(("kind", "weights"), [("layers", 2), ("gated", 3)])
def test_products_add_gradients(kind, weights, how, four):
    """The products of two blocks add gradients in every second of four micro-batches."""
    assert set(four.run(checks.adding, kind, how)) == {2 * weights * 2}


@pytest.mark.parametrize("how", ["ddp compiled", "fsdp"])
def test_products_add_gradients_in_compiled_blocks(how, four):
    assert set(four.run(checks.adding, "layers", how, True)) == {2 * 2 * 2}


@pytest.mark.parametrize("compiled", [False, True])
def test_products_add_gradients_in_fp32(compiled, four):
    """In all four micro-batches, as the first writes fp32, too."""
    assert set(four.run(checks.adding, "layers", "fsdp mixed", compiled)) == {2 * 2 * 4}


def test_mixed_precision(four):
    four.run(checks.mixed_precision, "layers")


@pytest.mark.parametrize(("kind", "sequence"), [("layers", True), ("mlp", False), ("gated", True)])
def test_fsdp_and_tensor_parallel(kind, sequence, four):
    calls = four.run(checks.two_dimensions, kind, sequence)[0]
    backward, count = {
        "layers": ("_linear_backward", 4),
        "mlp": ("_linear_backward_across", 2),
        "gated": ("_glu_backward", 2),
    }[kind]
    assert operators(calls).count(backward) == count


def test_checkpoints_are_read_by_other_arrangements(four, tmp_path):
    four.run(checks.checkpoint_across, str(tmp_path / "checkpoint"))


def test_pipeline_stages_between_fused_layers(four):
    four.run(checks.pipeline)


@pytest.mark.parametrize("how", ["ddp", "fsdp", "tp"])
def test_warming_up_leaves_no_trace(how, four):
    ran = four.run(checks.warmed_up, how)[0]
    assert ran[0] == "_linear_aux"
    assert ("_linear_backward" in ran) == (how != "fsdp")
