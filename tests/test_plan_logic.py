"""Strategies, races, decisions and their files, without a GPU: a program in C++."""

import cpp_programs
import pytest

NAMES = cpp_programs.names_in("plan_test.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return cpp_programs.build("plan_test.cpp", tmp_path_factory.mktemp("plans"), "-O1")


def test_all_are_found():
    assert len(NAMES) == 18


@pytest.mark.parametrize("name", NAMES)
def test_plans(program, name, tmp_path):
    cpp_programs.run(program, name, cwd=tmp_path)
