"""The build: what it decides, what it leaves in the tree, what loading says when that is wrong."""

import json
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import gpu_record
import pytest
import torch
from processes import ROOT, git_files, module_at, python, run, script

from torch_fused_linear._support import library, releases

PACKAGE = ROOT / "torch_fused_linear"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


build = module_at(ROOT / "setup.py")
compiling, parts, precompiled = build.compiling, build.parts, build.parts.precompiled
toolkits, torchs = build.toolkits, build.torchs
SUPPORT = ROOT / "tests" / "support"


def words_of_exit(function, *arguments):
    with pytest.raises(SystemExit) as stopped:
        function(*arguments)
    return str(stopped.value)


# --- the decision: CUDA or not ----------------------------------------------------------------


def toolkit(folder, version):
    """One that consists of an nvcc which tells its version."""
    says = f"echo 'Cuda compilation tools, release {version}, V{version}.88'"
    return script(folder / "bin" / "nvcc", says).parents[1]


def test_an_nvcc_of_torchs_cuda_is_taken_before_others_of_its_major_version(tmp_path):
    old, near = toolkit(tmp_path / "old", "12.4"), toolkit(tmp_path / "near", "13.0")
    same = toolkit(tmp_path / "same", "13.2")
    found = toolkits.find_nvcc("13.2", [tmp_path / "empty", old, near, same])
    assert found == (same, "13.2", f"nvcc 13.2 in {same}")
    why = f"nvcc 13.0 in {near}, torch's CUDA is 13.2"
    assert toolkits.find_nvcc("13.2", [old, near]) == (near, "13.0", why)


