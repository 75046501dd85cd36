"""Builds the library of operators, torch_fused_linear/_C.abi3.so, and Python's short way to them.

    python setup.py build_ext --inplace       in the tree; returns at once when nothing has changed
    pip install .                             (or -e .) against the torch that is installed
    python -m build --sdist                   needs no torch

Environment: TORCH_FUSED_LINEAR_CUDA=0|1 (CPU only | CUDA; unset: what torch is built for),
TORCH_FUSED_LINEAR_HOPPER=0|1 (our own products for Hopper GPUs; unset: where there is one),
TORCH_FUSED_LINEAR_CUTLASS (the folder of CUTLASS, for them; unset: the package nvidia-cutlass),
TORCH_FUSED_LINEAR_LABEL=1 (torch and CUDA in the wheel's version), CUDA_HOME, TORCH_CUDA_ARCH_LIST,
DEBUG=1, MAX_JOBS.
"""

import hashlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup

ROOT = Path(__file__).resolve().parent
CSRC, PACKAGE = ROOT / "csrc", ROOT / "torch_fused_linear"
sys.path.insert(0, str(ROOT / "build_tools"))
import hopper  # noqa: E402
import precompiled  # noqa: E402

LIBRARY, DIRECT = "torch_fused_linear._C", "torch_fused_linear._direct"
INSTALLED = ("fused_linear.h", "fused_activation.h")
# Folders of csrc; what needs CUDA lies below csrc/cuda, and csrc/python is a library of its own.
ROOMS = (".", "core", "reference", "gemm", "plans", "dispatch", "cpu", "autograd")
CUDA_ROOMS = ("cuda", "cuda/hopper", "cuda/kernels", "cuda/runtime", "cuda/tune")
# As torch's own builds for CUDA 13. The last two are known to nvcc from 12.8 on.
ARCHITECTURES, NEW_ARCHITECTURES = ["7.5", "8.0", "8.6", "9.0"], ["10.0", "12.0"]


def torch_versions():
    """torch's version and the CUDA it is built for; read from its file, as importing takes long."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        sys.exit(
            f"torch_fused_linear is built against the torch it runs with, and {sys.executable} has "
            "none. Install torch first, then: pip install .\n"
            "Where torch is installed, the build is isolated from it: tell the tool not to do that "
            "(uv pip install --no-build-isolation, python -m build --no-isolation)."
        )
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return version["__version__"], version["cuda"]


def pip_cuda(torch_cuda):
    """Where pip puts the CUDA packages of this major version (torch's own, nvcc if installed)."""
    spec = importlib.util.find_spec("nvidia")
    folder = "cu" + torch_cuda.split(".")[0]
    return [Path(p, folder) for p in (spec.submodule_search_locations if spec else [])]


def choose_cuda(torch_cuda, homes, wish=None):
    """(toolkit folder, its version, why); folder and version are None for a CPU-only build."""
    if wish == "0":
        return None, None, "TORCH_FUSED_LINEAR_CUDA=0"
    why = "no nvcc was found" if torch_cuda else "this torch is built without CUDA"
    for home in homes if torch_cuda else []:
        if not (home / "bin" / "nvcc").exists():
            continue
        answer = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True)
        version = re.search(r"release (\d+\.\d+)|$", answer.stdout.decode())[1] or "unknown"
        if version.split(".")[0] == torch_cuda.split(".")[0]:
            return home, version, f"nvcc {version} in {home}"
        why = f"nvcc {version} in {home} does not fit torch's CUDA {torch_cuda}"
    if wish == "1":
        sys.exit(f"TORCH_FUSED_LINEAR_CUDA=1, but a build with CUDA is not possible: {why}")
    return None, None, why


def find_cuda(wish=None):
    _, torch_cuda = torch_versions()
    on_path = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    homes += [on_path and Path(on_path).resolve().parents[1], "/usr/local/cuda"]
    homes += pip_cuda(torch_cuda) if torch_cuda else []
    return choose_cuda(torch_cuda, [Path(home) for home in homes if home], wish)


def no_nvcc(why, torch, torch_cuda):
    """Never a CPU-only library without a word where torch runs on GPUs: both ways out."""
    lines = (ROOT / "requirements-nvcc.txt").read_text().splitlines()
    packages = " ".join(line for line in lines if not line.startswith("#"))
    pip = f" with\n         pip install {packages}\n      or" if torch_cuda[:3] == "13." else ""
    return (
        f"torch_fused_linear: torch {torch} runs on GPUs, and the library cannot be built for "
        f"them: {why}.\n"
        f"  Either install nvcc of CUDA {torch_cuda}{pip} as NVIDIA's toolkit (CUDA_HOME names its "
        "folder),\n"
        "  or build for the CPU only, with TORCH_FUSED_LINEAR_CUDA=0 in the environment."
    )


def default_architectures(cuda):
    new = tuple(map(int, cuda.split(".")[:2])) >= (12, 8)
    return ";".join([*ARCHITECTURES, *NEW_ARCHITECTURES * new]) + "+PTX"


