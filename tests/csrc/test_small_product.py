"""The kernels for small networks, thread by thread on a CPU; they need CUDA's headers."""

import cpp_programs
import pytest

NAMES = cpp_programs.names_in("small_product_test.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if not cpp_programs.WITH_CUDA:
        pytest.skip("needs a build with CUDA, for its headers")
    folder = tmp_path_factory.mktemp("small_product")
    include = f"-I{cpp_programs.ROOT / 'tests/csrc/cuda_on_cpu'}"
    flags = ("-O2", "-Wno-attributes", "-Wno-unknown-pragmas", include)
    return cpp_programs.build("small_product_test.cpp", folder, *flags)


def test_all_are_found():
    assert len(NAMES) == 9


@pytest.mark.parametrize("name", NAMES)
def test_small_product(program, name):
    cpp_programs.run(program, name)