def test_an_nvcc_of_another_cuda_or_that_does_not_answer_is_refused(tmp_path):
    other = toolkit(tmp_path / "other", "12.4")
    silent = script(tmp_path / "silent" / "bin" / "nvcc", "exit 1").parents[1]
    for home, version in ((other, "12.4"), (silent, "unknown")):
        why = f"nvcc {version} in {home} does not fit torch's CUDA 13.0"
        assert toolkits.find_nvcc("13.0", [home]) == (None, None, why)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(gpus, nvcc): what choose() gets to see, and a torch for CUDA 13.0."""
    for name in ("CUDA", "HOPPER", "LABEL", "TORCH", "CUTLASS"):
        monkeypatch.delenv(f"TORCH_FUSED_LINEAR_{name}", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)

    def of(*gpus, nvcc="13.0"):
        home = toolkit(tmp_path / "cuda", nvcc) if nvcc else tmp_path
        monkeypatch.setattr(toolkits, "visible_gpus", lambda: gpus)
        monkeypatch.setattr(toolkits, "homes", lambda torch: [home])
        monkeypatch.setattr(toolkits, "cutlass_headers", lambda: None)
        return torchs.Torch(tmp_path, "2.11.0+cu130", "13.0")

    return of


EVERYTHING = "7.5;8.0;8.6;9.0;10.0;12.0+PTX"


def test_built_is_what_can_run_here(machine, monkeypatch):
    chosen, why = toolkits.choose(machine())
    assert chosen is None and why == "no GPU here; TORCH_FUSED_LINEAR_CUDA=1 builds for all GPUs"
    assert toolkits.choose(machine("8.0"))[0].arch_list == "8.0"
    assert toolkits.choose(machine("8.0", "9.0"))[0].arch_list == "8.0;9.0"
    assert toolkits.choose(machine("8.0"), everything=True)[0].arch_list == EVERYTHING
    monkeypatch.setenv("TORCH_FUSED_LINEAR_CUDA", "1")
    assert toolkits.choose(machine())[0].arch_list == EVERYTHING
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert toolkits.choose(machine("8.0"))[0].arch_list == "9.0"
    monkeypatch.delenv("TORCH_FUSED_LINEAR_CUDA")
    assert toolkits.choose(machine())[0].arch_list == "9.0"
    monkeypatch.setenv("TORCH_FUSED_LINEAR_CUDA", "0")
    assert toolkits.choose(machine("9.0")) == (None, "TORCH_FUSED_LINEAR_CUDA=0")
    assert not toolkits.lacks_nvcc(machine("9.0", nvcc=None), everything=True)


@pytest.mark.parametrize("nvcc", [None, "12.4"])
def test_a_gpu_without_a_fitting_nvcc_is_an_error_with_the_ways_out(machine, nvcc):
    """Never a CPU-only library without a word where there is a GPU."""
    torch = machine("9.0", nvcc=nvcc)
    assert toolkits.lacks_nvcc(torch, everything=False)
    message = words_of_exit(toolkits.choose, torch)
    assert ("no nvcc was found" if nvcc is None else "nvcc 12.4 in") in message.splitlines()[0]
    assert "pip install 'cuda-toolkit[nvcc,cccl]==13.0.*'" in message
    assert "TORCH_FUSED_LINEAR_CUDA=0" in message


def test_a_torch_without_cuda_gets_a_cpu_library(machine, monkeypatch):
    machine("9.0")
    torch = torchs.Torch(Path(), "2.11.0+cpu", None)
    assert toolkits.choose(torch) == (None, "this torch is built without CUDA")
    monkeypatch.setenv("TORCH_FUSED_LINEAR_CUDA", "1")
    assert "built without CUDA" in words_of_exit(toolkits.choose, torch)


def test_architectures_are_those_that_nvcc_knows_in_the_compilers_words():
    assert toolkits.all_architectures("13.0") == EVERYTHING
    assert toolkits.all_architectures("12.8") == EVERYTHING
    assert toolkits.all_architectures("12.6") == "7.5;8.0;8.6;9.0+PTX"
    assert toolkits.gencode("8.0;9.0a+PTX") == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]
    assert words_of_exit(toolkits.gencode, "Hopper").endswith(", got 'Hopper'")


# --- our own products for Hopper GPUs -----------------------------------------------------------


def test_hopper_is_built_where_it_is_wanted(machine, monkeypatch, tmp_path):
    (tmp_path / "cutlass").mkdir()
    numbers = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n"
    (tmp_path / "cutlass" / "version.h").write_text(numbers)

    def hopper(wish, arch_list, *gpus):
        machine(*gpus)
        monkeypatch.setattr(toolkits, "cutlass_headers", lambda: tmp_path)
        monkeypatch.setenv("TORCH_FUSED_LINEAR_HOPPER", wish)
        return toolkits.hopper(arch_list)

    assert hopper("1", EVERYTHING) == (tmp_path, "CUTLASS 4.2.0")
    assert hopper("1", "8.0;9.0a")[0] and not hopper("1", "8.0;10.0")[0]
    assert not hopper("0", EVERYTHING, "9.0")[0]
    built, why = hopper("", EVERYTHING)
    assert not built and "TORCH_FUSED_LINEAR_HOPPER=1" in why
    assert hopper("", EVERYTHING, "9.0")[0]


def test_a_wish_is_0_or_1(monkeypatch):
    monkeypatch.setenv("TORCH_FUSED_LINEAR_CUDA", "")
    assert toolkits.wish_for("CUDA") is None
    monkeypatch.setenv("TORCH_FUSED_LINEAR_CUDA", "yes")
    said = words_of_exit(toolkits.wish_for, "CUDA")
    assert said == "TORCH_FUSED_LINEAR_CUDA must be 0 or 1, got 'yes'"


def test_hopper_without_cutlass_says_how_to_get_it(machine, monkeypatch):
    machine("9.0")
    built, why = toolkits.hopper("9.0")
    assert not built and "nvidia-cutlass" in why
    monkeypatch.setenv("TORCH_FUSED_LINEAR_HOPPER", "1")
    assert "pip install --no-deps nvidia-cutlass" in words_of_exit(toolkits.hopper, "9.0")
    assert (ROOT / "requirements-hopper.txt").read_text().splitlines()[-1] == toolkits.CUTLASS


# A minute for two, which have the most of our own code.
@pytest.mark.parametrize("passes", ["backward glu", pytest.param("", marks=pytest.mark.long)])
def test_one_kernel_of_each_pass_compiles_for_hopper(passes, monkeypatch, tmp_path):
    """Nothing here may run them, but the code must be one that nvcc takes for this target."""
    (torch,) = torchs.found()
    home, version, why = toolkits.find_nvcc(torch.cuda or "", toolkits.homes(torch))
    cutlass = toolkits.cutlass_headers()
    if home is None or cutlass is None:
        pytest.skip(f"needs nvcc ({why}) and CUTLASS")
    # all in one, each for one type and activation, of a layer's weight or of one by columns
    kernels = {"forward": "bf16 silu false", "saving_forward": "f16 relu true"}
    kernels |= {"backward": "f16 gelu_erf true", "gating": "bf16 gelu_tanh false"}
    kernels |= {"glu": "f16 silu false", "narrow_forward": "bf16 relu2 true"}
    assert {kernel for kernel, *_ in parts.HOPPER_UNITS} == kernels.keys()
    text, code = (parts.HOPPER / "kernels.cu").read_text(), ""
    for kernel in passes.split() or kernels:
        type_, activation, transposed = kernels[kernel].split()
        code += f"template const Launch {kernel}<gemm::Type::{type_}, Activation::{activation}, "
        code += f"{transposed}>;\n"
    includes, _, rest = text.partition("template <>")
    (tmp_path / "kernels.cu").write_text(f"{includes}{code}}}\n")
    assert "FUSED_KIND<gemm::Type::FUSED_TYPE, act, FUSED_TRANSPOSED>" in rest
    monkeypatch.setattr(parts, "HOPPER", tmp_path)
    monkeypatch.setattr(parts, "HOPPER_UNITS", [("forward", "bf16", "true")])
    folders = (home, *toolkits.pip_folders(torch))
    part = parts.kernels(toolkits.Toolkit(home, version, folders, "9.0", cutlass), False, "")
    (unit,) = (unit for unit in part.units_and_flags[0] if unit.source.parent == tmp_path)
    # the device's part alone
    cubin = replace(unit, made=tmp_path / "kernels.o", command=(*unit.command, "-cubin"))
    compiling.compile_all([cubin], 1, tmp_path / "log")
    assert b"sm_90a" in cubin.made.read_bytes()


# --- what is compiled again --------------------------------------------------------------------


@pytest.fixture
def unit(tmp_path, monkeypatch):
    """A file that includes another, as of csrc."""
    monkeypatch.setattr(compiling, "CSRC", tmp_path)
    (tmp_path / "file.h").write_text("inline int number = 1;\n")
    (tmp_path / "file.cpp").write_text('#include "file.h"\nint *get() { return &number; }\n')
    command = ("c++", "-c", "-std=c++20", f"-I{tmp_path}")
    return compiling.Unit(tmp_path / "file.cpp", tmp_path / "made" / "file.o", command, 1)


def compile_all(*units, jobs=2):
    compiling.included.cache_clear()
    log = units[0].made.parent / "log"
    log.unlink(missing_ok=True)
    compiling.compile_all(units, jobs, log)
    return log.exists()


def test_a_file_is_compiled_when_what_it_is_made_of_has_changed(unit, capfd):
    assert compile_all(unit) and not compile_all(unit)
    header = unit.source.with_suffix(".h")
    for path in (header, unit.source):
        os.utime(path)  # as after a copy: the time is new, the content is not
    assert not compile_all(unit)
    header.write_text("inline int number = 2;\n")
    os.utime(header, (0, 0))  # however old the file says it is
    assert compile_all(unit) and not compile_all(unit)
    assert compile_all(replace(unit, command=(*unit.command, "-O1")))
    unit.made.unlink()
    assert compile_all(unit)
    said = capfd.readouterr().out
    assert "1 files to compile, 2 at once: about" in said and "compiled in " in said
    assert "c++ -c" not in said


def test_a_failure_ends_with_the_compilers_words_and_leaves_nothing(unit):
    assert compile_all(unit)
    unit.source.write_text("int wrong = nothing;\n")
    message = words_of_exit(compile_all, unit)
    assert "file.cpp does not compile\n\n" in message
    assert re.search(r"\Wnothing\W was not declared", message)
    assert not unit.made.exists()


def test_warnings_are_shown(unit, capfd):
    unit.source.write_text("int unused() { int x; return 1; }\n")
    compile_all(replace(unit, command=(*unit.command, "-Wall")))
    assert "warning: unused variable" in capfd.readouterr().out


def test_a_compiler_that_is_missing_or_without_cxx_20_is_said_first(monkeypatch, tmp_path):
    old = script(tmp_path / "c++", "[ $1 = --version ] && echo old c++ 7.5 || exit 1")
    wrong = {"/nowhere/c++": "torch_fused_linear: there is no compiler '/no"}
    wrong[str(old)] = "does not know C++20: old c++ 7.5"
    for compiler, says in wrong.items():
        compiling.version_of.cache_clear()
        monkeypatch.setenv("CXX", compiler)
        assert says in words_of_exit(compiling.check_cxx)


# --- torch's headers, precompiled -------------------------------------------------------------


def test_a_header_is_made_once_for_the_same_flags(monkeypatch, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs GCC")
    monkeypatch.setattr(precompiled, "HEADERS", ["cstddef"])

    def unit(*options, jobs=2):
        return precompiled.unit([compiler, *options], tmp_path, False, jobs)

    header = unit("-O1")
    assert header.made == tmp_path / "precompiled.h.gch"
    assert compile_all(header) and not compile_all(unit("-O1"))
    source = tmp_path / "source.cpp"
    source.write_text("std::size_t size;\n")
    include = ("-include", str(header.made.with_suffix("")), "-Winvalid-pch", "-Werror", "-c")
    using = compiling.Unit(source, tmp_path / "source.o", (compiler, "-O1", *include), 1, header)
    header.made.unlink()
    assert compile_all(header, using) and using.made.exists(), "the header comes first"
    assert compile_all(unit("-O2"))
    assert unit("-O2", jobs=64) is None
    other = script(tmp_path / "clang++", "echo clang version 19")
    assert precompiled.unit([str(other)], tmp_path, False, 2) is None


def test_folders_that_are_compiled_as_one_lose_no_file(tmp_path):
    paths = parts.sources(*(f"{room}/*.cpp" for room in [*parts.ROOMS, *parts.CUDA_ROOMS]))
    units = parts.joined(paths, [], tmp_path)
    joined = [unit.source for unit in units if tmp_path in unit.source.parents]
    names = re.findall(r'#include "(.+)"', "".join(source.read_text() for source in joined))
    alone = [unit.source for unit in units if unit.source not in joined]
    assert sorted([*(parts.CSRC / name for name in names), *alone]) == paths
    assert all(path.stem.endswith("_node") for path in alone)
    assert len({unit.made for unit in units}) == len(units) < len(paths) / 2
    (some,) = (unit for unit in units if "plans" in unit.source.stem)
    assert parts.CSRC / "plans" / "registry.cpp" in compiling.included(some.source)


# --- torch --------------------------------------------------------------------------------------


def fake_torch(folder, version, cuda="13.0"):
    folder.mkdir(parents=True)
    (folder / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
    (folder / "include" / "ATen").mkdir(parents=True)
    (folder / "include" / "ATen" / "Config.h").touch()
    return folder


def test_torchs_are_found_where_they_are_named(monkeypatch, tmp_path, capsys):
    versions = ("2.11.0+cu130", "2.15.1", "2.16.0.dev1")
    folders = [fake_torch(tmp_path / version, version) for version in versions]
    monkeypatch.setenv("TORCH_FUSED_LINEAR_TORCH", os.pathsep.join(map(str, folders)))
    found = [(torch.folder, torch.minor) for torch in torchs.found()]
    assert found == [*zip(folders, ("2.11", "2.15", "2.16"))]
    untested = "torch_fused_linear: torch 2.16.0.dev1 is untested; 2.11 to 2.15 are supported\n"
    assert capsys.readouterr().out == untested


def test_a_torch_that_is_too_old_is_refused(monkeypatch, tmp_path):
    folder = fake_torch(tmp_path / "torch", "2.10.2+cu128")
    monkeypatch.setenv("TORCH_FUSED_LINEAR_TORCH", str(folder))
    says = "torch 2.10.2+cu128 is too old; 2.11 to 2.15 are supported: pip install"
    assert says in words_of_exit(torchs.found)


def test_no_torch_is_said_first_with_what_to_do(monkeypatch):
    monkeypatch.delenv("TORCH_FUSED_LINEAR_TORCH", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    first, *rest = words_of_exit(torchs.found).splitlines()
    assert first.startswith("torch_fused_linear: ") and "has no torch" in first
    assert "pip install torch" in rest[0] and "uv pip install --no-build-isolation" in rest[2]


def test_the_requirement_of_a_wheel_names_its_releases():
    requirement = releases.requirement
    assert requirement(["2.11"]) == "torch>=2.11,<2.12"
    assert requirement(["2.15", "2.11", "2.13"]) == "torch>=2.11,<2.16,!=2.12.*,!=2.14.*"
    assert requirement(list(releases.TESTED)) == "torch>=2.11,<2.16"


# --- the library in this tree -----------------------------------------------------------------


def test_the_library_is_of_these_sources():
    info = library.build_info()
    (torch,) = torchs.found()
    toolkit, made = None, []
    if info["cuda"] is not None:
        kernels = json.loads((PACKAGE / "lib" / "fused_kernels.json").read_text())
        cutlass = Path("cutlass") if kernels["hopper"] else None
        home = toolkits.find_nvcc(torch.cuda, toolkits.homes(torch))[0]
        toolkit = toolkits.Toolkit(home, kernels["cuda"], (home,), kernels["arch_list"], cutlass)
        made.append(parts.kernels(toolkit, kernels["debug"], ""))
    made.append(parts.operators(torch, toolkit, info["debug"], "", 1))
    for part in made:
        assert part.is_current(PACKAGE / "lib"), "csrc has changed: run `make build`"


def listed(tool, *arguments):
    return run(tool, "--dynamic", *arguments).stdout


@pytest.mark.skipif(library.build_info()["cuda"] is None, reason="needs a build with CUDA")
def test_the_kernels_know_no_torch():
    kernels = PACKAGE / "lib" / "libfused_kernels.so"
    symbols = listed("nm", "--undefined-only", kernels)
    assert "cublasLtMatmul" in symbols and "c10" not in symbols and "torch" not in symbols
    needed = listed("readelf", kernels)
    assert "libcudart" in needed and "libtorch" not in needed and "libc10" not in needed
    assert "libfused_kernels.so" in listed("readelf", library.library_path())


def test_the_sources_of_the_kernels_include_nothing_of_torch():
    for path in parts.sources(*parts.KERNELS):
        for source in compiling.included(path):
            assert not re.search(r"#include <(ATen|c10|torch)/", source.read_text()), source


def test_the_library_knows_no_python():
    """A LibTorch program without Python loads it, so it may neither ask for Python nor link it."""
    symbols = listed("nm", "--undefined-only", library.library_path())
    assert "torch" in symbols  # nm has seen a library of torch's
    assert not re.findall(r"\b_?Py[A-Z_]\w*", symbols)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", listed("readelf", library.library_path()))
    assert any(name.startswith("libtorch") for name in needed)
    assert not [name for name in needed if "python" in name]


def test_calls_go_straight_to_their_functions():
    """By way of the linker's table a training step takes 3 µs more."""
    relocations = run("readelf", "--relocs", "--wide", library.library_path()).stdout
    assert "GLOB_DAT" in relocations and "JUMP_SLO" not in relocations


