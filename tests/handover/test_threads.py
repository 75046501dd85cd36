"""Programs of several threads over one graph: LibTorch only. See `make asan` and `make tsan`."""

import cpp_programs
import pytest

NAMES = cpp_programs.names_in("threads_test.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("threads")
    return cpp_programs.build(
        "threads_test.cpp", folder, "-O0", libraries=("torch", "torch_cpu", "c10")
    )


@pytest.mark.parametrize("name", NAMES)
def test_threads(program, name):
    cpp_programs.run(program, name)
