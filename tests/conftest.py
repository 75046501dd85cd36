"""Fixtures and rules for the whole suite."""

import os
import sys

# Plans go by rule: quicker, and the same in every run. Tests of measuring set a budget themselves.
os.environ.setdefault("TORCH_FUSED_LINEAR_BUDGET_MS", "0")
# Inductor looks for no vector instructions: that takes longer than to compile its kernels.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items):
    for item in items:
        if "two_gpus" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.two_gpus)
        if item.get_closest_marker("two_gpus"):
            item.add_marker(pytest.mark.cuda)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    elif torch.cuda.device_count() < 2 or not torch.distributed.is_nccl_available():
        for item in items:
            if item.get_closest_marker("two_gpus"):
                item.add_marker(pytest.mark.skip(reason="needs two GPUs and NCCL"))


@pytest.fixture
def cuda():
    """The CUDA device, for a test that is about it; the test is skipped where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def no_sums_in_graphs():
    """Else all graphs compiled after a test of gradients that products add would look for sums."""
    yield
    accumulation = sys.modules.get("torch_fused_linear.accumulation")
    if accumulation is not None:
        accumulation.was_asked_for = False


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """cuDNN uses TF32 for fp32 unless told not to, in eager too."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