def test_the_public_header_is_installed_beside_the_library():
    for name in ("fused_linear.h", "fused_activation.h"):
        assert (PACKAGE / "include" / name).read_bytes() == (ROOT / "csrc" / name).read_bytes()


# --- building again ---------------------------------------------------------------------------


MINOR = releases.minor(torch.__version__)
LIBRARY = f"torch_fused_linear/lib/torch{MINOR}/_C.abi3.so"
DIRECT = f"torch_fused_linear/lib/torch{MINOR}/_direct{SUFFIX}"

# Replaces compilers: one that fails, so that no attempt to build goes unnoticed, and one that
# writes a file where it is told to.
FAILING = "exit 1"
WORKING = """
while [ $# -gt 1 ]; do
  [ "$1" = -o ] && echo built > "$2"
  shift
done
"""


def build_in(folder, compiler=FAILING, code=0):
    settings = {"CXX": str(script(folder / "compiler", compiler)), "DEBUG": "0"}
    settings["TORCH_FUSED_LINEAR_CUDA"] = "0"
    return python("setup.py", "build_ext", "--inplace", cwd=folder, code=code, **settings).stdout


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A tree with what a build looks at, and a library that claims to be up to date."""
    tree = tmp_path_factory.mktemp("original")
    shutil.copy(ROOT / "setup.py", tree)
    shutil.copytree(ROOT / "build_tools", tree / "build_tools")
    # make uses what there is, and setuptools before 77 refuses our pyproject.toml
    (tree / "pyproject.toml").write_text("[project]\nname = 3\n")
    (tree / "csrc" / "python").mkdir(parents=True)
    (tree / "csrc" / "python" / "direct.cpp").write_text("")
    for name in ("fused_linear.h", "fused_activation.h"):
        (tree / "csrc" / name).write_text("#pragma once\n")
    (tree / "csrc" / "library.cpp").write_text('#include "fused_linear.h"\n')
    package = tree / "torch_fused_linear"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (package / "_support").mkdir()
    shutil.copy(PACKAGE / "_support" / "releases.py", package / "_support")
    build_in(tree, WORKING)
    for made in (LIBRARY, DIRECT):
        (tree / made).write_text("finished")
    shutil.rmtree(tree / "build")
    return tree


@pytest.fixture
def copy(original, tmp_path):
    """The times of its files are new, no content is."""
    return Path(shutil.copytree(original, tmp_path / "copy", copy_function=shutil.copyfile))


CHANGED = ("csrc/library.cpp", "csrc/fused_linear.h", "csrc/new.cpp", "build_tools/parts.py")


@pytest.mark.parametrize("changed", [*CHANGED, LIBRARY, DIRECT])
def test_a_change_is_noticed_until_a_build_has_not_failed(copy, changed):
    if changed in CHANGED:
        with (copy / changed).open("a") as file:
            file.write("\n")
        os.utime(copy / changed, (0, 0))  # however old the file says it is
    else:
        (copy / changed).unlink()
    for _ in range(2):
        build_in(copy, code=1)
        assert changed == LIBRARY or (copy / LIBRARY).read_text() == "finished"


def test_for_another_python_the_operators_are_not_built_again(copy):
    (copy / DIRECT).rename((copy / DIRECT).with_name("_direct.cpython-37m.so"))
    build_in(copy, WORKING)
    assert (copy / DIRECT).read_text() == "built\n"
    assert (copy / LIBRARY).read_text() == "finished"
    assert "up to date" in build_in(copy)


def test_for_another_torch_both_are_there(copy, monkeypatch, tmp_path):
    other = fake_torch(tmp_path / "torch", "2.14.1", cuda=None)
    monkeypatch.setenv("TORCH_FUSED_LINEAR_TORCH", str(other))
    build_in(copy, WORKING)
    lib = copy / "torch_fused_linear" / "lib"
    assert (lib / "torch2.14" / "_C.abi3.so").read_text() == "built\n"
    assert (copy / LIBRARY).read_text() == "finished"
    assert json.loads((lib / "torch2.14" / "_C.json").read_text())["torch"] == "2.14.1"


def test_a_finished_build_is_complete_and_not_repeated(copy):
    package = copy / "torch_fused_linear"
    shutil.rmtree(package / "include")  # as where somebody has copied the libraries alone
    assert "up to date" in build_in(copy) and not (copy / "build").exists()
    assert (package / "include" / "fused_activation.h").exists()
    (copy / "csrc" / "library.cpp").write_text("int changed;\n")
    assert "CPU ONLY (TORCH_FUSED_LINEAR_CUDA=0)" in build_in(copy, WORKING)
    assert (copy / LIBRARY).read_text() == "built\n"
    assert (copy / DIRECT).read_text() == "finished", "of this nothing has changed"
    about = json.loads((copy / LIBRARY).with_name("_C.json").read_text())
    assert about["torch"] == torch.__version__ and about["cuda"] is None
    assert not list(package.rglob("*.tmp")) and "up to date" in build_in(copy)


# --- loading ----------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path):
    """A copy of the package with the library for this torch, to be spoilt."""
    others = [p.name for p in (PACKAGE / "lib").glob("torch*") if p.name != f"torch{MINOR}"]
    ignored = shutil.ignore_patterns("__pycache__", "include", *others)
    return Path(shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=ignored))


@pytest.fixture
def folder(package):
    """The library's folder for the release of torch that runs."""
    return package / "lib" / f"torch{MINOR}"


