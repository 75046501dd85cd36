"""Configurations of Inductor in short, in a process of its own: the fuzzer sets all options."""

import json
import os

import pytest
from compiler import has_compiler
from processes import ROOT, python

# Units of this seed, and layers, for which the compiler has few kernels to build, as those take
# longer than all else.
SCRIPT = """
import json
import torch
from certify import configs

trial = configs.Trial("cpu", False)
found = [trial.one(266, unit) for unit in (1, 6, 7)]

class Broken(configs.FusionPass):
    def __call__(self, graph):
        for node in graph.find_nodes(op="call_function", target=torch._C._nn.linear):
            node.target = torch.ops.fused.linear_silu.default

configs.ROWS = [row for row in configs.ROWS if row.label == "linear none"]
configs.Sine = torch.nn.Identity
configs.FusionPass = Broken
found.append(trial.one(1, 1))
configs.ALLOWED = -1.0
found.append(trial.one(1, 1))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    if not has_compiler:
        pytest.skip("needs a C++ compiler")
    folders = map(str, (ROOT / "tests", ROOT / "tests" / "support", ROOT))
    run = python("-c", SCRIPT, PYTHONPATH=os.pathsep.join(folders), CUDA_VISIBLE_DEVICES="")
    return json.loads(run.stdout)


def test_a_few_configurations(found):
    assert [one.get("right") for one in found[:3]] == [1, 1, 1], found[:3]
    assert all(one["options"] for one in found[:3]) and found[2]["replaced"]


def test_a_pass_that_is_wrong_is_told_from_a_compiler_that_is(found):
    of_pass, of_both = found[3:]
    (words,) = of_pass["failures"]
    assert words.startswith("failed_run_return") and words.endswith("under {}")
    assert "failures" not in of_both and sum(of_both["plain torch fails, too"].values()) == 1
