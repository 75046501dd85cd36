"""The notes that layers leave each other, kept and broken on purpose, and several threads over one
graph: LibTorch only. `make asan` and `make tsan` run these programs under the sanitizers."""

import cpp_programs
import pytest

PROGRAMS = ("handover_test.cpp", "threads_test.cpp")
NAMES = [(source, name) for source in PROGRAMS for name in cpp_programs.names_in(source)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("handover")
    libraries = ("torch", "torch_cpu", "c10")
    return {
        source: cpp_programs.build(source, folder, "-O0", libraries=libraries)
        for source in PROGRAMS
    }


def test_all_are_found():
    assert len(NAMES) == 15


@pytest.mark.parametrize("source, name", NAMES)
def test_protocol(programs, source, name):
    cpp_programs.run(programs[source], name)
