"""What is handed out: the source distribution, the wheel, what they say of themselves."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import setuptools
import torch
from test_build import SUFFIX, WORKING, build, build_in, copy, module_at

import torch_fused_linear as tfl

__all__ = ["copy"]

ROOT = Path(__file__).resolve().parents[2]
MINOR = ".".join(torch.__version__.split(".")[:2])
FAKE = {"TORCH_DONT_CHECK_COMPILER_ABI": "1", "TORCH_FUSED_LINEAR_CUDA": "0"}

needs_setuptools = pytest.mark.skipif(
    int(setuptools.__version__.split(".")[0]) < 77, reason="needs setuptools 77"
)


def run(*command, cwd, **more):
    environment = {**os.environ, **more}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0 or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source distribution of what git has, made where there is setuptools and no torch."""
    folder = tmp_path_factory.mktemp("sdist")
    tree, packages = folder / "tree", folder / "packages"
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    (tree / "torch_fused_linear" / "_C.abi3.so").touch()  # a build is left out
    packages.mkdir()
    installed = Path(setuptools.__file__).parents[1]
    for path in [*installed.glob("setuptools*"), installed / "_distutils_hack"]:
        (packages / path.name).symlink_to(path)
    alone = {"PYTHONPATH": str(packages)}
    says = "import importlib.util as u; print(u.find_spec('torch'))"
    assert run(sys.executable, "-S", "-c", says, cwd=tree, **alone) == "None\n"
    run(sys.executable, "-S", "setup.py", "-q", "sdist", cwd=tree, **alone)
    (path,) = (tree / "dist").iterdir()
    return path


@needs_setuptools
def test_the_sdist_holds_what_git_has(sdist):
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    made = {"PKG-INFO", "setup.cfg"}
    assert {n for n in names if not n.startswith("torch_fused_linear.egg-info")} - made == {
        *tracked()
    }


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


@needs_setuptools
def test_the_sdist_says_what_depends_on_torch(unpacked):
    about = message_from_string((unpacked / "PKG-INFO").read_text())
    assert about["Version"] == tfl.__version__ and about["License-Expression"] == "BSD-3-Clause"
    assert "torch>=2.11" in about.get_all("Requires-Dist")
    assert "requires-dist" in about.get_all("Dynamic")


def built_wheel(tree, folder, **environment):
    program = "import sys; sys.path.insert(0, 'build_tools'); import backend; "
    program += f"backend.build_wheel({str(folder)!r})"
    run(sys.executable, "-c", program, cwd=tree, **environment)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):
    """Built from the source distribution, by a compiler that writes a word instead of code."""
    folder = tmp_path_factory.mktemp("wheel")
    compiler = folder / "compiler"
    compiler.write_text(WORKING)
    compiler.chmod(0o755)
    environment = {**FAKE, "CC": str(compiler), "CXX": str(compiler)}
    return built_wheel(unpacked, folder, TORCH_FUSED_LINEAR_LABEL="1", **environment)


