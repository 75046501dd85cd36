"""The checks of test_parallel.py and others over NCCL, on two GPUs."""

from functools import partial

import parallel_checks as parallel
import plan_checks
import pytest
import strategy_checks as strategies
from operators import conv, gated, mlp

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(
    ("make", "sizes", "every"),
    [
        *((make, ((4, 3), 16, 8), 7) for make in strategies.LAYERS.values()),
        (partial(mlp, "gelu_tanh", layers=3, widths=(8, 5)), ((3, 4), 6, 4), 797),
        (partial(gated, "apart", "silu", down=True, hidden=8), ((4, 3), 6, 5), 967),
        (partial(gated, "stacked", "gelu_tanh", down=True, hidden=8), ((4, 3), 6, 5), 79),
        (partial(conv, batch=4, out=8, stride=(2, 1), padding=(1, 1)), ((), 1, 1), 13),
    ],
    ids=lambda value: value().label if callable(value) else None,
)
def test_strategies(make, sizes, every, two_gpus):
    two_gpus.run(strategies.check, make, (2,), sizes, every)


@pytest.mark.parametrize("kind", ["layers", "mlp", "gated", "fuse_", "fuse_ after"])
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel(kind, sequence, two_gpus):
    calls = two_gpus.run(parallel.tp, kind, 2, sequence, False)[0]
    names = [name for name, *_ in calls]
    if kind == "gated":
        assert names.count("_glu_backward") == 2
    elif kind == "mlp":
        assert names.count("_linear_backward_across") == 2
    else:
        assert names.count("_linear_aux") == 2


@pytest.mark.parametrize("how, accumulate", [("ddp", True), ("ddp static", False)])
def test_ddp(how, accumulate, two_gpus):
    for operators in two_gpus.run(parallel.data_parallel, "mlp", how, accumulate):
        assert operators.count("_linear_backward_across") == (8 if accumulate else 4)


@pytest.mark.parametrize("how", ["fsdp", "fsdp by layer"])
def test_fsdp(how, two_gpus):
    two_gpus.run(parallel.data_parallel, "layers", how)


@pytest.mark.parametrize("how", ["ddp", "ddp views", "fsdp", "fsdp mixed"])
def test_products_add_gradients(how, two_gpus):
    assert min(two_gpus.run(parallel.adding, "layers", how)) > 0


def test_mixed_precision(two_gpus):
    two_gpus.run(parallel.mixed_precision, "layers")


def test_plans_of_one_rank_go_to_all(two_gpus):
    (count, before, after), (count_too, others, after_too) = two_gpus.run(plan_checks.real)
    assert count == count_too > 0
    assert before and others and before != others
    # a line says as well whether the plan was measured or read
    assert len(after.splitlines()) == len(after_too.splitlines()) == count


def test_the_same_plans_give_the_same_bits(two_gpus):
    assert two_gpus.run(plan_checks.same_bits) == [(0, False)] * 2
