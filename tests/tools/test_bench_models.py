"""The benchmark suite `models`: the same work by all contenders, counted, failures in words."""

from __future__ import annotations

import copy
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from helpers import one_thread  # noqa: F401

pytest.importorskip("tqdm")

import torch_fused_linear as tfl
from benchmarks.__main__ import main
from benchmarks.cases import MODELS, Case, cases_of, makes_sense
from benchmarks.models import FAMILIES, Models
from benchmarks.run import measure_case

CPU = torch.device("cpu")
TINY = {case.model: case for case in cases_of("models", CPU, quick=True, dtypes=["fp32"])}
# how many blocks are fused
BLOCKS = {"ViT-tiny": 2, "BERT-tiny": 3, "GPT-2 tiny": 2, "OPT-tiny": 2, "LLaMA-tiny": 2}
BLOCKS |= {"DLRM tiny": 1, "TD3 tiny": 1, "VGG-tiny": 4, "ResNet-tiny, folded": 9}
LIBRARIES = {"ViT-tiny": "timm", "ResNet-tiny, folded": "torchvision"}
LIBRARIES |= dict.fromkeys(("DLRM tiny", "TD3 tiny", "VGG-tiny"), "torch")


def outcome(made: Models, name: str) -> list[torch.Tensor]:
    """What is left of a call: the output, or all gradients."""
    contender = made.contender(name)
    with contender.conditions():
        if made.case.mode == "forward":
            return [contender.call()]
        contender.call()
        contender.call()  # gradients do not add up
    own, inputs = made.copies[name], made.original[1]
    leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    return [leaf.grad.clone() for leaf in (*leaves, *own.parameters()) if leaf.grad is not None]


@pytest.mark.parametrize("mode", ["forward", "step"])
@pytest.mark.parametrize("name", TINY)
def test_fused_does_the_work_of_eager(name, mode):
    pytest.importorskip(LIBRARIES.get(name, "transformers"))
    case = replace(TINY[name], mode=mode)
    if not makes_sense(case, CPU):
        pytest.skip("it is for inference only")
    made = Models(case, CPU)
    want = outcome(made, "eager")
    plain = copy.deepcopy(made.copies["eager"])
    got = outcome(made, "fused")
    assert made.replaced() == {"fused": BLOCKS[name]}
    assert made.copies["fused"] is not made.copies["eager"]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if mode == "step":  # of every parameter that the model uses, and of the loss as torch has it
        assert len(want) > len(list(plain.parameters())) - 3
        plain.zero_grad()
        plain(*made.original[1]).backward()
        grads = [p.grad for p in plain.parameters() if p.grad is not None]
        torch.testing.assert_close(grads, want[-len(grads) :], rtol=1e-4, atol=1e-5)


# In the folded network convolutions share one ReLU: the stem and two in each block.
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("name", "mode", "ways", "count"),
    [
        ("DLRM tiny", "forward", ("compile", "compile+pass"), 1),
        ("DLRM tiny", "step", ("compile", "compile+pass"), 1),
        ("ResNet-tiny, folded", "forward", ("compile+pass",), 1 + 4 * 2),
    ],
)
def test_compiled_does_the_work_of_eager(name, mode, ways, count):
    pytest.importorskip(LIBRARIES[name])
    made = Models(replace(TINY[name], mode=mode), CPU)
    want = outcome(made, "eager")
    for way in ways:
        torch.testing.assert_close(outcome(made, way), want, rtol=1e-4, atol=1e-5)
    assert made.replaced() == {"compile+pass": count}


LLAMA = 16 * (4 * 2048**2 + 3 * 2048 * 5632) / 1e6 + 2 * 8192 * 2048 / 1e6
# millions of parameters, and how many blocks are fused
SIZES = {"ViT-B/16": (86.6, 12), "BERT-base": (109.5, 13), "GPT-2 small": (124.4, 12)}
SIZES |= {"OPT-125M": (125.2, 12), "LLaMA, 16 layers": (LLAMA, 16), "DLRM top MLP": (3.52, 1)}
SIZES |= {"TD3 critic": (0.0722, 1), "VGG-16": (138.36, 14), "ResNet-50, folded": (25.53, 33)}
OPERATORS = {"relu": "linear_relu", "gelu": "linear_gelu (tanh)", "silu": "gated_mlp (SiLU)"}
OPERATORS["gelu-erf"] = "linear_gelu (erf)"


@pytest.mark.parametrize(("name", "activation"), dict.fromkeys((n, a) for n, a, _ in MODELS))
def test_each_model_is_of_its_size_and_activation(name, activation):
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    pytest.importorskip("torchvision")
    (sizes,) = {size for n, _, size in MODELS if n == name}
    case = Case("models", sizes, 1, "bf16", activation, "forward", name)
    with torch.device("meta"):
        model = FAMILIES[name].make(case, FAMILIES[name].config)
    millions, blocks = SIZES[name]
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    report = tfl.fuse_(model)
    assert len(report.fused) == blocks and not report.skipped
    if name in ("VGG-16", "ResNet-50, folded"):
        assert report.fused[0].after == ("conv2d_relu",)
    else:
        assert {block.after[0] for block in report.fused} == {OPERATORS[activation]}


def test_a_missing_package_is_told_in_words(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "timm", None)
    arguments = ["models", "--quick", "--device", "cpu", "--only", "ViT", "--only", "step"]
    assert main(arguments) == 0, "nothing of ours has failed"
    output = capsys.readouterr().out
    assert "eager failed: ModuleNotFoundError: " in output and "timm" in output


def test_memory_of_a_step():
    """Of two blocks with 64 hidden features for each of five tokens of two images."""
    pytest.importorskip("timm")
    case, _ = cases_of("memory-models", CPU, quick=True, dtypes=["fp32"])
    assert case.mode == "saved", "the peak can be told of a GPU only"
    record = measure_case(case, ["fused", "fused-low", "eager"], CPU, seconds=0)
    assert not record.failed and record.unit == "MiB"
    assert record.replaced == {"fused": 2, "fused-low": 2}
    kept = {name: number.median * 2**20 for name, number in record.numbers.items()}
    assert kept["fused"] <= kept["eager"]
    assert kept["fused"] - kept["fused-low"] == 2 * 2 * 5 * 64 * 4