@needs_setuptools
def test_the_wheel_has_the_library_and_what_users_need(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        about = message_from_string(archive.read(metadata).decode())
    inside = {n.partition("/")[2] for n in names if n.startswith("torch_fused_linear/")}
    assert {"_C.abi3.so", "_C.json", f"_direct{SUFFIX}", "_direct.json"} <= inside
    assert {"include/fused_linear.h", "include/fused_activation.h"} <= inside
    assert {"py.typed", "__main__.py", "doctor.py"} <= inside
    sources = ROOT / "torch_fused_linear"
    assert {p.relative_to(sources).as_posix() for p in sources.rglob("*.py")} <= inside
    tops = {n.partition("/")[0] for n in names}
    assert tops == {"torch_fused_linear", Path(metadata).parent.name}, "tests or tools are inside"
    assert about["Version"] == f"{tfl.__version__}+pt{MINOR.replace('.', '')}cpu"
    assert f"torch=={MINOR}.*" in about.get_all("Requires-Dist")
    assert about["Description-Content-Type"] == "text/markdown" and about["Requires-Python"]
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert f"-{tag}-{tag}-linux" in wheel.name, "the short way to the operators is of one Python"


# Compiles everything, and tries it in an environment with torch and nothing else, as a user's.
@pytest.mark.long
@needs_setuptools
def test_a_real_wheel_of_the_sdist_works_where_it_is_installed(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (tree,) = (tmp_path / "source").iterdir()
    path = built_wheel(tree, tmp_path, TORCH_FUSED_LINEAR_CUDA="0")
    venv.create(tmp_path / "env", with_pip=True)
    python, name = tmp_path / "env" / "bin" / "python", f"python{sys.version_info[0]}."
    (packages,) = (tmp_path / "env" / "lib").glob(f"{name}*/site-packages")
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    run(python, "-m", "pip", "install", "--no-deps", path, cwd=tmp_path, PYTHONPATH="")
    doctor = run(python, "-m", "torch_fused_linear.doctor", cwd=tmp_path, PYTHONPATH="")
    assert str(packages) in doctor and doctor.rstrip().endswith("OK")
    shutil.copy(ROOT / "docs" / "start.py", tmp_path)
    assert "1 block fused" in run(python, "start.py", cwd=tmp_path, PYTHONPATH="")


def test_the_version_is_one(tmp_path):
    assert build.public_version() == tfl.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == tfl.__version__
    assert f"## [{tfl.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_a_label_names_torch_and_cuda():
    assert build.labelled("0.2.0", "2.11.0+cu130", "13.0") == "0.2.0+pt211cu130"
    assert build.labelled("0.2.0", "2.12.1", None) == "0.2.0+pt212cpu"


def test_architectures_are_those_that_nvcc_knows():
    assert build.default_architectures("13.0") == "7.5;8.0;8.6;9.0;10.0;12.0+PTX"
    assert build.default_architectures("12.8") == "7.5;8.0;8.6;9.0;10.0;12.0+PTX"
    assert build.default_architectures("12.6") == "7.5;8.0;8.6;9.0+PTX"


@pytest.mark.parametrize("wish", [None, "0"])
def test_no_nvcc_is_an_error_with_both_ways_out_unless_cpu_was_said(monkeypatch, wish):
    """Never a CPU-only library without a word where torch runs on GPUs."""
    monkeypatch.setattr(build, "torch_versions", lambda: ("2.11.0+cu130", "13.0"))
    monkeypatch.setattr(build, "find_cuda", lambda wish: (None, None, "no nvcc was found"))
    monkeypatch.setattr(build, "setup", lambda **about: None)
    monkeypatch.setattr(sys, "argv", ["setup.py", "dist_info"])
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("TORCH_FUSED_LINEAR_CUDA", raising=False)
    if wish:
        monkeypatch.setenv("TORCH_FUSED_LINEAR_CUDA", wish)
        return build.main()
    with pytest.raises(SystemExit, match="no nvcc was found") as stopped:
        build.main()
    assert "pip install nvidia-cuda-nvcc==13.0" in str(stopped.value)
    assert "TORCH_FUSED_LINEAR_CUDA=0" in str(stopped.value)


# --- the backend, and what a build says --------------------------------------------------------


def test_the_backend_sees_the_packages_that_isolation_hides(monkeypatch, tmp_path):
    """pip takes them off the path; torch is among them."""
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    module_at(ROOT / "build_tools" / "backend.py")
    assert sys.path[-2] == str(tmp_path) or sys.path[-1] == str(tmp_path)


def test_the_backend_names_the_setuptools_that_is_needed(monkeypatch):
    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    with pytest.raises(SystemExit, match=r"(?s)77 or newer.*65\.5\.0.*pip install \."):
        module_at(ROOT / "build_tools" / "backend.py")


OUTPUT = """\
import os, sys, time
sys.path.insert(0, {tools!r})
import output
with output.summarised(output.Path("build.log"), every=0.05):
    os.system("echo '[1/2] g++ -c a.cpp'; echo 'a.cpp:3: warning: odd'; echo out of sight >&2")
    time.sleep(0.2)
    {then}
print("afterwards")
"""
SAID = "[2/2] g++ -c b.cpp\nFAILED: b.o\ng++ -c b.cpp\nb.cpp:1: error: no\nninja: build stopped"
FAILED = f"print({SAID!r}); raise RuntimeError('Error compiling objects')"


def said(then, folder):
    program = OUTPUT.format(tools=str(ROOT / "build_tools"), then=then)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True
    )


def test_a_build_says_little(tmp_path):
    result = said("pass", tmp_path)
    lines = result.stdout.splitlines()
    assert "  0 min, 1 of 2 files compiled" in lines
    assert lines[-3:] == ["a.cpp:3: warning: odd", "built in 0 s", "afterwards"]
    assert "g++" not in result.stdout and result.stderr == ""
    assert "out of sight" in (tmp_path / "build.log").read_text()


def test_a_failed_build_ends_with_the_compilers_words(tmp_path):
    result = said(FAILED, tmp_path)
    assert result.returncode == 1 and "afterwards" not in result.stdout
    assert result.stderr.endswith("build.log\n\nb.cpp:1: error: no\n")
    assert "Traceback" not in result.stderr and "g++ -c" not in result.stderr


# --- the workflow ------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("check_jsonschema") is None,
    reason="needs check-jsonschema: pip install -r requirements-lint.txt",
)
@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("vendor.github-workflows", ".github/workflows/ci.yml"),
        ("vendor.citation-file-format", "CITATION.cff"),
    ],
)
def test_a_file_is_as_its_schema_says(schema, file):
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, file, cwd=ROOT)


def test_the_workflow_runs_what_is_there():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert ".ci/run" in text and (ROOT / ".ci" / "run").exists()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("wish", "built"), [(None, "0"), ("1", "1"), ("0", "0")])
def test_make_builds_for_the_cpu_without_nvcc_and_says_so(tmp_path, wish, built):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "setup.py").write_text(
        "import os\ndef lacks_nvcc():\n    return True\n"
        "if __name__ == '__main__':\n    print(os.environ['TORCH_FUSED_LINEAR_CUDA'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_FUSED_LINEAR_CUDA"}
    environment |= {"TORCH_FUSED_LINEAR_CUDA": wish} if wish else {}
    command = ["make", "--no-print-directory", "build", f"PYTHON={sys.executable}"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == built
    assert ("built for the CPU only" in result.stdout) == (wish is None)


def test_a_build_in_the_tree_takes_any_setuptools(copy):
    """make uses what there is, and setuptools before 77 refuses our pyproject.toml."""
    (copy / "csrc" / "library.cpp").write_text("int changed;\n")
    (copy / "pyproject.toml").write_text("[project]\nname = 3\n")
    result = build_in(copy, WORKING)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "built in" in result.stdout