def run_python(package, program, *folders, code=0):
    path = os.pathsep.join(map(str, (package.parent, *folders)))
    return python("-c", program, cwd=package.parent, code=code, PYTHONPATH=path)


def said_at_import(package, *folders):
    """The one line that an import without a library says."""
    said = run_python(package, "import torch_fused_linear", *folders).stderr
    (line,) = (line for line in said.splitlines() if "UserWarning" in line)
    return line.partition("UserWarning: ")[2]


def rewritten(record, **changes):
    record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))


USED = """
import warnings
warnings.simplefilter("ignore")
import torch, torch_fused_linear as tfl
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
print(tfl.fuse_(model, dry_run=True))
for use in (lambda: tfl.fuse_(model), lambda: tfl.linear_relu, lambda: tfl.FusedLinear):
    try:
        use()
    except ImportError as error:
        print(error)
"""
GAIN = "from torch_fused_linear.gain.__main__ import main; main(['a:b', '--input', '1'])"


def test_without_a_library_a_model_can_still_be_read(package, folder):
    shutil.rmtree(folder)
    output = run_python(package, USED).stdout
    assert output.startswith("1 block fused, 0 places left alone")
    *_, wrong = output.splitlines()
    assert wrong.startswith("torch_fused_linear: the library has not been built (torch 2.")
    assert output.count(wrong) == 3
    asked = run_python(package, GAIN, code=2)
    assert " ".join(wrong.split()) in asked.stderr.splitlines()[-1]
    doctor = python("-m", "torch_fused_linear.doctor", cwd=package.parent, code=1).stdout
    for said in (f"package    {package}", f"torch      {torch.__version__}", "BROKEN", wrong):
        assert said in doctor


