"""The build: what it decides, what it leaves in the tree, what loading says when that is wrong."""

import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from torch_fused_linear import _library

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_fused_linear"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = module_at(ROOT / "setup.py")
hopper, precompiled = build.hopper, build.precompiled
gpu_record = module_at(ROOT / "tests" / "support" / "gpu_record.py")


# --- the decision: CUDA or not ----------------------------------------------------------------


def toolkit(folder, version):
    """A toolkit that consists of an nvcc which tells its version."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
    nvcc.chmod(0o755)
    return folder


def test_the_first_nvcc_of_torchs_cuda_is_taken(tmp_path):
    old, new = toolkit(tmp_path / "old", "12.4"), toolkit(tmp_path / "new", "13.2")
    newer = toolkit(tmp_path / "newer", "13.3")
    home, version, why = build.choose_cuda("13.0", [tmp_path / "empty", old, new, newer])
    assert (home, version) == (new, "13.2")
    assert str(new) in why


def test_an_nvcc_of_another_cuda_is_refused_with_both_versions(tmp_path):
    home, version, why = build.choose_cuda("13.0", [toolkit(tmp_path, "12.4")])
    assert home is None and version is None
    assert "12.4" in why and "13.0" in why


def test_an_nvcc_that_does_not_answer_is_refused(tmp_path):
    toolkit(tmp_path, "13.0")
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    home, _, why = build.choose_cuda("13.0", [tmp_path])
    assert home is None and "unknown" in why


def test_a_torch_without_cuda_gets_a_cpu_library(tmp_path):
    assert build.choose_cuda(None, [toolkit(tmp_path, "13.0")]) == (
        None,
        None,
        "this torch is built without CUDA",
    )


def test_no_nvcc_gives_a_cpu_library(tmp_path):
    assert build.choose_cuda("13.0", [tmp_path]) == (None, None, "no nvcc was found")


def test_the_wish_for_no_cuda_wins(tmp_path):
    home, _, why = build.choose_cuda("13.0", [toolkit(tmp_path, "13.0")], "0")
    assert home is None and "TORCH_FUSED_LINEAR_CUDA=0" in why


def test_a_wish_for_cuda_that_cannot_be_met_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="not possible: no nvcc was found"):
        build.choose_cuda("13.0", [tmp_path], "1")
    with pytest.raises(SystemExit, match="built without CUDA"):
        build.choose_cuda(None, [toolkit(tmp_path, "13.0")], "1")


# --- our own products for Hopper GPUs -----------------------------------------------------------


def test_hopper_is_built_where_it_is_wanted(monkeypatch, tmp_path):
    (tmp_path / "cutlass").mkdir()
    numbers = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n"
    (tmp_path / "cutlass" / "version.h").write_text(numbers)
    monkeypatch.setattr(hopper, "headers", lambda: tmp_path)
    monkeypatch.setattr(hopper, "is_visible", lambda: False)
    default = build.default_architectures("13.0")
    assert hopper.choose("1", default) == (True, "CUTLASS 4.2.0")
    assert hopper.choose("1", "8.0;9.0a")[0]
    assert not hopper.choose("1", None)[0] and not hopper.choose("1", "8.0;10.0")[0]
    assert not hopper.choose("0", default)[0]
    built, why = hopper.choose(None, default)
    assert not built and "TORCH_FUSED_LINEAR_HOPPER=1" in why
    monkeypatch.setattr(hopper, "is_visible", lambda: True)
    assert hopper.choose(None, default)[0] and not hopper.choose("0", default)[0]


def test_a_wish_is_0_or_1(monkeypatch):
    for value, expected in (("0", "0"), ("1", "1"), ("", None)):
        monkeypatch.setenv("TORCH_FUSED_LINEAR_CUDA", value)
        assert build.wish_for("CUDA") == expected
    monkeypatch.setenv("TORCH_FUSED_LINEAR_CUDA", "yes")
    with pytest.raises(SystemExit, match="TORCH_FUSED_LINEAR_CUDA must be 0 or 1, got 'yes'"):
        build.wish_for("CUDA")


def test_hopper_without_cutlass_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(hopper, "headers", lambda: None)
    monkeypatch.setattr(hopper, "is_visible", lambda: True)
    with pytest.raises(SystemExit, match="pip install --no-deps nvidia-cutlass"):
        hopper.choose("1", "9.0")
    built, why = hopper.choose(None, "9.0")
    assert not built and "nvidia-cutlass" in why
    requirement = (ROOT / "requirements-hopper.txt").read_text().splitlines()[-1]
    assert requirement == hopper.PACKAGE


def test_one_kernel_of_each_pass_compiles_for_hopper(monkeypatch, tmp_path):
    """Nothing here may run them, but the code must be one that nvcc takes for this target."""
    home, _, why = build.find_cuda()
    if home is None or hopper.headers() is None:
        pytest.skip(f"needs nvcc ({why}) and CUTLASS")
    # all in one, each for one type and activation, of a layer's weight or of one by columns
    kernels = {"forward": "bf16 silu false", "saving_forward": "f16 relu true"}
    kernels |= {"backward": "f16 gelu_erf true", "gating": "bf16 gelu_tanh false"}
    kernels |= {"glu": "f16 silu false"}
    assert {kernel for kernel, *_ in hopper.UNITS} == kernels.keys()
    text, code = (hopper.KERNELS / "kernels.cu").read_text(), ""
    for kernel, (type_, activation, transposed) in zip(kernels, map(str.split, kernels.values())):
        code += f"template cudaError_t {kernel}<gemm::Type::{type_}, Activation::{activation}, "
        code += f"{transposed}>(const Product&);\n"
    includes, _, rest = text.partition("template <>")
    (tmp_path / "kernels.cu").write_text(f"{includes}{code}}}\n")
    assert "FUSED_KIND<gemm::Type::FUSED_TYPE, act, FUSED_TRANSPOSED>" in rest
    monkeypatch.setattr(hopper, "KERNELS", tmp_path)
    monkeypatch.setattr(hopper, "UNITS", [("forward", "bf16", "true")])
    monkeypatch.setattr(hopper, "FLAGS", [*hopper.FLAGS, "-cubin"])  # the device's part alone
    torch_include = Path(torch.__file__).parent / "include"
    folders = [torch_include, torch_include / "torch/csrc/api/include"]
    folders += [home / "include", home / "include/cccl"]
    (made,) = hopper.objects(home / "bin/nvcc", build.as_system(map(str, folders)), tmp_path, 1)
    assert b"sm_90a" in Path(made).read_bytes()
    before = Path(made).stat().st_mtime_ns
    hopper.objects(home / "bin/nvcc", build.as_system(map(str, folders)), tmp_path, 1)
    assert Path(made).stat().st_mtime_ns == before, "nothing has changed"


# --- torch's headers, precompiled -------------------------------------------------------------


def test_a_header_is_made_once_for_the_same_flags(monkeypatch, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs GCC")
    monkeypatch.setattr(precompiled, "HEADERS", ["cstddef"])
    versions = {"torch": "2.11.0", "cuda": None}

    def flags(*options, jobs=2):
        return precompiled.flags([compiler, *options], tmp_path, versions, jobs)

    made = tmp_path / "precompiled.h.gch"
    assert flags("-O1") == ["-include", str(tmp_path / "precompiled.h")]
    before = made.stat().st_mtime_ns
    assert flags("-O1") and made.stat().st_mtime_ns == before
    source = tmp_path / "source.cpp"
    source.write_text("std::size_t size;\n")
    command = [compiler, "-O1", *flags("-O1"), "-Winvalid-pch", "-Werror", "-c", source]
    subprocess.run([*command, "-o", tmp_path / "source.o"], check=True)
    assert flags("-O2") and made.stat().st_mtime_ns != before
    precompiled.remove(tmp_path)
    assert not made.exists() and flags("-O2") and made.exists()
    assert flags("-O2", jobs=64) == []
    monkeypatch.setattr(precompiled, "HEADERS", ["no/such/header.h"])
    assert flags("-O2") == [] and not made.exists()


def test_other_compilers_go_without(monkeypatch, tmp_path):
    other = tmp_path / "clang++"
    other.write_text("#!/bin/sh\necho clang version 19\n")
    other.chmod(0o755)
    assert precompiled.flags([str(other)], tmp_path, {"torch": "2.11.0", "cuda": None}, 2) == []
    assert not list(tmp_path.glob("precompiled*"))


# --- the library in this tree -----------------------------------------------------------------


def library():
    (path,) = PACKAGE.glob("_C*.so")
    return path


def test_the_library_is_of_these_sources():
    info = _library.build_info()
    config = {key: info[key] for key in ("torch", "cuda", "arch_list", "debug", "hopper")}
    assert info["fingerprint"] == build.fingerprint(config), "csrc has changed: run `make build`"


def test_the_library_knows_no_python():
    """A LibTorch program without Python loads it, so it may neither ask for Python nor link it."""
    symbols = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", library()],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "torch" in symbols  # nm has seen a library of torch's
    assert not re.findall(r"\b_?Py[A-Z_]\w*", symbols)
    dynamic = subprocess.run(
        ["readelf", "--dynamic", library()], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert any(name.startswith("libtorch") for name in needed)
    assert not [name for name in needed if "python" in name]


def test_the_public_header_is_installed_beside_the_library():
    for name in ("fused_linear.h", "fused_activation.h"):
        installed = PACKAGE / "include" / name
        assert installed.read_bytes() == (ROOT / "csrc" / name).read_bytes()


# --- building again ---------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    """A tree with what a build looks at, and a library that claims to be up to date."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(ROOT / "build_tools", tmp_path / "build_tools")
    (tmp_path / "csrc" / "python").mkdir(parents=True)
    (tmp_path / "csrc" / "python" / "direct.cpp").write_text("")
    for name in ("fused_linear.h", "fused_activation.h"):
        (tmp_path / "csrc" / name).write_text("#pragma once\n")
    (tmp_path / "csrc" / "library.cpp").write_text('#include "fused_linear.h"\n')
    package = tmp_path / "torch_fused_linear"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (package / "_C.abi3.so").write_text("finished")
    (package / f"_direct{SUFFIX}").write_text("finished")
    config = {"torch": torch.__version__, "cuda": None, "arch_list": None, "debug": False}
    config["hopper"] = False
    fingerprint = module_at(tmp_path / "setup.py").fingerprint(config)
    (package / "_C.json").write_text(json.dumps({**config, "fingerprint": fingerprint}))
    direct = {"torch": torch.__version__, "fingerprint": fingerprint + SUFFIX}
    (package / "_direct.json").write_text(json.dumps(direct))
    return tmp_path


