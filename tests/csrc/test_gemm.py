"""csrc/gemm without a GPU."""

import cpp_programs
import pytest

NAMES = cpp_programs.names_in("gemm_test.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return cpp_programs.build("gemm_test.cpp", tmp_path_factory.mktemp("gemm"), "-O1")


def test_all_are_found():
    assert len(NAMES) == 6


@pytest.mark.parametrize("name", NAMES)
def test_gemm(program, name):
    cpp_programs.run(program, name)
