"""Finds, checks and loads what is compiled: the library `_C*.so`, and `_direct*.so` beside it."""

from __future__ import annotations

import contextlib
import importlib
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).resolve().parent

#: Why the library is not loaded; only the doctor, which explains it, gets to see this.
error: ImportError | None = None


class _NotDirect:
    """In place of `_direct` where it cannot be had; None is its answer to what it cannot do."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def _direct() -> Any:
    # It is of one version of torch, as the library is, and of one version of Python besides.
    path = _PACKAGE / "_direct.json"
    if path.exists() and json.loads(path.read_text())["torch"] == torch.__version__:
        with contextlib.suppress(ImportError):
            return importlib.import_module("._direct", __package__)
    return _NotDirect()


#: The operators without `torch.ops` (csrc/python/direct.cpp).
direct = _direct()


def build_info() -> dict[str, Any]:
    """What the library was built for: torch, cuda (None: CPU only), arch_list, hopper, debug.

    Empty when there is no finished build.
    """
    path = _PACKAGE / "_C.json"
    return json.loads(path.read_text()) if path.exists() else {}


def library_path() -> str:
    """The compiled library, which holds every operator and no Python.

    A program without this package loads it before a model that uses the operators, with
    ``torch.ops.load_library`` in Python or ``dlopen`` in C++. The header of the C++ API is in the
    folder ``include`` beside it.
    """
    return str(_libraries()[0])


def _libraries() -> list[Path]:
    return sorted(_PACKAGE.glob("_C*.so"))


def load() -> bool:
    """Loads the library, or raises an ImportError that says what to do.

    Under `python -m torch_fused_linear.doctor`, which imports the package on its way, a failure
    is kept in `error` and the answer is False.
    """
    global error
    try:
        _load()
    except ImportError as failure:
        if "torch_fused_linear.doctor" not in sys.orig_argv:
            raise
        error = failure
    return error is None


def _load() -> None:
    built = build_info().get("torch")
    libraries = _libraries()
    if not libraries or built is None:
        what = "has not been built" if not libraries else "is of a build that did not finish"
        raise ImportError(_message(f"the library in {_PACKAGE} {what}", built))
    # The C++ interface of torch holds for one version only; loading regardless could well crash.
    if built != torch.__version__:
        raise ImportError(_message("the library is built for another torch", built))
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as failure:
        # torch keeps the linker's own words, which name the symbol, in the cause.
        reason = failure.__cause__ or failure
        raise ImportError(_message(f"the library does not load: {reason}", built)) from failure


def _installed_elsewhere() -> Path | None:
    """A finished copy of the package that this one hides, as in the folder of its sources."""
    for folder in sys.path:
        other = Path(folder, _PACKAGE.name)
        if other.resolve() != _PACKAGE and any(other.glob("_C*.so")):
            return other
    return None


def rebuild() -> str:
    """The line that says how to build the library anew."""
    root, python = _PACKAGE.parent, shlex.quote(sys.executable)
    if (root / "setup.py").exists():
        command = f"cd {shlex.quote(str(root))} && {python} setup.py build_ext --inplace"
    else:
        command = (
            f"{python} -m pip install --no-deps --force-reinstall SOURCES"
            "   (the folder with the sources of torch_fused_linear)"
        )
    return f"  to rebuild:      {command}"


def _message(what: str, built: str | None) -> str:
    root, installed = _PACKAGE.parent, _installed_elsewhere()
    return (
        f"torch_fused_linear: {what}\n"
        f"  built for torch: {built or 'nothing'}\n"
        f"  running torch:   {torch.__version__}\n"
        f"{rebuild()}"
        + (
            f"\n  or, since {root} hides\n  {installed}: work in another folder"
            if installed
            else ""
        )
    )