# In place of a compiler: one that fails, so that no attempt to build goes unnoticed, and one that
# writes a file where it is told to.
FAILING = "#!/bin/sh\nexit 1\n"
WORKING = """#!/bin/sh
while [ $# -gt 1 ]; do
  [ "$1" = -o ] && echo built > "$2"
  shift
done
"""


def build_in(folder, compiler=FAILING):
    (folder / "compiler").write_text(compiler)
    (folder / "compiler").chmod(0o755)
    settings = {
        "CC": str(folder / "compiler"),
        "CXX": str(folder / "compiler"),
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",
        "TORCH_FUSED_LINEAR_CUDA": "0",
        "DEBUG": "0",
    }
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )


def test_a_second_build_does_nothing(copy):
    for path in copy.rglob("*"):
        os.utime(path)  # as after a copy: every time is new, no content is
    result = build_in(copy)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "up to date" in result.stdout
    assert not (copy / "build").exists()


@pytest.mark.parametrize(
    "changed", ["csrc/library.cpp", "csrc/fused_linear.h", "csrc/new.cpp", "setup.py"]
)
def test_any_change_of_content_is_noticed(copy, changed):
    with (copy / changed).open("a") as file:
        file.write("\n")
    os.utime(copy / changed, (0, 0))  # however old the file says it is
    assert build_in(copy).returncode != 0
    assert (copy / changed).stat().st_mtime > 0, "ninja, which compares times, would not notice"


