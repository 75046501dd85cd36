"""fuse_ on thousands of generated models: whatever is built and done, the function stays the same.

    pytest tests/fuse/test_fuse_trees.py                    2,000 trees
    pytest tests/fuse/test_fuse_trees.py -m long            30,000 others
    TREE_SEED=17 pytest tests/fuse/test_fuse_trees.py       one tree

A tree that fails prints its seed and the source of its classes.
"""

import json
import logging
import os
import subprocess
import sys
import warnings

import pytest
import torch
import tree_compare
import tree_faults
from trees import grow

CHUNK = 100
SCRIPTED = ("script", "fx", "pickle", "save")  # take only simple models
ONE = os.environ.get("TREE_SEED")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trees")


@pytest.fixture(autouse=True)
def quick():
    """One thread, as the trees are tiny, and nothing of what torch.compile logs of each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)


def system_of(seed: int) -> str | None:
    """Every fourth tree is also given to one system, in turn; seldom to the slowest."""
    *quick, slow = tree_compare.SYSTEMS
    turns = [*quick * 4, slow]
    return turns[seed // 4 % len(turns)] if seed % 4 == 0 else None


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


def assert_trees_hold(seeds, folder):
    blocks = [assert_tree_holds(seed, folder) for seed in seeds]
    if len(blocks) >= CHUNK:  # otherwise the comparison says little
        assert sum(max(n, 0) for n in blocks) >= CHUNK
        refused = sum(n < 0 for n in blocks)
        assert refused <= CHUNK / 8, "systems took too few of the plain models"


@pytest.mark.parametrize("start", range(0, 1200, CHUNK) if ONE is None else [int(ONE)])
def test_a_fused_tree_is_the_plain_one(start, folder):
    assert_trees_hold(range(start, start + (CHUNK if ONE is None else 1)), folder)


@pytest.mark.long
@pytest.mark.parametrize("start", range(1200, 32000, CHUNK))
def test_many_more_fused_trees_are_the_plain_ones(start, folder):
    assert_trees_hold(range(start, start + CHUNK), folder)


@pytest.fixture(scope="module")
def faults():
    """For each fault of tree_faults.py a tree that fails with it, and holds without it."""
    run = subprocess.run(
        [sys.executable, tree_faults.__file__, *tree_faults.FAULTS],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {r["fault"]: r["noticed"] for r in map(json.loads, run.stdout.splitlines())}


@pytest.mark.skipif(ONE is not None, reason="only one tree is asked for")
@pytest.mark.parametrize("name", tree_faults.FAULTS)
def test_a_fault_in_fuse_is_noticed_within_600_trees(name, faults):
    assert faults[name]
