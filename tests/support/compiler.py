"""The C++ compiler, which Inductor needs on the CPU."""

import shutil

import pytest

has_compiler = any(map(shutil.which, ("g++", "c++")))
needs_compiler = pytest.mark.skipif(not has_compiler, reason="needs a C++ compiler")