@pytest.mark.parametrize("name", ["_C.abi3.so", f"_direct{SUFFIX}"])
def test_a_missing_library_is_noticed(copy, name):
    (copy / "torch_fused_linear" / name).unlink()
    assert build_in(copy).returncode != 0


def test_for_another_python_the_operators_are_not_built_again(copy):
    package = copy / "torch_fused_linear"
    (package / f"_direct{SUFFIX}").rename(package / "_direct.cpython-37m.so")
    direct = json.loads((package / "_direct.json").read_text())
    direct["fingerprint"] = direct["fingerprint"].removesuffix(SUFFIX) + ".cpython-37m.so"
    (package / "_direct.json").write_text(json.dumps(direct))
    result = build_in(copy, WORKING)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (package / f"_direct{SUFFIX}").read_text() == "built\n"
    assert (package / "_C.abi3.so").read_text() == "finished"
    assert "up to date" in build_in(copy).stdout


def test_a_failed_build_leaves_the_old_library_and_is_tried_again(copy):
    (copy / "csrc" / "library.cpp").write_text("int changed;\n")
    for _ in range(2):
        assert build_in(copy).returncode != 0
        assert (copy / "torch_fused_linear" / "_C.abi3.so").read_text() == "finished"


def test_a_finished_build_is_complete_and_not_repeated(copy):
    package = copy / "torch_fused_linear"
    (copy / "csrc" / "library.cpp").write_text("int changed;\n")
    first = build_in(copy, WORKING)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "CPU ONLY" in first.stdout and "TORCH_FUSED_LINEAR_CUDA=0" in first.stdout
    assert (package / "_C.abi3.so").read_text() == "built\n"
    assert (package / f"_direct{SUFFIX}").read_text() == "built\n"
    assert (package / "include" / "fused_activation.h").exists()
    about = json.loads((package / "_C.json").read_text())
    assert about["torch"] == torch.__version__ and about["cuda"] is None
    assert not list(package.glob("*.tmp"))
    assert "up to date" in build_in(copy).stdout


