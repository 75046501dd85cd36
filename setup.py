"""Builds the libraries of torch_fused_linear (build_tools/parts.py says which).

    python setup.py build_ext --inplace       in the tree; returns at once when nothing has changed
    pip install .                             (or -e .) against the torch that is installed
    python -m build --sdist                   needs no torch

Environment: TORCH_FUSED_LINEAR_CUDA=0|1 (CPU only | GPUs; unset: GPUs where there is one here),
TORCH_CUDA_ARCH_LIST (for which GPUs; unset: those here), CUDA_HOME,
TORCH_FUSED_LINEAR_HOPPER=0|1 (our own products for Hopper GPUs; unset: where there is one),
TORCH_FUSED_LINEAR_CUTLASS (the folder of CUTLASS, for them; unset: the package nvidia-cutlass),
TORCH_FUSED_LINEAR_TORCH (folders of the torch, or the several, to build for; unset: the installed),
TORCH_FUSED_LINEAR_LABEL=1 (a wheel to hand out: for all GPUs, torch and CUDA in its version),
CXX, DEBUG=1, MAX_JOBS.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_tools"))
import compiling  # noqa: E402
import parts  # noqa: E402
import toolkits  # noqa: E402
import torchs  # noqa: E402


def public_version():
    text = (torchs.PACKAGE / "__init__.py").read_text()
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]


def labelled(version, torch_releases, cuda):
    """0.2.0+pt211.pt215.cu130: the releases that a wheel is for; of these there may be many."""
    numbers = [f"pt{release.replace('.', '')}" for release in torch_releases]
    return ".".join(
        [f"{version}+{numbers[0]}", *numbers[1:], f"cu{cuda.replace('.', '')}" if cuda else "cpu"]
    )


def missing_nvcc():
    """Asked by the Makefile: the package that brings the nvcc that a build would lack, or ''."""
    torch = torchs.found()[0]
    handed_out = toolkits.wish_for("LABEL") == "1"
    return toolkits.nvcc_package(torch) if toolkits.lacks_nvcc(torch, handed_out) else ""


class Plan:
    """What is to be built, and what of it is to be done."""

    def __init__(self, torch_list):
        self.jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count())
        self.torchs = torch_list
        debug = os.environ.get("DEBUG", "0") != "0"
        handed_out = toolkits.wish_for("LABEL") == "1"
        self.toolkit, self.why = toolkits.choose(torch_list[0], everything=handed_out)
        self.parts = [parts.kernels(self.toolkit, debug, self.why)] if self.toolkit else []
        for torch in torch_list:
            self.parts.append(parts.operators(torch, self.toolkit, debug, self.why, self.jobs))
            self.parts += filter(None, [parts.direct(torch, self.toolkit, debug)])

    def __str__(self):
        names = ", ".join(torch.version for torch in self.torchs)
        toolkit = self.toolkit
        what = f"CUDA {toolkit.version} for {toolkit.arch_list}" if toolkit else "CPU ONLY"
        return f"torch_fused_linear for torch {names}: {what} ({self.why})"

    def make(self, lib):
        """Makes in a folder what is not there, or not of these sources; headers lie beside it."""
        include = lib.parent / "include"
        include.mkdir(parents=True, exist_ok=True)
        for name in parts.HEADERS:
            shutil.copy2(compiling.CSRC / name, include)
        todo = [part for part in self.parts if not part.is_current(lib)]
        if not todo:
            return print(f"{self}: up to date")
        print(self, flush=True)
        compiling.check_cxx()
        units = [unit for part in todo for unit in part.units_and_flags[0]]
        log = parts.build_folder(self.torchs[0], self.toolkit, False).with_suffix(".log")
        compiling.compile_all(units, self.jobs, log)
        for part in todo:
            part.link(lib)


def build_command(torch_list):
    class Build(build_ext):
        def run(self):
            package = torchs.PACKAGE if self.inplace else Path(self.build_lib, "torch_fused_linear")
            Plan(torch_list).make(package / "lib")

        def get_outputs(self):
            return []

    return Build


class InTree(Distribution):
    """A build in the tree needs nothing of pyproject.toml, which setuptools before 77 refuses."""

    def parse_config_files(self, *_):
        super().parse_config_files([])


def main():
    os.chdir(ROOT)
    version = public_version()
    if {"sdist", "egg_info"} & set(sys.argv):
        oldest = torchs.releases["TESTED"][0]
        return setup(version=version, install_requires=[f"torch>={oldest}"])
    torch_list = torchs.found()
    if toolkits.wish_for("LABEL") == "1":
        toolkit, _ = toolkits.choose(torch_list[0], everything=True)
        minors = [torch.minor for torch in torch_list]
        version = labelled(version, minors, toolkit and toolkit.version)
    requirement = torchs.releases["requirement"]([torch.minor for torch in torch_list])
    setup(
        version=version,
        install_requires=[requirement],
        distclass=InTree if "--inplace" in sys.argv else Distribution,
        # Its name says that the wheel is of one Python and platform; what is built is in parts.py.
        ext_modules=[Extension("torch_fused_linear._C", [])],
        cmdclass={"build_ext": build_command(torch_list)},
    )


if __name__ == "__main__":
    main()
