"""The errors of a convolution's results, without a GPU: a C++ program."""

import cpp_programs
import pytest

NAMES = cpp_programs.names_in("conv_test.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    libraries = ("torch", "torch_cpu", "c10")
    folder = tmp_path_factory.mktemp("conv")
    return cpp_programs.build("conv_test.cpp", folder, "-O0", libraries=libraries)


def test_all_are_found():
    assert len(NAMES) == 3


@pytest.mark.parametrize("name", NAMES)
def test_conv(program, name):
    cpp_programs.run(program, name)
