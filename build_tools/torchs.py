"""The torch, or the several, that the operators are compiled for. None is imported: a folder that
holds the headers and libraries of one will do."""

import importlib.util
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "torch_fused_linear"
releases = runpy.run_path(str(PACKAGE / "_support" / "releases.py"))


@dataclass(frozen=True)
class Torch:
    folder: Path
    version: str
    cuda: str | None  # what it is built for

    @property
    def minor(self):
        return releases["minor"](self.version)

    @property
    def headers(self):
        return releases["digest_of_headers"](self.folder)

    @property
    def openmp(self):
        """The flag with which at::parallel_for, a template, is more than a plain loop."""
        config = (self.folder / "include/ATen/Config.h").read_text()
        return ["-fopenmp"] if "AT_PARALLEL_OPENMP 1" in config else []

    def libraries(self, names):
        """Flags that link these of its libraries."""
        return [f"-L{self.folder / 'lib'}", *(f"-l{name}" for name in names)]

    @property
    def includes(self):
        return [self.folder / "include", self.folder / "include/torch/csrc/api/include"]


def torch_in(folder):
    about = runpy.run_path(str(Path(folder, "version.py")))
    return Torch(Path(folder), about["__version__"], about["cuda"])


def found():
    """All that TORCH_FUSED_LINEAR_TORCH names, or the one that this Python would import.

    SystemExit where there is none, or one that is too old.
    """
    folders = [f for f in os.environ.get("TORCH_FUSED_LINEAR_TORCH", "").split(os.pathsep) if f]
    if not folders:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            sys.exit(missing())
        folders = [Path(spec.origin).parent]
    torchs = [torch_in(folder) for folder in folders]
    for torch in torchs:
        if why := releases["too_old"](torch.version):
            sys.exit(why)
        if why := releases["untested"](torch.version):
            print(why, flush=True)
    return torchs


def missing():
    return (
        f"torch_fused_linear: {sys.executable} has no torch, which the library is built against.\n"
        "  First: pip install torch        then: pip install .\n"
        "  If torch is installed there, the build is isolated from it; these do not isolate it:\n"
        "  uv pip install --no-build-isolation .   (or pip)      python -m build --no-isolation"
    )
