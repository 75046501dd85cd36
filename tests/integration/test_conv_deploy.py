"""The convolution through a file into a fresh process: export, AOTInductor, TorchScript."""

import shutil

import pytest
import torch
from fresh_process import IMPORTS, LOAD_EXPORTED, LOAD_LIBRARY, LOAD_PACKAGE, RUN, python
from helpers import one_thread  # noqa: F401
from torch import nn
from torch.export import Dim

import torch_fused_linear as tfl

IMAGES = Dim("images", min=2, max=64)
LOAD_SCRIPTED = "model = torch.jit.load(sys.argv[1])"


class Network(nn.Module):
    """Every argument and every default of the operator, and a plain pair for the pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            tfl.FusedConv2dReLU(4, 8, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
            tfl.FusedConv2dReLU(8, 6, 3, groups=2, padding="same", bias=False),
            nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular"),
            nn.ReLU(inplace=True),
        )
        self.weight = nn.Parameter(torch.randn(5, 6, 1, 1))

    def forward(self, x):
        return torch.ops.fused.conv2d_relu(self.layers(x), self.weight)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Network().eval().requires_grad_(False)


def images(batch, last=False):
    x = torch.randn(batch, 4, 9, 8)
    return x.to(memory_format=torch.channels_last) if last else x


def export(model, last=False, **kwargs):
    return torch.export.export(
        model, (images(4, last),), dynamic_shapes={"x": {0: IMAGES}}, **kwargs
    )


def assert_equal_in_a_fresh_process(load, path, model, folder, last=False):
    """In one that has our library, but not our Python."""
    inputs = [images(batch, last) for batch in (2, 7, 33)]
    torch.save([(x, model(x)) for x in inputs], folder / "data.pt")
    code = "\n".join([IMPORTS, LOAD_LIBRARY, load, RUN])
    done = python(code, path, folder / "data.pt", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program(strict, model, tmp_path):
    program = export(model, strict=strict)
    graph = program.run_decompositions().graph
    ours = [n for n in graph.nodes if str(n.target) == "fused.conv2d_relu.default"]
    assert len(ours) == 3, "they stay whole in core ATen"
    torch.export.save(program, tmp_path / "model.pt2")
    assert_equal_in_a_fresh_process(LOAD_EXPORTED, tmp_path / "model.pt2", model, tmp_path)


def test_scripted_module(model, tmp_path):
    torch.jit.script(model).save(tmp_path / "model.pt")
    assert_equal_in_a_fresh_process(LOAD_SCRIPTED, tmp_path / "model.pt", model, tmp_path)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="needs a C++ compiler")
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
def test_package_of_aotinductor(last, model, tmp_path):
    options = tfl.compile_options(
        options={"aot_inductor.compile_wrapper_opt_level": "O0"}, conv=True
    )
    with torch._inductor.config.patch("aot_inductor.precompile_headers", False):
        torch._inductor.aoti_compile_and_package(
            export(model, last), package_path=str(tmp_path / "model.pt2"), inductor_configs=options
        )
    assert options["pre_grad_custom_pass"].replaced == {"conv2d_relu": 1}, "of the plain pair"
    assert_equal_in_a_fresh_process(LOAD_PACKAGE, tmp_path / "model.pt2", model, tmp_path, last)
