"""Blocks in FP8 under FSDP2 and DDP: a rank's gradients are those of one process."""

import float8_checks
import pytest
import torch


@pytest.mark.parametrize("kind", ["fuse_", "modules"])
@pytest.mark.parametrize(
    "how, dtype",
    [
        ("ddp", torch.float32),
        ("fsdp", torch.float32),
        ("fsdp", torch.bfloat16),
        ("fsdp, master weights", torch.bfloat16),
    ],
)
def test_gradients_are_the_mean_of_the_ranks(kind, how, dtype, four):
    pytest.importorskip("torchao.float8")
    steps = four.run(float8_checks.trained, kind, how, dtype)[0]
    ends = ("activation", "gating", "activation_backward", "gating_backward")
    assert [steps.count(f"_float8_{end}") for end in ends] == [1, 1, 1, 1]