def test_a_library_for_another_release_names_what_there_is_and_the_command(package, folder):
    folder.rename(folder.with_name("torch1.2"))
    (package.parent / "setup.py").touch()
    message = said_at_import(package)
    assert "there is a library for torch 1.2 only" in message and torch.__version__ in message
    command = f"cd {package.parent} && {sys.executable} setup.py build_ext --inplace"
    assert message.endswith(f"to build it: {command}")


@pytest.mark.parametrize("changes", [{"headers": "others"}, {"cuda": "3.0"}], ids=str)
def test_another_build_of_the_same_release_is_refused_if_it_is_not_alike(package, folder, changes):
    rewritten(folder / "_C.json", torch=f"{MINOR}.7", **changes)
    assert f"the library is built for another torch, {MINOR}.7" in said_at_import(package)


PRETENDS = "import torch; torch.__version__ = {!r}; import torch_fused_linear as tfl; tfl.linear"


def test_a_torch_that_is_too_old_or_untested_is_named(package, folder):
    old = run_python(package, PRETENDS.format("2.10.1+cu128"), code=1)
    assert "torch 2.10.1+cu128 is too old; 2.11 to 2.15 are supported: pip install" in old.stderr
    folder.rename(folder.with_name("torch2.99"))
    rewritten(folder.with_name("torch2.99") / "_C.json", torch="2.99.0")
    new = run_python(package, PRETENDS.format("2.99.0"))
    assert new.stderr.count("torch 2.99.0 is untested; 2.11 to 2.15 are supported") == 1


