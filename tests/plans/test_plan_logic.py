"""Strategies, the choice between them, decisions and files of them, without a GPU: C++ programs."""

import cpp_programs
import pytest

PROGRAMS = ("plan_test.cpp", "plan_file_test.cpp")
NAMES = [(source, name) for source in PROGRAMS for name in cpp_programs.names_in(source)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    return {source: cpp_programs.build(source, folder, "-O1") for source in PROGRAMS}


def test_all_are_found():
    assert len(NAMES) == 32


@pytest.mark.parametrize("source, name", NAMES)
def test_plans(programs, source, name, tmp_path):
    cpp_programs.run(programs[source], name, cwd=tmp_path)
