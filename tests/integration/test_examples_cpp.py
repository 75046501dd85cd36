"""The programs of examples/cpp, built and run by the very lines of their README."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import processes
import pytest
import torch
from helpers import device_param, one_thread  # noqa: F401

import torch_fused_linear as tfl

EXAMPLES = processes.ROOT / "examples" / "cpp"
LIBRARY = tfl.library_path()
BUILD, RUN = re.findall(r"```sh\n(.*?)```", (EXAMPLES / "README.md").read_text(), re.DOTALL)
BINARIES = Path("build/cpp")


def needed() -> dict[str, str | None]:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ["g++", "clang++"]), None)
    return {
        "cmake": shutil.which("cmake"),
        "a C++ compiler": compiler,
        "ninja or make": shutil.which("ninja") or shutil.which("make"),
    }


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Runs commands where somebody stands who has the tree and this python, and built as told."""
    absent = [name for name, found in needed().items() if not found]
    if absent:
        pytest.skip(f"needs {' and '.join(absent)}")
    folder = tmp_path_factory.mktemp("tree")
    (folder / "examples").symlink_to(processes.ROOT / "examples")
    python = processes.script(folder / "bin" / "python3", f'exec "{sys.executable}" "$@"')
    environment = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(processes.ROOT),
        "CXX": needed()["a C++ compiler"],
        "CXXFLAGS": "-O0 -Wall -Wextra -Werror",
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("MAX_JOBS", str(os.cpu_count())),
        "OMP_NUM_THREADS": "1",  # sums in the order of this process, see one_thread
    }
    if shutil.which("ninja"):
        environment["CMAKE_GENERATOR"] = "Ninja"

    def run(*command, **more):
        return processes.run(*map(str, command), cwd=folder, **{**environment, **more})

    run.folder = folder
    run("bash", "-euc", BUILD)
    return run


@pytest.fixture(scope="module")
def model(shell):
    """The folder with what make_model.py makes."""
    shell("python3", EXAMPLES / "make_model.py", "made")
    return shell.folder / "made"


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^loss (\S+)$", output, re.MULTILINE)]


def trained_in_python(device: str, model: torch.nn.Module | None = None) -> list[torch.Tensor]:
    """Does the same as `scripted`, with the layers in eager mode."""
    made = runpy.run_path(str(EXAMPLES / "make_model.py"))
    model = (model or made["make_model"]()).to(device)
    x, target = (tensor.to(device) for tensor in made["make_data"]().values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    for _ in range(100):
        loss = torch.nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [model(x).detach().cpu(), *(p.detach().cpu() for p in model.parameters())]


def test_the_lines_of_the_readme_run_both(shell):
    assert len(losses(shell("bash", "-euc", RUN).stdout)) == 12


@device_param
def test_scripted_trains_as_python_does(shell, model, device, tmp_path):
    """Every parameter, bit for bit, after a hundred steps."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    seen = losses(shell(BINARIES / "scripted", LIBRARY, tmp_path, device).stdout)
    assert len(seen) == 6 and seen[-1] < seen[0] / 4, "it learns"
    got, want = torch.load(tmp_path / "result.pt"), trained_in_python(device)
    torch.testing.assert_close(list(got), want, rtol=0, atol=0)


def test_a_model_that_fuse_script_changed_trains_as_the_plain_one_in_python(shell, model, tmp_path):
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    kinds = (torch.nn.ReLU, torch.nn.GELU)
    layers = [m for kind in kinds for m in (torch.nn.Linear(8, 8), kind())]
    plain = torch.nn.Sequential(*layers, torch.nn.Linear(8, 4))
    scripted = torch.jit.script(plain)
    assert len(tfl.fuse_script_(scripted).fused) == 2
    scripted.save(tmp_path / "model.pt")
    shell(BINARIES / "scripted", LIBRARY, tmp_path)
    got, want = torch.load(tmp_path / "result.pt"), trained_in_python("cpu", plain)
    torch.testing.assert_close(list(got), want)


@device_param
def test_direct_has_the_gradients_of_torch(shell, device):
    done = shell(BINARIES / "direct", device)
    assert done.stdout.count("4 gradients equal torch::nn's") == 4
    seen = losses(done.stdout)
    assert len(seen) == 6 and seen[-1] < seen[0] / 4, "it learns"


@pytest.mark.parametrize("program", ["scripted", "direct"])
def test_no_python_in_the_process(program, shell, model, tmp_path):
    """By the loader's own record of every file it mapped, those of dlopen included."""
    arguments = [LIBRARY, model] if program == "scripted" else []
    log = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(tmp_path / "log")}
    shell(BINARIES / program, *arguments, **log)
    (record,) = tmp_path.glob("log.*")
    files = set(re.findall(r"calling init: (\S+)", record.read_text()))
    names = {Path(file).name for file in files}
    assert {"libtorch_cpu.so", Path(LIBRARY).name} <= names
    assert not [name for name in names if re.match(r"lib(torch_)?python", name)]


@pytest.mark.parametrize(
    "library, message",
    [
        ("nowhere/_C.abi3.so", "the operator library does not load: nowhere/_C.abi3.so: "),
        ("libm.so.6", r"made/model\.pt uses operators of torch_fused_linear, which are not loaded"),
    ],
    ids=["absent", "another library"],
)
def test_scripted_says_what_to_load(library, message, shell, model):
    done = shell(BINARIES / "scripted", library, model, code=1)
    assert re.search(message, done.stderr), done.stderr
    assert "load the file that torch_fused_linear.library_path() names" in done.stderr


def test_configuring_without_the_packages_says_what_to_pass(shell):
    configure = ["cmake", "-S", "examples/cpp", "-B", "build/none"]
    done = shell(*configure, "-DPYTHON=false", code=1)
    assert "-DTORCH_FOLDER=" in done.stderr and "-DPYTHON=" in done.stderr
    done = shell(*configure, "-DPYTHON=python3", "-DFUSED_FOLDER=/", code=1)
    assert "build torch_fused_linear first" in done.stderr