def test_an_interrupted_build_and_an_installed_copy_that_it_hides_are_told(
    package, folder, tmp_path
):
    installed = tmp_path / "site" / PACKAGE.name
    shutil.copytree(package, installed)
    (folder / "_C.json").unlink()
    message = said_at_import(package)
    assert "a build that did not finish" in message and "hides" not in message
    assert f"{sys.executable} -m pip install --no-deps" in message, "outside a source tree"
    (folder / "_C.json").touch()  # as where the disk was full
    assert said_at_import(package) == message
    message = said_at_import(package, tmp_path / "site")
    hides = f"the folder {package.parent} hides {installed}: work in another folder"
    assert f"{hides}; to build it: " in message


def test_a_library_that_does_not_link_names_the_symbol(package, folder):
    """The versions agree, but a symbol is missing, as with a torch built from changed sources."""
    (folder / "_C.abi3.so").unlink()
    source = package.parent / "broken.c"
    source.write_text("extern int from_another_torch; int *use = &from_another_torch;\n")
    run("cc", "-shared", "-fPIC", "-o", folder / "_C.abi3.so", source)
    assert "undefined symbol: from_another_torch" in said_at_import(package)


IMPORTED = """
import torch, torch_fused_linear as tfl
x = torch.ones(2, 3)
assert tfl.linear_relu(x, x).shape == (2, 2)
print(type(tfl._library.direct).__name__)
"""
SPOIL = {
    "as it is": lambda folder: None,
    "of another build with the same headers": lambda folder: rewritten(
        folder / "_C.json", torch=f"{MINOR}.7"
    ),
    "missing": lambda folder: (folder / f"_direct{SUFFIX}").unlink(),
    "of another torch": lambda folder: rewritten(folder / "_direct.json", torch="1.2.3"),
    "cut short": lambda folder: (folder / "_direct.json").write_text("{"),
    "of no use": lambda folder: (folder / f"_direct{SUFFIX}").write_text("no library"),
}


