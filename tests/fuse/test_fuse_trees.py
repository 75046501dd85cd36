"""fuse_ on thousands of generated models: whatever is built and done, the function stays the same.

    pytest tests/fuse/test_fuse_trees.py                    400 trees
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
from fused_models import chain, decided_in_python
from tree_sources import has_its_file
from trees import grow

import torch_fused_linear as tfl

OTHER = chain()  # fused meanwhile or not
SCRIPTED = ("script", "pickle")  # take only simple models
ONE = os.environ.get("TREE_SEED")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trees")


@pytest.fixture(scope="module")
def found():
    """The numbers of blocks in the trees so far."""
    return []


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
    return turns[seed // 4 % len(turns)] if seed % 4 == 0 else None


def assert_tree_holds(seed, folder):
    system = system_of(seed)
    tree = grow(seed, folder, simple=system in SCRIPTED)
    if system == "script" and not has_its_file(tree.library):
        system = None  # TorchScript reads the file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old functions that the trees use on purpose
            return tree_compare.check(tree, system)
    except Exception as error:
        error.add_note(f"TREE_SEED={seed}, with {system}: {tree.describe()}")
        raise


def number_of_blocks(seed, folder, monkeypatch):
    with monkeypatch.context() as patch:
        if seed // 100 % 2:
            decided_in_python(patch)
        # While another model is fused functions keep their new code, which costs less.
        (tfl.fuse_ if seed // 50 % 2 else tfl.unfuse_)(OTHER)
        return assert_tree_holds(seed, folder)


def assert_much_was_compared(blocks):
    """Few trees have no blocks, and few systems refuse the plain model."""
    assert sum(max(n, 0) for n in blocks) >= len(blocks)
    assert sum(n < 0 for n in blocks) <= len(blocks) / 8


@pytest.mark.parametrize("seed", range(400) if ONE is None else [int(ONE)])
def test_a_fused_tree_is_the_plain_one(seed, folder, found, monkeypatch):
    found.append(number_of_blocks(seed, folder, monkeypatch))


def test_the_trees_say_much(found):
    if len(found) < 100:
        pytest.skip("few trees were run")
    assert_much_was_compared(found)


@pytest.mark.long
@pytest.mark.parametrize("start", range(400, 30400, 100))
def test_many_more_fused_trees_are_the_plain_ones(start, folder, monkeypatch):
    seeds = range(start, start + 100)
    assert_much_was_compared([number_of_blocks(seed, folder, monkeypatch) for seed in seeds])
