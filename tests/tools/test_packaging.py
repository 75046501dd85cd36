"""What is handed out: the source distribution, the wheel, what they say of themselves."""

import importlib.util
import json
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
from test_build import SUFFIX, WORKING, _releases, build, copy, fake_torch, module_at

import torch_fused_linear as tfl

__all__ = ["copy"]

ROOT = Path(__file__).resolve().parents[2]
MINOR = ".".join(torch.__version__.split(".")[:2])
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
    built = tree / "torch_fused_linear" / "lib" / "torch2.11"  # which is left out
    built.mkdir(parents=True)
    (built / "_C.json").touch()
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
    other = fake_torch(folder / "torch", "2.14.1", cuda=None)
    (other / "include/ATen").mkdir(parents=True)
    (other / "include/ATen/Config.h").touch()
    environment = {"TORCH_FUSED_LINEAR_CUDA": "0", "CXX": str(compiler)}
    environment["TORCH_FUSED_LINEAR_TORCH"] = f"{Path(torch.__file__).parent}:{other}"
    return built_wheel(unpacked, folder, TORCH_FUSED_LINEAR_LABEL="1", **environment)


@needs_setuptools
def test_the_wheel_has_the_library_and_what_users_need(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        about = message_from_string(archive.read(metadata).decode())
    inside = {n.partition("/")[2] for n in names if n.startswith("torch_fused_linear/")}
    made = {"_C.abi3.so", "_C.json", f"_direct{SUFFIX}", "_direct.json"}
    for release in (MINOR, "2.14"):
        assert {f"lib/torch{release}/{name}" for name in made} <= inside
    assert {"include/fused_linear.h", "include/fused_activation.h"} <= inside
    assert {"py.typed", "__main__.py", "doctor.py"} <= inside
    sources = ROOT / "torch_fused_linear"
    assert {p.relative_to(sources).as_posix() for p in sources.rglob("*.py")} <= inside
    tops = {n.partition("/")[0] for n in names}
    assert tops == {"torch_fused_linear", Path(metadata).parent.name}, "tests or tools are inside"
    assert about["Version"] == f"{tfl.__version__}+pt{MINOR.replace('.', '')}.pt214.cpu"
    (needed,) = (r for r in about.get_all("Requires-Dist") if r.startswith("torch"))
    wanted = _releases.requirement([MINOR, "2.14"])
    assert sorted(needed[5:].split(",")) == sorted(wanted[5:].split(","))
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


def test_a_label_names_each_torch_and_cuda():
    assert build.labelled("0.2.0", ["2.11", "2.15"], "13.0") == "0.2.0+pt211.pt215.cu130"
    assert build.labelled("0.2.0", ["2.12"], None) == "0.2.0+pt212.cpu"


# --- the backend, and what a build says --------------------------------------------------------


def test_the_backend_sees_the_packages_that_isolation_hides(monkeypatch, tmp_path):
    """pip takes them off the path; torch is among them."""
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    module_at(ROOT / "build_tools" / "backend.py")
    assert sys.path[-2] == str(tmp_path) or sys.path[-1] == str(tmp_path)


def test_the_backend_names_the_setuptools_that_is_needed(monkeypatch):
    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    with pytest.raises(SystemExit, match=r"(?s)77 or newer.*has 65\.5\.0.*pip install 'setuptools"):
        module_at(ROOT / "build_tools" / "backend.py")
    monkeypatch.setitem(sys.modules, "setuptools", None)  # as where it is not installed
    with pytest.raises(SystemExit, match=r"(?s)77 or newer.*has none.*pip install 'setuptools"):
        module_at(ROOT / "build_tools" / "backend.py")


def test_a_python_that_is_too_old_is_said_before_anything_is_imported(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    monkeypatch.setitem(sys.modules, "setuptools", None)
    with pytest.raises(SystemExit, match=r"Python 3\.10 or newer is needed, .* is 3\.9$"):
        module_at(ROOT / "build_tools" / "backend.py")


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
    for target in re.findall(r"make ([\w-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def matrix():
    """The releases of torch and the Pythons that the workflow tries."""
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    rows = re.findall(r"^ +(torch|python): (\[.*\])$", text, re.MULTILINE)
    return [max((json.loads(row) for key, row in rows if key == name), key=len) for name in NAMES]


NAMES = ("torch", "python")


def test_readme_says_what_the_workflow_tries():
    releases, pythons = matrix()
    assert tuple(releases) == _releases.TESTED
    supported = f"PyTorch {releases[0]} to {releases[-1]}, Python {pythons[0]} to {pythons[-1]}"
    assert supported in (ROOT / "README.md").read_text()
    about = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"Python :: (3\.\d+)", about) == pythons
    assert f'requires-python = ">={pythons[0]}"' in about


# In place of make: it says what it is asked for, and fails where it is told to.
MAKE = '#!/bin/sh\necho "make $2"\ncase "$2" in $FAILS) exit 3 ;; esac\n'


@pytest.mark.parametrize(
    ("fails", "code", "said"),
    [
        ("nothing", 0, ["make lint", "make test-releases", "make test"]),
        ("lint", 3, ["make lint"]),
        (".venv-*", 0, ["make lint", "torch 2.15: not tested, it could not be", "make test"]),
        (
            "test-releases",
            3,
            ["make lint", "make test-releases", "torch 2.15: FAILED, and so", "make test"],
        ),
        ("test", 3, ["make lint", "make test-releases", "make test"]),
    ],
)
def test_the_newest_torch_is_tried_but_hides_nothing_of_the_oldest(tmp_path, fails, code, said):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    for name, text in (("make", MAKE), ("df", "#!/bin/sh\necho Avail; echo 99G\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILS": fails}
    command = [tmp_path / ".ci" / "run"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == code, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == len(said) and all(map(str.startswith, lines, said)), lines


def test_the_newest_torch_is_one_that_is_supported():
    newest = re.search(r"^newest=(\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert newest[1] == _releases.TESTED[-1]
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    tests = re.search(r"^RELEASES = (.+)$", makefile, re.MULTILINE)[1].split()
    assert all((ROOT / "tests" / name).exists() for name in tests)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("wish", "built"), [(None, "0"), ("0", "0")])
def test_make_builds_for_the_cpu_without_nvcc_and_says_so(tmp_path, wish, built):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "setup.py").write_text(
        "import os\ndef missing_nvcc():\n"
        "    return '' if os.environ.get('TORCH_FUSED_LINEAR_CUDA') == '0' else 'the-nvcc==13.0'\n"
        "if __name__ == '__main__':\n    print(os.environ['TORCH_FUSED_LINEAR_CUDA'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_FUSED_LINEAR_CUDA"}
    environment |= {"TORCH_FUSED_LINEAR_CUDA": wish} if wish else {}
    command = ["make", "--no-print-directory", "build", f"PYTHON={sys.executable}"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == built
    told = "no fitting nvcc (pip install 'the-nvcc==13.0'): what follows is built for the CPU only"
    assert (told in result.stdout) == (wish is None)
