"""Arrangements of torch.distributed beside one process with the whole batch, in fp64.

Four processes on the CPU; the same checks on two GPUs are in test_two_gpus.py.
"""

import fuse_checks
import parallel_checks as checks
import pytest

KINDS = ["layers", "mlp"]
FORWARD = ("_linear_aux", "[8, 4, 8] x [8, 8]")  # a half of the 16 hidden features


def operators(calls):
    return [name for name, *_ in calls]


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel_runs_fused_at_both_ends(kind, four):
    calls = four.run(checks.tp, kind, 2, False, False)[0]
    assert calls[0][:2] == FORWARD
    across = [handover for name, *_, handover in calls if name == "_linear_backward_across"]
    assert across == ["handed over" if kind == "layers" else ""] * 2


def test_local_activations_between_layers_end_the_handover(four):
    """What ColwiseParallel gives by default is a tensor that another node has made."""
    calls = four.run(checks.tp, "layers", 2, False, True)[0]
    assert operators(calls).count("_linear_aux") == 2
    assert "_linear_backward_across" not in operators(calls)
    assert {c[3] for c in calls if c[0] == "_linear_backward"} >= {
        "plain: the input is not a fused layer's output"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_sequence_parallel(kind, four):
    calls = four.run(checks.tp, kind, 4, True, False)[0]
    assert operators(calls).count("_linear_backward_across") == 2


@pytest.mark.parametrize("sequence", [False, True])
def test_gated_blocks_run_fused_at_both_ends(sequence, four):
    calls = four.run(checks.tp, "gated", 2, sequence, False)[0]
    halves = {shapes for name, shapes, *_ in calls if name in ("_glu", "_glu_backward")}
    assert halves == {"[8, 4, 8]"}
    assert operators(calls).count("_glu_backward") == 2


@pytest.mark.parametrize("kind", ["mlp children", "gated children"])
@pytest.mark.parametrize("sequence", [False, True])
def test_children_with_plans_of_their_own_run_one_by_one(kind, sequence, four):
    assert four.run(checks.tp, kind, 2, sequence, True)[0] == []


@pytest.mark.parametrize("kind", ["fuse_", "fuse_ after"])
@pytest.mark.parametrize(("sequence", "local"), [(False, True), (False, False), (True, False)])
def test_fused_models(kind, sequence, local, four):
    """The operator runs between the hooks of torch's plan, whichever came first."""
    calls = four.run(checks.tp, kind, 2, sequence, local)[0]
    assert calls[0][:2] == FORWARD
    across = [handover for name, *_, handover in calls if name == "_linear_backward_across"]
    assert across == ([] if local else ["handed over"] * 2)


def test_where_fused_models_run_as_written(four):
    """An activation after a sum that is not made yet, a hook of somebody else, odd layouts."""
    for how, operators_of in four.run(fuse_checks.hooks_around_layers)[0].items():
        assert operators_of == (["linear_relu"] if how == "fused" else []), how


def test_tensor_parallel_compiled(four):
    four.run(checks.tp, "layers", 2, False, False, True, "relu")


@pytest.mark.parametrize("how", ["no_sync", "static graph", "compiled"])
def test_ddp(how, four):
    handed_over = four.run(checks.ddp, "layers", how)
    assert how == "compiled" or set(handed_over) == {8 if how == "no_sync" else 4}


def test_gated_blocks_in_ddp_and_fsdp(four):
    four.run(checks.ddp, "gated", "no_sync")
    four.run(checks.fsdp, "gated", "block", "checkpointed")


@pytest.mark.parametrize("how", ["plain", "accumulated", "checkpointed"])
def test_fsdp_by_block(how, four):
    for handed_over, _ in four.run(checks.fsdp, "layers", "block", how):
        assert handed_over == (8 if how == "accumulated" else 4)


@pytest.mark.parametrize("kind", ["layers", "mlp", "fuse_"])
def test_fsdp_by_layer(kind, four):
    """FSDP's node stands between the layers; after ``fuse_`` they run as written."""
    for handed_over, remarks in four.run(checks.fsdp, kind, "layer", "plain"):
        assert handed_over == 0
        assert ("plain: FSDP wraps the layer by itself" in remarks) == (kind == "layers")
        assert bool(remarks) == (kind != "fuse_")


@pytest.mark.parametrize("how", ["ddp", "ddp views", "fsdp"])
@pytest.mark.parametrize(("kind", "weights"), [("layers", 2), ("gated", 3)])
def test_products_add_gradients(kind, weights, how, four):
    """Of two blocks, in each second of four micro-batches."""
    assert set(four.run(checks.adding, kind, how)) == {2 * weights * 2}


def test_products_add_gradients_in_fp32(four):
    """In all four micro-batches, as the first writes fp32, too."""
    assert set(four.run(checks.adding, "layers", "fsdp mixed")) == {2 * 2 * 4}


def test_mixed_precision(four):
    four.run(checks.mixed_precision, "layers")


@pytest.mark.parametrize(("kind", "sequence"), [("layers", True), ("mlp", False), ("gated", True)])
def test_fsdp_and_tensor_parallel(kind, sequence, four):
    calls = four.run(checks.two_dimensions, kind, sequence)[0]
    backward = "_glu_backward" if kind == "gated" else "_linear_backward_across"
    assert operators(calls).count(backward) == 2


def test_checkpoints_are_read_by_other_arrangements(four, tmp_path):
    four.run(checks.checkpoint_across, str(tmp_path / "checkpoint"))


def test_pipeline_stages_between_fused_layers(four):
    four.run(checks.pipeline)


@pytest.mark.parametrize("how", ["ddp", "fsdp", "tp"])
def test_warming_up_leaves_no_trace(how, four):
    ran = four.run(checks.warmed_up, how)[0]
    assert ran[0] == "_linear_aux"
    assert ("_linear_backward" in ran) == (how != "fsdp")