# --- loading ----------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path):
    """A copy of the package with its library, to be spoilt."""
    ignored = shutil.ignore_patterns("__pycache__", "include")
    return Path(shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=ignored))


def import_error(package, *folders):
    result = subprocess.run(
        [sys.executable, "-c", "import torch_fused_linear"],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (package.parent, *folders)))},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, "the import went through"
    # Only what the user reads last: the traceback above it quotes the causes.
    _, found, message = result.stderr.rpartition("ImportError: torch_fused_linear: ")
    assert found
    return message


def test_a_library_for_another_torch_names_both_versions_and_the_command(package):
    info = json.loads((package / "_C.json").read_text())
    (package / "_C.json").write_text(json.dumps({**info, "torch": "1.2.3+other"}))
    (package.parent / "setup.py").touch()
    message = import_error(package)
    assert "1.2.3+other" in message and torch.__version__ in message
    assert f"cd {package.parent} && {sys.executable} setup.py build_ext --inplace" in message


def test_outside_a_source_tree_the_command_is_pips(package):
    (package / "_C.json").unlink()
    assert f"{sys.executable} -m pip install --no-deps" in import_error(package)


def test_a_missing_library_is_told(package):
    (library_copy,) = package.glob("_C*.so")
    library_copy.unlink()
    assert "has not been built" in import_error(package)


def test_an_installed_copy_that_the_sources_hide_is_named(package, tmp_path):
    installed = tmp_path / "site" / PACKAGE.name
    shutil.copytree(package, installed)
    (package / "_C.json").unlink()
    assert "hides" not in import_error(package)
    assert f"{installed}: work in another folder" in import_error(package, tmp_path / "site")


def test_an_interrupted_build_is_told(package):
    (package / "_C.json").unlink()
    assert "a build that did not finish" in import_error(package)


