"""Finds, checks and loads what is compiled: for each release of torch a folder ``lib/torch2.11``
with the library ``_C*.so``, and ``_direct*.so`` beside it."""

import contextlib
import importlib.util
import json
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import releases

PACKAGE = Path(__file__).resolve().parents[1]
_LIB = PACKAGE / "lib"
_FOLDER = _LIB / f"torch{releases.minor(torch.__version__)}"
_LIBRARIES = sorted(_FOLDER.glob("_C*.so"))  # one, where it was built

#: Why the library is not loaded; nothing where it is.
error: ImportError | None = None


class _NotDirect:
    """Stands for `_direct` if it cannot be loaded; like it, answers None for what it cannot do."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def _record(name: str, folder: Path = _FOLDER) -> dict[str, Any]:
    """Reads the build's record of a finished part; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):  # none, or cut short
        return json.loads((folder / f"{name}.json").read_text())
    return {}


def build_info() -> dict[str, Any]:
    """Returns what the library was built for: torch, cuda (None: CPU only), arch_list, hopper,
    debug.

    It is empty if there is no finished build for this release of torch.
    """
    built = _record("_C")
    kernels = _record("fused_kernels", _LIB) if built.get("cuda") else {}
    return {"arch_list": None, "hopper": False, **kernels, **built} if built else {}


def library_path() -> str:
    """Returns the path of the compiled library for the torch that runs.

    The library holds every operator and does not depend on Python. A program without this package
    loads it before a model that uses the operators, with ``torch.ops.load_library`` in Python or
    ``dlopen`` in C++. A build for GPUs also needs ``libfused_kernels.so``, one folder above or
    beside it. The header of the C++ API is in the package's folder ``include``.

    Returns:
        The path as a string.

    Examples::

        >>> torch.ops.load_library(library_path())
    """
    return str(_LIBRARIES[0])


def require() -> None:
    """Raises ``ImportError``, which says what to do, if the library is not loaded."""
    if error is not None:
        raise ImportError(str(error))


def say_what_is_wrong(stacklevel: int) -> None:
    """Warns, in a line, of a library that is not loaded, or a torch that it was never tried with.
    The doctor says so itself."""
    if "torch_fused_linear.doctor" in sys.orig_argv:
        return
    what = str(error) if error is not None else releases.untested(torch.__version__)
    if what is not None:
        warnings.warn(what, stacklevel=stacklevel)


def _load() -> None:
    if why := releases.too_old(torch.__version__):
        raise ImportError(why)
    built = _record("_C")
    if not _LIBRARIES or not built:
        raise ImportError(_message(_what_there_is()))
    if not _is_for_this_torch(built):
        raise ImportError(_message(f"the library is built for another torch, {built['torch']}"))
    try:
        torch.ops.load_library(library_path())
    except OSError as failure:
        # torch keeps the linker's own words, which name the symbol, in the cause.
        reason = failure.__cause__ or failure
        raise ImportError(_message(f"the library does not load: {reason}")) from failure


def _is_for_this_torch(built: dict[str, Any]) -> bool:
    # C++ objects must lie in memory as the library was compiled to find them.
    if built["torch"] == torch.__version__:
        return True
    if built["cuda"] and (torch.version.cuda or "").split(".")[0] != built["cuda"].split(".")[0]:
        return False
    return built["headers"] == releases.digest_of_headers(Path(torch.__file__).parent)


def _what_there_is() -> str:
    if _LIBRARIES:
        return f"the library in {_FOLDER} is of a build that did not finish"
    there = [path.parent.name.removeprefix("torch") for path in sorted(_LIB.glob("torch*/_C.json"))]
    if not there:
        return "the library has not been built"
    return f"there is a library for torch {' and '.join(there)} only"


def _direct() -> Any:
    # It is of one version of torch, as the library is, and of one version of Python besides.
    about = _record("_direct")
    if about and error is None and about["torch"] == _record("_C").get("torch"):
        for path in _FOLDER.glob(f"_direct*{sys.implementation.cache_tag}*.so"):
            with contextlib.suppress(ImportError):
                spec = importlib.util.spec_from_file_location(f"{PACKAGE.name}._direct", path)
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules[spec.name] = module
                return module
    return _NotDirect()


def _installed_elsewhere() -> Path | None:
    """A finished copy of the package that this one hides, as in the folder of its sources."""
    copies = (Path(folder, PACKAGE.name) for folder in sys.path)
    others = (copy for copy in copies if copy.resolve() != PACKAGE)
    return next((other for other in others if any(other.glob("lib/*/_C*.so"))), None)


def how_to_rebuild() -> str:
    """The command that builds the library anew."""
    root, python = PACKAGE.parent, shlex.quote(sys.executable)
    if (root / "setup.py").exists():
        return f"cd {shlex.quote(str(root))} && {python} setup.py build_ext --inplace"
    command = f"{python} -m pip install --no-deps --force-reinstall SOURCES"
    return f"{command}   (the folder with the sources of torch_fused_linear)"


def _message(what: str) -> str:
    what += f" (torch {torch.__version__})"
    if hidden := _installed_elsewhere():
        what += f", and the folder {PACKAGE.parent} hides {hidden}: work in another folder"
    return f"torch_fused_linear: {what}; to build it: {how_to_rebuild()}"


try:
    _load()
except ImportError as failure:
    error = failure

#: The operators without `torch.ops` (csrc/python/direct.cpp).
direct = _direct()
