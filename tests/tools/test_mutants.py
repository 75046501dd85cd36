"""The list of planted faults fits the code: each text is found once, and its tests are there."""

import mutants
import pytest
from mutant_list import MUTANTS

named = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)


@named
def test_the_text_is_there_once(mutant):
    text = (mutants.ROOT / mutant.file).read_text()
    assert mutants.planted(mutant, text) != text
    assert all((mutants.ROOT / tests).exists() for tests in mutant.tests.split())


def test_a_text_that_has_moved_ends_the_run():
    with pytest.raises(SystemExit, match="0 times in"):
        mutants.planted(MUTANTS[0], "")
