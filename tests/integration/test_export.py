"""torch.export and AOTInductor: through a file into a fresh process, also one without Python."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from fresh_process import (
    IMPORTS,
    LIBRARY,
    LOAD_EXPORTED,
    LOAD_LIBRARY,
    LOAD_PACKAGE,
    ROOT,
    RUN,
    python,
)
from helpers import one_thread  # noqa: F401
from torch import nn
from torch.export import Dim

import torch_fused_linear as tfl

RUNNER = ROOT / "examples" / "cpp" / "aoti_runner"
TOKENS = Dim("tokens", min=2, max=64)


class Network(nn.Module):
    """Every operator, and a plain pair for the pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            tfl.FusedLinearReLU(6, 9),
            tfl.FusedLinearGELU(9, 8, bias=False),
            tfl.FusedLinear(8, 8),
            nn.Tanh(),
            tfl.FusedMLP(8, 16, 8, activation="gelu_erf"),
            tfl.FusedLinearSiLU(8, 8),
            tfl.FusedGatedMLP(8, 12, activation="gelu_tanh"),
            nn.Tanh(),
            nn.Linear(8, 12),
            nn.ReLU(),
            nn.Linear(12, 5),
        )

    def forward(self, x):
        return self.layers(x)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Network().eval().requires_grad_(False)


def export(model, **kwargs):
    x = torch.randn(4, 3, 6)
    return torch.export.export(model, (x,), dynamic_shapes={"x": {0: TOKENS}}, **kwargs)


def save_data(model, path):
    inputs = [torch.randn(n, 3, 6) for n in (2, 7, 33)]
    torch.save([(x, model(x)) for x in inputs], path)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_in_a_fresh_process(strict, model, tmp_path):
    torch.export.save(export(model, strict=strict), tmp_path / "model.pt2")
    save_data(model, tmp_path / "data.pt")
    code = "\n".join([IMPORTS, LOAD_LIBRARY, LOAD_EXPORTED, RUN])
    done = python(code, tmp_path / "model.pt2", tmp_path / "data.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"


def test_exported_program_without_the_library(model, tmp_path):
    """torch says which operator is missing and what to do about it."""
    torch.export.save(export(model), tmp_path / "model.pt2")
    code = "\n".join([IMPORTS, LOAD_EXPORTED])
    done = python(code, tmp_path / "model.pt2", cwd=tmp_path)
    assert done.returncode != 0
    assert "failed to resolve torch.ops.fused.linear_relu.default" in done.stderr
    assert "import the custom op to register it before deserializing" in done.stderr


def test_exported_program_is_decomposed_around_our_operators(model):
    """Core ATen for everything else; ours stay whole, without what only training needs."""
    graph = export(model).run_decompositions().graph
    ours = [n.target.overloadpacket.__name__ for n in graph.nodes if "fused." in str(n.target)]
    assert ours == ["linear_relu", "linear_gelu", "linear", "mlp", "linear_silu", "gated_mlp"]


# --- AOTInductor ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(model, tmp_path_factory):
    """[the packed model, what was replaced in it]: one compilation for all tests below."""
    if not (shutil.which("g++") or shutil.which("c++")):
        pytest.skip("needs a C++ compiler")
    # What is tested is not how fast the code around the operators is.
    options = tfl.compile_options(options={"aot_inductor.compile_wrapper_opt_level": "O0"})
    path = tmp_path_factory.mktemp("aoti") / "model.pt2"
    with torch._inductor.config.patch("aot_inductor.precompile_headers", False):
        torch._inductor.aoti_compile_and_package(
            export(model), package_path=str(path), inductor_configs=options
        )
    return path, options["pre_grad_custom_pass"].replaced


def test_pass_joins_layers_of_a_package(package):
    """The plain ones, and ours that stand one by one."""
    assert package[1] == {"mlp": 2}


def plain_packages_crash(tmp_path):
    """Whether loading a package without any operator of ours ends the process here as well."""
    exported = torch.export.export(nn.Linear(6, 9), (torch.randn(4, 6),))
    path = tmp_path / "plain.pt2"
    torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
    return python("\n".join([IMPORTS, LOAD_PACKAGE]), path, cwd=tmp_path).returncode < 0


def test_package_in_a_fresh_process(package, model, tmp_path):
    save_data(model, tmp_path / "data.pt")
    code = "\n".join([IMPORTS, LOAD_LIBRARY, LOAD_PACKAGE, RUN])
    done = python(code, package[0], tmp_path / "data.pt", cwd=tmp_path)
    if done.returncode < 0 and plain_packages_crash(tmp_path):
        pytest.skip("the packages that torch makes on this machine crash, plain ones too")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """examples/cpp/aoti_runner, built."""
    if not shutil.which("cmake") or not (shutil.which("g++") or shutil.which("c++")):
        pytest.skip("needs cmake and a C++ compiler")
    build = tmp_path_factory.mktemp("aoti_runner")
    for command in (
        ["cmake", "-S", RUNNER, "-B", build, f"-DTORCH_ROOT={Path(torch.__file__).parent}"],
        ["cmake", "--build", build],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "aoti_runner"


def run_in_cpp(runner, library, package, x, tmp_path):
    torch.save(x, tmp_path / "x.pt")
    command = [runner, library, package, tmp_path / "x.pt", tmp_path / "y.pt"]
    return subprocess.run(command, capture_output=True, text=True)


def test_package_in_a_process_without_python(package, runner, model, tmp_path):
    for n in (2, 11):
        x = torch.randn(n, 3, 6)
        done = run_in_cpp(runner, LIBRARY, package[0], x, tmp_path)
        assert done.returncode == 0, done.stderr
        torch.testing.assert_close(torch.load(tmp_path / "y.pt"), model(x))


def test_package_without_the_library(package, runner, tmp_path):
    """The message names the operator; where there is no library, the file."""
    x = torch.randn(2, 3, 6)
    other = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    done = run_in_cpp(runner, other, package[0], x, tmp_path)
    assert done.returncode == 1 and "Could not find schema for fused::" in done.stderr
    done = run_in_cpp(runner, tmp_path / "none.so", package[0], x, tmp_path)
    assert done.returncode == 1 and "none.so: cannot open shared object file" in done.stderr
