"""The source distribution and the wheel: their files and their metadata."""

import json
import os
import re
import shutil
import sys
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import setuptools
import torch
from processes import ROOT, git_files, module_at, python, run, script
from test_build import MINOR, SUFFIX, WORKING, build, fake_torch, words_of_exit

import torch_fused_linear as tfl
from torch_fused_linear._support import releases as of_torch


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """That of what git has, made where there is setuptools and no torch, and unpacked."""
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("needs setuptools 77")
    folder = tmp_path_factory.mktemp("sdist")
    tree, packages = folder / "tree", folder / "packages"
    for name in git_files():
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
    assert python("-S", "-c", says, cwd=tree, **alone).stdout == "None\n"
    python("-S", "setup.py", "-q", "sdist", cwd=tree, **alone)
    (path,) = (tree / "dist").iterdir()
    shutil.unpack_archive(path, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


def test_the_sdist_holds_what_git_has_and_says_what_depends_on_torch(sdist):
    names = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    made = {n for n in names if n.startswith("torch_fused_linear.egg-info")}
    assert names - made - {"PKG-INFO", "setup.cfg"} == git_files()
    about = message_from_string((sdist / "PKG-INFO").read_text())
    assert about["Version"] == tfl.__version__ and about["License-Expression"] == "BSD-3-Clause"
    assert "torch>=2.11" in about.get_all("Requires-Dist")
    assert "requires-dist" in about.get_all("Dynamic")


def built_wheel(sdist, folder, **environment):
    tree = shutil.copytree(sdist, folder / "tree")
    program = "import sys; sys.path.insert(0, 'build_tools'); import backend; "
    program += f"backend.build_wheel({str(folder)!r})"
    python("-c", program, cwd=tree, **environment)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built by a compiler that writes a word instead of code."""
    folder = tmp_path_factory.mktemp("wheel")
    other = fake_torch(folder / "torch", "2.14.1", cuda=None)
    environment = {"TORCH_FUSED_LINEAR_CUDA": "0", "CXX": str(script(folder / "c++", WORKING))}
    environment["TORCH_FUSED_LINEAR_TORCH"] = f"{Path(torch.__file__).parent}:{other}"
    return built_wheel(sdist, folder, TORCH_FUSED_LINEAR_LABEL="1", **environment)


def test_the_wheel_has_the_library_and_what_users_need(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        about = message_from_string(archive.read(metadata).decode())
    inside = {n.partition("/")[2] for n in names if n.startswith("torch_fused_linear/")}
    made = {"_C.abi3.so", "_C.json", f"_direct{SUFFIX}", "_direct.json"}
    for release in (MINOR, "2.14"):
        assert {f"lib/torch{release}/{name}" for name in made} <= inside
    assert {"include/fused_linear.h", "include/fused_activation.h", "py.typed"} <= inside
    sources = ROOT / "torch_fused_linear"
    assert {p.relative_to(sources).as_posix() for p in sources.rglob("*.py")} <= inside
    tops = {n.partition("/")[0] for n in names}
    assert tops == {"torch_fused_linear", Path(metadata).parent.name}, "tests or tools are inside"
    assert about["Version"] == f"{tfl.__version__}+pt{MINOR.replace('.', '')}.pt214.cpu"
    (needed,) = (r for r in about.get_all("Requires-Dist") if r.startswith("torch"))
    wanted = of_torch.requirement([MINOR, "2.14"])
    assert sorted(needed[5:].split(",")) == sorted(wanted[5:].split(","))
    assert about["Description-Content-Type"] == "text/markdown" and about["Requires-Python"]
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert f"-{tag}-{tag}-linux" in wheel.name, "the short way to the operators is of one Python"


# Compiles everything, and tries it in an environment with torch and nothing else, as a user's.
@pytest.mark.long
def test_a_real_wheel_of_the_sdist_works_where_it_is_installed(sdist, tmp_path):
    path = built_wheel(sdist, tmp_path, TORCH_FUSED_LINEAR_CUDA="0")
    venv.create(tmp_path / "env", with_pip=True)
    own = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env" / "lib").glob("python3.*/site-packages")
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    run(own, "-m", "pip", "install", "--no-deps", path, cwd=tmp_path, PYTHONPATH="")
    doctor = run(own, "-m", "torch_fused_linear.doctor", cwd=tmp_path, PYTHONPATH="").stdout
    assert str(packages) in doctor and doctor.rstrip().endswith("OK")
    shutil.copy(ROOT / "docs" / "start.py", tmp_path)
    assert "1 block fused" in run(own, "start.py", cwd=tmp_path, PYTHONPATH="").stdout


def test_the_version_is_one():
    assert build.public_version() == tfl.__version__
    assert f"\nversion: {tfl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{tfl.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert build.labelled("0.2.0", ["2.11", "2.15"], "13.0") == "0.2.0+pt211.pt215.cu130"


# --- the backend, and what a build says --------------------------------------------------------


BACKEND = ROOT / "build_tools" / "backend.py"


def test_the_backend_sees_the_packages_that_isolation_hides(monkeypatch, tmp_path):
    """pip takes them off the path; torch is among them."""
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    module_at(BACKEND)
    assert str(tmp_path) in sys.path[-2:], "last"


def test_the_backend_names_the_setuptools_that_is_needed(monkeypatch):
    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    for module, has in ((setuptools, "65.5.0"), (None, "none")):  # None: it is not installed
        monkeypatch.setitem(sys.modules, "setuptools", module)
        message = words_of_exit(module_at, BACKEND)
        assert "77 or newer" in message and f"has {has}" in message
        assert "pip install 'setuptools" in message


def test_a_python_that_is_too_old_is_said_before_anything_is_imported(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    monkeypatch.setitem(sys.modules, "setuptools", None)
    message = words_of_exit(module_at, BACKEND)
    assert "Python 3.10 or newer is needed" in message and message.endswith(" is 3.9")


# --- the workflow ------------------------------------------------------------------------------


def test_the_workflow_runs_what_is_there():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert ".ci/run" in text and (ROOT / ".ci" / "run").exists()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([\w-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_readme_says_what_the_workflow_tries():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    rows = re.findall(r"^ +(torch|python): (\[.*\])$", text, re.MULTILINE)
    releases, pythons = (
        max((json.loads(row) for key, row in rows if key == name), key=len)
        for name in ("torch", "python")
    )
    assert tuple(releases) == of_torch.TESTED
    supported = f"PyTorch {releases[0]} to {releases[-1]}, Python {pythons[0]} to {pythons[-1]}"
    assert supported in (ROOT / "README.md").read_text()
    about = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"Python :: (3\.\d+)", about) == pythons
    assert f'requires-python = ">={pythons[0]}"' in about


@pytest.mark.parametrize(
    ("fails", "code", "said"),
    [
        ("nothing", 0, ["make test-releases", "make test"]),
        ("lint", 3, []),
        (".venv-*", 0, ["torch 2.15: not tested, it could not be", "make test"]),
        ("test-releases", 3, ["make test-releases", "torch 2.15: FAILED, and so", "make test"]),
        ("test", 3, ["make test-releases", "make test"]),
    ],
)
def test_the_newest_torch_is_tried_but_hides_nothing_of_the_oldest(
    tmp_path, monkeypatch, fails, code, said
):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    script(tmp_path / "make", 'echo "make $2"\ncase "$2" in $FAILS) exit 3 ;; esac')
    script(tmp_path / "df", "echo Avail; echo 99G")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    lines = run(tmp_path / ".ci" / "run", code=code, FAILS=fails).stdout.splitlines()
    said = ["make lint", *said]
    assert len(lines) == len(said) and all(map(str.startswith, lines, said)), lines


def test_the_newest_torch_is_one_that_is_supported():
    newest = re.search(r"^newest=(\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert newest[1] == of_torch.TESTED[-1]
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    tests = re.search(r"^RELEASES = (.+)$", makefile, re.MULTILINE)[1].split()
    assert all((ROOT / "tests" / name).exists() for name in tests)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("wish", ["", "0"])
def test_make_builds_for_the_cpu_without_nvcc_and_says_so(tmp_path, monkeypatch, wish):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "setup.py").write_text(
        "import os\ndef missing_nvcc():\n"
        "    return '' if os.environ.get('TORCH_FUSED_LINEAR_CUDA') == '0' else 'the-nvcc==13.0'\n"
        "if __name__ == '__main__':\n    print(os.environ['TORCH_FUSED_LINEAR_CUDA'])\n"
    )
    monkeypatch.setenv("TORCH_FUSED_LINEAR_CUDA", wish)
    if not wish:
        monkeypatch.delenv("TORCH_FUSED_LINEAR_CUDA")
    command = ("make", "--no-print-directory", "build", f"PYTHON={sys.executable}")
    output = run(*command, cwd=tmp_path).stdout
    assert output.splitlines()[-1] == "0"
    told = "no fitting nvcc (pip install 'the-nvcc==13.0'): what follows is built for the CPU only"
    assert (told in output) == (not wish)
