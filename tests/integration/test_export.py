"""torch.export and AOTInductor: through a file into a fresh process, also one without Python."""

import shutil
from pathlib import Path

import pytest
import torch
from compiler import has_compiler
from fresh_process import LIBRARY, LOAD_EXPORTED, LOAD_LIBRARY, LOAD_PACKAGE, RUN, python
from networks import NETWORKS, OPERATORS, batch, network
from processes import ROOT, run
from torch import nn

import torch_fused_linear as tfl

RUNNER = ROOT / "examples" / "cpp" / "aoti_runner"
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


def export(name, model=None, device="cpu", last=False, **kwargs):
    model = (model or network(name, device)).eval().requires_grad_(False)
    dim, x = torch.export.Dim("batch", min=2, max=64), batch(name, 4, device=device)
    x = x.to(memory_format=torch.channels_last) if last else x
    return model, torch.export.export(model, (x,), dynamic_shapes=({0: dim},), **kwargs)


def assert_equal_in_a_fresh_process(load, path, model, name, last=False):
    """In one that has our library, but not our Python."""
    inputs = [batch(name, n) for n in (2, 7, 33)]
    if last:
        inputs = [x.to(memory_format=torch.channels_last) for x in inputs]
    torch.save([(x, model(x)) for x in inputs], path.with_name("data.pt"))
    code = "\n".join([LOAD_LIBRARY, load, RUN])
    done = python(code, path, path.with_name("data.pt"), cwd=path.parent, code=None)
    if done.returncode < 0 and load == LOAD_PACKAGE and plain_packages_crash(path.parent):
        pytest.skip("the packages that torch makes on this machine crash, plain ones too")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"


@pytest.mark.parametrize(
    "strict, name", [(True, "vectors"), (False, "low memory"), (False, "images")]
)
def test_exported_program(strict, name, tmp_path):
    """Our operators stay whole, in core ATen too, without what only training needs."""
    model, program = export(name, strict=strict)
    for graph in (program.graph, program.run_decompositions().graph):
        targets = [str(node.target) for node in graph.nodes]
        ours = [t.split(".")[1] for t in targets if t.startswith("fused.")]
        assert ours == OPERATORS[name]
    torch.export.save(program, tmp_path / "model.pt2")
    assert_equal_in_a_fresh_process(LOAD_EXPORTED, tmp_path / "model.pt2", model, name)


@pytest.mark.cuda
@pytest.mark.parametrize("name", NETWORKS)
def test_exported_program_on_a_gpu(name, cuda):
    model, program = export(name, device=cuda)
    for n in (2, 9):
        x = batch(name, n, device=cuda)
        torch.testing.assert_close(program.module()(x), model(x))


def test_exported_program_without_the_library(tmp_path):
    """torch says which operator is missing and what to do about it."""
    torch.export.save(export("vectors")[1], tmp_path / "model.pt2")
    done = python(LOAD_EXPORTED, tmp_path / "model.pt2", cwd=tmp_path, code=1)
    assert "failed to resolve torch.ops.fused.linear_relu.default" in done.stderr
    assert "import the custom op to register it before deserializing" in done.stderr


def with_plain_pair(name):
    """The network, and layers of torch's for the pass to join."""
    if name == "vectors":
        plain = nn.Tanh(), nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 3)
    else:
        plain = nn.Unflatten(1, (5, 1, 1)), nn.Conv2d(5, 6, 1), nn.ReLU(inplace=True)
    return nn.Sequential(network(name), *plain)


def pack(name, folder, last=False):
    """[the model, the packed program, what the pass replaced]."""
    if not has_compiler:
        pytest.skip("needs a C++ compiler")
    # The speed of the code around the operators is not tested.
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    options = tfl.compile_options(options=options, conv=name == "images")
    model, program = export(name, with_plain_pair(name), last=last)
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(folder / "model.pt2"), inductor_configs=options
    )
    return model, folder / "model.pt2", options["pre_grad_custom_pass"].replaced


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """One compilation for all tests below."""
    return pack("vectors", tmp_path_factory.mktemp("aoti"))


def plain_packages_crash(tmp_path):
    """Returns whether loading a package without operators of ours ends the process, too."""
    exported = torch.export.export(nn.Linear(6, 9), (torch.randn(4, 6),))
    path = tmp_path / "plain.pt2"
    torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
    return python(LOAD_PACKAGE, path, cwd=tmp_path, code=None).returncode < 0


def test_package(packed):
    """In a fresh process; the pass has joined the plain layers, and ours that stand one by one."""
    model, path, replaced = packed
    assert set(replaced) == {"mlp"} and replaced["mlp"] >= 2, replaced
    assert_equal_in_a_fresh_process(LOAD_PACKAGE, path, model, "vectors")


def test_package_of_images(tmp_path):
    """In NHWC, as test_compile.py has both."""
    model, path, replaced = pack("images", tmp_path, last=True)
    assert replaced == {"conv2d_relu": 1}, "of the plain pair"
    assert_equal_in_a_fresh_process(LOAD_PACKAGE, path, model, "images", last=True)


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    if not shutil.which("cmake") or not has_compiler:
        pytest.skip("needs cmake and a C++ compiler")
    build = tmp_path_factory.mktemp("aoti_runner")
    run("cmake", "-S", RUNNER, "-B", build, f"-DTORCH_ROOT={Path(torch.__file__).parent}")
    run("cmake", "--build", build)
    return build / "aoti_runner"


def run_in_cpp(runner, library, package, x, tmp_path, code=0):
    torch.save(x, tmp_path / "x.pt")
    return run(runner, library, package, tmp_path / "x.pt", tmp_path / "y.pt", code=code)


def test_package_in_a_process_without_python(packed, runner, tmp_path):
    model, path, _ = packed
    for n in (2, 11):
        x = batch("vectors", n)
        run_in_cpp(runner, LIBRARY, path, x, tmp_path)
        torch.testing.assert_close(torch.load(tmp_path / "y.pt"), model(x))


def test_package_without_the_library(packed, runner, tmp_path):
    """The message names the operator; where there is no library, the file."""
    other = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for library, words in (
        (other, "Could not find schema for fused::"),
        (tmp_path / "none.so", "none.so: cannot open shared object file"),
    ):
        done = run_in_cpp(runner, library, packed[1], batch("vectors", 2), tmp_path, code=1)
        assert words in done.stderr