def public_version():
    text = (PACKAGE / "__init__.py").read_text()
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]


def labelled(version, torch, cuda):
    """0.2.0+pt211cu130: a wheel fits one torch only, and of these there may be many."""
    label = "pt" + "".join(torch.split(".")[:2]) + (f"cu{cuda.replace('.', '')}" if cuda else "cpu")
    return f"{version}+{label}"


def wish_for(what):
    """'0', '1', or None where the variable is not set, or empty."""
    variable = f"TORCH_FUSED_LINEAR_{what}"
    wish = os.environ.get(variable) or None
    if wish not in (None, "0", "1"):
        sys.exit(f"{variable} must be 0 or 1, got '{wish}'")
    return wish


def lacks_nvcc():
    """Asked by the Makefile: would pip's packages of nvcc turn a CPU-only build into a CUDA one?"""
    wish = wish_for("CUDA")
    return wish != "0" and torch_versions()[1] is not None and find_cuda()[0] is None


def source_hashes():
    paths = [Path(__file__).resolve(), *(p for p in CSRC.rglob("*") if p.is_file())]
    return {str(p.relative_to(ROOT)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def fingerprint(config):
    """Content, not times: the tree and the library in it are copied between machines."""
    text = json.dumps([config, source_hashes()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(json.dumps(content, indent=2) + "\n")
    os.replace(path.with_suffix(".tmp"), path)


def read_json(path):
    return json.loads(path.read_text()) if path.exists() else {}


def cxx_runtime():
    """The shared C++ runtime, by its path.

    Where a compiler finds only the static one it would put a second copy beside torch's, and the
    first stream that prints an error would crash.
    """
    ask = [os.environ.get("CXX", "c++"), "-print-file-name=libstdc++.so.6"]
    path = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    return [path] if os.path.isabs(path) else []


def flags(debug):
    """For every compiler, and for that of C++ alone."""
    every = ["-std=c++20", *(["-O0", "-UNDEBUG"] if debug else ["-O3", "-DNDEBUG"])]
    return every, ["-Wall", "-Wextra", "-Werror=switch", "-g" if debug else "-g0"]


def library(home, debug, own_products):
    """The operators, which know nothing of Python."""
    import torch
    from torch.utils import cpp_extension

    every, cxx = flags(debug)
    rooms = [*ROOMS, *CUDA_ROOMS] if home else ROOMS
    sources = [p for room in rooms for kind in ("*.cpp", "*.cu") for p in (CSRC / room).glob(kind)]
    # Its kernels have a target and runs of the compiler of their own.
    other = hopper.KERNELS / ("absent.cpp" if own_products else "hopper.cpp")
    sources = {*sources} - {hopper.KERNELS / "kernels.cu", other}
    sources = sorted(str(p.relative_to(ROOT)) for p in sources)
    cpp_extension.CUDA_HOME = home and str(home)
    make = cpp_extension.CUDAExtension if home else cpp_extension.CppExtension
    ext = make(LIBRARY, sources, py_limited_api=True, depends=list(source_hashes()))
    system = ext.include_dirs
    ext.extra_link_args += cxx_runtime()
    # Without it at::parallel_for, which is a template, is a plain loop.
    openmp = ["-fopenmp"] if torch.backends.openmp.is_available() else []
    ext.extra_link_args += openmp
    if home:
        folders = [home, *pip_cuda(torch_versions()[1])]
        system += [str(f / i) for f in folders for i in ("include", "include/cccl")]
        # By path, not by -l: the libraries that pip installs carry no plain .so name.
        ext.libraries.remove("cudart")
        for name in ("cudart", "cublasLt"):
            found = (
                p
                for f in folders
                for lib in ("lib64", "lib")
                for p in f.glob(f"{lib}/lib{name}.so*")
            )
            ext.extra_link_args.append(str(next(found, f"-l{name}")))
    ext.include_dirs, system = [str(CSRC)], as_system(system)
    if own_products:
        jobs = int(os.environ["MAX_JOBS"])
        nvcc = home / "bin" / "nvcc"
        ext.extra_objects = hopper.objects(nvcc, system, ROOT / "build" / "hopper", jobs)
    ext.extra_compile_args = {
        "cxx": every + cxx + openmp + system,
        "nvcc": every + ["-Xcompiler", "-Wall,-Werror=switch"] + system,
    }
    return ext


def direct(debug):
    """Python's own way to the operators, of one version of Python. torch.ops does without it."""
    from torch.utils import cpp_extension

    every, cxx = flags(debug)
    sources = sorted(str(p.relative_to(ROOT)) for p in CSRC.glob("python/*.cpp"))
    ext = cpp_extension.CppExtension(DIRECT, sources)
    ext.depends = list(source_hashes())
    ext.extra_link_args += cxx_runtime()
    ext.extra_compile_args = {"cxx": every + cxx + as_system(ext.include_dirs)}
    ext.include_dirs = [str(CSRC)]
    return ext


def as_system(folders):
    """As system headers, so that the warnings we read are about our own code."""
    return [flag for folder in folders for flag in ("-isystem", folder)]


def record(name, package=PACKAGE):
    """What a part is built of and for; written last, so that it stands for a finished build."""
    return package / f"{name.rpartition('.')[2]}.json"


def is_current(name, about):
    built = any(PACKAGE.glob(f"{name.rpartition('.')[2]}*.so"))
    return built and read_json(record(name)).get("fingerprint") == about["fingerprint"]


def build_command(parts):
    import output
    from torch.utils.cpp_extension import BuildExtension, get_cxx_compiler

    class BuildLibrary(BuildExtension):
        def finalize_options(self):
            super().finalize_options()
            about = parts[LIBRARY]
            kind = f"{about['torch']}-{about['cuda'] or 'cpu'}{'-debug' * about['debug']}"
            self.build_temp = str(ROOT / "build" / kind)

        def run(self):
            # Ninja compares times, but a copied tree may bring a changed file with an old one.
            hashes, now = Path(self.build_temp, "sources.json"), source_hashes()
            before = read_json(hashes)
            for path in (path for path in now if now[path] != before.get(path)):
                os.utime(ROOT / path)
            write_json(hashes, now)
            super().run()
            if not self.inplace:
                precompiled.remove(Path(self.build_temp))
                self.describe(Path(self.build_lib, PACKAGE.name))

        def build_extensions(self):
            with output.summarised(Path(self.build_temp, "build.log")):
                super().build_extensions()

        def build_extension(self, ext):
            if ext.name == LIBRARY:
                cxx = ext.extra_compile_args["cxx"]
                cxx += precompiled.flags(
                    [*shlex.split(get_cxx_compiler()), *self.compiler.compiler_so[1:], *cxx],
                    Path(self.build_temp),
                    parts[LIBRARY],
                    int(os.environ["MAX_JOBS"]),
                )
            super().build_extension(ext)

        def copy_extensions_to_source(self):
            """At no moment is there a library in the tree that looks finished and is not."""
            for ext in self.extensions:
                built = Path(self.build_lib, self.get_ext_filename(ext.name))
                copy = shutil.copy2(built, PACKAGE / f"{built.name}.tmp")
                record(ext.name).unlink(missing_ok=True)
                os.replace(copy, PACKAGE / built.name)
            self.describe(PACKAGE)

        def describe(self, package):
            (package / "include").mkdir(exist_ok=True)
            for name in INSTALLED:
                shutil.copy2(CSRC / name, package / "include")
            for ext in self.extensions:
                write_json(record(ext.name, package), parts[ext.name])

    return BuildLibrary


class InTree(Distribution):
    """A build in the tree needs nothing of pyproject.toml, which setuptools before 77 refuses."""

    def parse_config_files(self, *_):
        super().parse_config_files([])


def main():
    os.chdir(ROOT)
    version = public_version()
    if {"sdist", "egg_info"} & set(sys.argv):
        return setup(version=version, install_requires=["torch>=2.11"])
    torch, torch_cuda = torch_versions()
    wish = wish_for("CUDA")
    home, cuda, why = find_cuda(wish)
    if home is None and torch_cuda and wish != "0":
        sys.exit(no_nvcc(why, torch, torch_cuda))
    arch_list = home and os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_architectures(cuda))
    if wish_for("LABEL") == "1":
        version = labelled(version, torch, torch_cuda if home else None)
    about = {
        "version": version,
        "install_requires": [f"torch=={'.'.join(torch.split('.')[:2])}.*"],
    }
    if "dist_info" in sys.argv:
        return setup(**about)

    os.environ.setdefault("MAX_JOBS", str(os.cpu_count()))
    debug = os.environ.get("DEBUG", "0") != "0"
    own_products, why_own = hopper.choose(wish_for("HOPPER"), arch_list)
    config = {"torch": torch, "cuda": cuda, "arch_list": arch_list, "debug": debug}
    config["hopper"] = own_products
    sources = fingerprint(config)
    parts = {LIBRARY: {**config, "why": why, "why_hopper": why_own, "fingerprint": sources}}
    if Path(sysconfig.get_path("include"), "Python.h").exists():
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        parts[DIRECT] = {"torch": torch, "fingerprint": f"{sources}{suffix}"}
    what = f"CUDA {cuda} for {arch_list}" if home else "CPU ONLY, nothing of it runs on a GPU"
    what = f"torch_fused_linear for torch {torch}: {what} ({why})"
    if home and "9.0" in arch_list:
        what += f"; {'with' if own_products else 'without'} own products for Hopper ({why_own})"
    missing = [n for n in parts if "--inplace" not in sys.argv or not is_current(n, parts[n])]
    if not missing:
        return print(f"{what}: up to date")
    print(what, flush=True)
    make = {LIBRARY: lambda: library(home, debug, own_products), DIRECT: lambda: direct(debug)}
    setup(
        **about,
        distclass=InTree if "--inplace" in sys.argv else Distribution,
        ext_modules=[make[n]() for n in missing],
        cmdclass={"build_ext": build_command(parts)},
    )


if __name__ == "__main__":
    main()