def test_a_library_that_does_not_link_names_the_symbol_and_both_versions(package):
    """The versions agree, but a symbol is missing, as with a torch built from changed sources."""
    (library_copy,) = package.glob("_C*.so")
    library_copy.unlink()
    source = package.parent / "broken.c"
    source.write_text("extern int from_another_torch; int *use = &from_another_torch;\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library_copy, source], check=True)
    message = import_error(package)
    assert "undefined symbol: from_another_torch" in message
    assert message.count(torch.__version__) >= 2


IMPORTED = """
import torch, torch_fused_linear as tfl
x = torch.ones(2, 3)
assert tfl.linear_relu(x, x).shape == (2, 2)
print(type(tfl._library.direct).__name__)
"""


def spoil(package, how):
    if how == "missing":
        (package / f"_direct{SUFFIX}").unlink()
    elif how == "of another torch":
        (package / "_direct.json").write_text('{"torch": "1.2.3"}')
    elif how == "of no use":
        (package / f"_direct{SUFFIX}").write_text("no library")


@pytest.mark.parametrize("how", ["", "missing", "of another torch", "of no use"])
def test_torch_ops_stands_in_for_the_direct_calls(package, how):
    spoil(package, how)
    result = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        cwd=package.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ("_NotDirect" if how else "module")


# --- the record of the last run on a GPU ------------------------------------------------------


def test_the_record_speaks_for_the_files_that_git_would_commit():
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run([*git, *gpu_record.FOLDERS], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0 or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    record = gpu_record.RECORD.relative_to(ROOT).as_posix()
    expected = {p for p in listed.stdout.splitlines() if (ROOT / p).is_file()} - {record}
    expected = {p for p in expected if "/records/" not in p}  # what was found, of some tree
    assert set(gpu_record.tree_files()) == expected


def test_the_record_counts_what_pytest_reports(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 0\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_error(broken): pass\n"
        "@pytest.mark.parametrize('i', [1, 2])\n"
        "def test_skipped(i): pytest.skip('no moon')\n"
    )
    (tmp_path / "test_two_gpus.py").write_text("def test_good(): pass\n")
    report = tmp_path / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", f"--junitxml={report}", f"--rootdir={tmp_path}", tmp_path],
        cwd=tmp_path,
        capture_output=True,
    )
    assert gpu_record.summary(report, 1) == {
        "passed": 2,
        "failed": 2,
        "skipped": 2,
        "two_gpus": {"passed": 1, "failed": 0, "skipped": 0},
        "failed_tests": ["test_it::test_bad", "test_it::test_error"],
        "skip_reasons": {"no moon": 2},
    }


def test_a_crash_of_pytest_is_a_failure_in_the_record(tmp_path):
    assert gpu_record.summary(tmp_path / "none.xml", -11)["failed_tests"] == [
        "pytest wrote no report; it ended with -11"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_no_record_without_a_gpu():
    before = gpu_record.RECORD.read_bytes() if gpu_record.RECORD.exists() else None
    result = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "gpu_record.py"],
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "no CUDA device" in result.stderr
    assert (gpu_record.RECORD.read_bytes() if gpu_record.RECORD.exists() else None) == before


def test_the_shape_of_the_record():
    if not gpu_record.RECORD.exists():
        pytest.skip("no record in the tree")
    record = json.loads(gpu_record.RECORD.read_text())
    assert datetime.datetime.fromisoformat(record["date"]).tzinfo is not None
    for key in ("torch", "cuda", "cublaslt", "driver", "python"):
        assert isinstance(record[key], str) and record[key], key
    assert record["devices"] and record["library"]["cuda"]
    assert re.fullmatch("[0-9a-f]{64}", record["tree_hash"])
    assert all(isinstance(record[key], int) for key in ("passed", "failed", "skipped", "exit_code"))
    assert len(record["failed_tests"]) >= record["failed"]
    assert sum(record["skip_reasons"].values()) == record["skipped"]
    assert record["seconds"] > 0
