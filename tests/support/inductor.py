"""Inductor set up to compile little, quickly."""

import contextlib
import shutil

import pytest
from torch._inductor import config, cpu_vec_isa

has_compiler = any(map(shutil.which, ("g++", "c++")))
needs_compiler = pytest.mark.skipif(not has_compiler, reason="needs a C++ compiler")


@contextlib.contextmanager
def quick_to_compile(*more):
    """In an empty cache headers and probes would take longer than what is compiled. (Not through
    monkeypatch, which leaves torch's configuration in a state that cannot be set again.)

    What the probes find is kept for the process, so it is forgotten before and after.
    """
    names = ("cpp_cache_precompile_headers", "cpp.vec_isa_ok", *more)
    forget_vectors()
    try:
        with config.patch(dict.fromkeys(names, False)):
            yield
    finally:
        forget_vectors()


def forget_vectors():
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for isa in vars(cpu_vec_isa).values():
        getattr(getattr(isa, "__bool__", None), "cache_clear", lambda: None)()