@pytest.mark.parametrize("how", SPOIL)
def test_torch_ops_stands_in_for_the_direct_calls(package, folder, how):
    SPOIL[how](folder)
    expected = "module" if how == "as it is" else "_NotDirect"
    assert run_python(package, IMPORTED).stdout.strip() == expected


# --- the record of the last run on a GPU ------------------------------------------------------


def test_the_record_speaks_for_the_files_that_git_would_commit():
    listed = git_files("--cached", "--others", "--exclude-standard", *gpu_record.FOLDERS)
    expected = listed - {gpu_record.RECORD.relative_to(ROOT).as_posix()}
    expected = {p for p in expected if "/records/" not in p}  # what was found, of some tree
    assert set(gpu_record.tree_files()) == expected


@pytest.mark.parametrize("workers", [(), ("-n2",)])
def test_the_record_counts_what_pytest_reports_and_goes_on_after_an_interruption(
    tmp_path, workers, monkeypatch
):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of this very run
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 0, 'rain'\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_error(broken): pass\n"
        "def test_left_out(): pass\n"
        "@pytest.mark.parametrize('i', [1, 2])\n"
        "def test_skipped(i): pytest.skip('no moon')\n"
    )
    (tmp_path / "test_pairs.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def two_gpus(): pass\n"
        "def test_good(two_gpus): pass\n"
        "@pytest.mark.two_gpus\n"
        "def test_marked(): pytest.skip('one GPU')\n"
        "def test_alone(): pass\n"
    )
    (tmp_path / "test_skips.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('i', range(30))\n"
        "def test_skipped(i): pytest.skip('no stars')\n"
    )
    kept = tmp_path / "kept.jsonl"
    kept.write_text('{"tree": "this"}')
    (tmp_path / "conftest.py").write_text(
        f"import pathlib, sys\nsys.path.insert(0, {str(SUPPORT)!r})\n"
        f"import gpu_record\ngpu_record.OUTCOMES = pathlib.Path({str(kept)!r})\n"
        "pytest_plugins = ['gpu_record']\n"
    )
    run = ("-m", "pytest", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", *workers, tmp_path)
    python(*run, "-k", "bad or pairs", cwd=tmp_path, code=1)
    with kept.open("a") as file:
        file.write('\n{"test": "test_it.py::test_g')  # written when the power failed
    assert len(gpu_record.outcomes(kept, "this")) == 4
    assert gpu_record.outcomes(kept, "another") == []
    python(*run, "-k", "not left_out", cwd=tmp_path, code=1)
    found = gpu_record.outcomes(kept)
    assert "rain" in next(test["why"] for test in found if test["test"] == "test_it.py::test_bad")
    left_out = [line["deselected"] for line in gpu_record.outcomes(kept, kind="deselected")]
    counted = gpu_record.summary(
        found, left_out, ["test_it.py", "test_pairs.py", "test_skips.py", "test_unseen.py"]
    )
    assert counted.pop("seconds") >= 0
    assert counted == {
        "passed": 3,
        "failed": 2,
        "skipped": 33,
        "two_gpus": {"passed": 1, "failed": 0, "skipped": 1},
        "failed_tests": ["test_it.py::test_bad", "test_it.py::test_error"],
        "not_run": {
            gpu_record.DESELECTED: ["test_it.py::test_left_out"],
            "no moon": ["test_it.py::test_skipped[1]", "test_it.py::test_skipped[2]"],
            "no stars": ["test_skips.py: 30"],
            "one GPU": ["test_pairs.py::test_marked"],
        },
        "ran_nowhere": ["test_skips.py", "test_unseen.py"],
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_no_record_without_a_gpu():
    before = gpu_record.RECORD.read_bytes() if gpu_record.RECORD.exists() else None
    assert "no CUDA device" in python(SUPPORT / "gpu_record.py", code=1).stderr
    assert (gpu_record.RECORD.read_bytes() if gpu_record.RECORD.exists() else None) == before
