"""Functions that the ranks run for plans.broadcast; without a GPU files stand for plans."""

from unittest import mock

import torch
import torch.distributed as dist
from plan_files import file_text

import torch_fused_linear as tfl
from torch_fused_linear import plans


def travels(group_ranks, source):
    """The file that each rank read, the order in which it forgot and read, and its own file."""
    group = None if group_ranks is None else dist.new_group(group_ranks)
    rank = dist.get_rank()
    if group_ranks is not None and rank not in group_ranks:
        return None
    text = file_text(f"gpu rank {rank}")
    done = []

    def save(path):
        with open(path, "w") as file:
            file.write(text)

    def load(path):
        with open(path) as file:
            done.append(file.read().splitlines()[1])
        return 17

    with (
        mock.patch.object(plans, "save", save),
        mock.patch.object(plans, "load", load),
        mock.patch.object(plans, "clear", lambda: done.append("clear")),
    ):
        assert plans.broadcast(group, source) == 17
    return done


def fails():
    """Each rank's error if the source has no plans to save."""
    try:
        plans.broadcast()
    except RuntimeError as failure:
        return str(failure)


def real():
    """Plans of rank 0 after a warm-up: every rank has them, and no others, then."""
    rank = dist.get_rank()
    options = {"device": "cuda", "dtype": torch.bfloat16}
    with plans.budget(20):
        plans.clear()
        layer = tfl.FusedLinearGELU(64 * (rank + 1), 256, **options)
        plans.warmup(layer, torch.randn(512, 64 * (rank + 1), **options))
        before = plans.show()
    return plans.broadcast(), before, plans.show()


def same_bits():
    """How many elements differ from rank 0's after ``broadcast``; whether more was measured."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    with plans.budget(20):
        plans.clear()
        for model, x in _models_and_inputs(options, range(2)):
            plans.warmup(model, x)
    plans.broadcast()
    differ = 0
    with plans.budget(0):
        for model, x in _models_and_inputs(options, range(3)):  # the last has no plans
            y = model(x)
            grads = torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])
            for value in (y.detach(), *grads):
                first = value.clone()
                dist.broadcast(first, 0)
                differ += int((first != value).sum())
    return differ, "measured" in plans.show()


def _models_and_inputs(options, which):
    for k in which:
        torch.manual_seed(k)
        width = 128 << k
        model = tfl.FusedMLP(width, 4 * width, width, activation="gelu_tanh", **options)
        yield model, torch.randn(1024, width, **options).requires_grad_()
