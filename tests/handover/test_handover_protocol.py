"""The notes that layers leave each other, kept and broken on purpose: LibTorch only."""

import cpp_programs
import pytest

NAMES = cpp_programs.names_in("handover_test.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("handover")
    return cpp_programs.build(
        "handover_test.cpp", folder, "-O0", libraries=("torch", "torch_cpu", "c10")
    )


def test_all_are_found():
    assert len(NAMES) == 10


@pytest.mark.parametrize("name", NAMES)
def test_protocol(program, name):
    cpp_programs.run(program, name)
