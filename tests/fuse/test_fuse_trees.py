"""fuse_ on thousands of generated models: whatever is built and done, the function stays the same.

    pytest tests/fuse/test_fuse_trees.py                    1,200 trees
    pytest tests/fuse/test_fuse_trees.py -m long            30,000 others
    TREE_SEED=17 pytest tests/fuse/test_fuse_trees.py       one tree

Every other hundred is decided in Python, as where C cannot be had. A tree that fails prints its
seed and the source of its classes.
"""

import logging
import os
import warnings

import pytest
import tree_compare
from fused_models import decided_in_python
from helpers import one_thread  # noqa: F401
from trees import grow, has_text

CHUNK = 100
SCRIPTED = ("script", "pickle")  # take only simple models
ONE = os.environ.get("TREE_SEED")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trees")


@pytest.fixture(autouse=True)
def quiet():
    """Nothing of what torch.compile logs of each."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def system_of(seed: int) -> str | None:
    """Every fourth tree is also given to one system, in turn; seldom to the slowest."""
    *quick, slow = tree_compare.SYSTEMS
    turns = [*quick * 4, slow]
    system = turns[seed // 4 % len(turns)] if seed % 4 == 0 else None
    return None if system == "script" and not has_text(seed) else system  # which compiles text


def assert_tree_holds(seed, folder):
    system = system_of(seed)
    tree = grow(seed, folder, simple=system in SCRIPTED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old functions that the trees use on purpose
            return tree_compare.check(tree, system)
    except Exception as error:
        error.add_note(f"TREE_SEED={seed}, with {system}: {tree.describe()}")
        raise


def assert_trees_hold(seeds, folder, monkeypatch):
    if seeds[0] // CHUNK % 2:
        decided_in_python(monkeypatch)
    blocks = [assert_tree_holds(seed, folder) for seed in seeds]
    if len(blocks) >= CHUNK:  # otherwise the comparison says little
        assert sum(max(n, 0) for n in blocks) >= CHUNK
        refused = sum(n < 0 for n in blocks)
        assert refused <= CHUNK / 8, "systems took too few of the plain models"


@pytest.mark.parametrize("start", range(0, 1200, CHUNK) if ONE is None else [int(ONE)])
def test_a_fused_tree_is_the_plain_one(start, folder, monkeypatch):
    assert_trees_hold(range(start, start + (CHUNK if ONE is None else 1)), folder, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("start", range(1200, 32000, CHUNK))
def test_many_more_fused_trees_are_the_plain_ones(start, folder, monkeypatch):
    assert_trees_hold(range(start, start + CHUNK), folder, monkeypatch)
