"""Records: written as a whole, gone on with, merged, and told of crashes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import startup_code

from certify import __main__, parts, record

ROOT = Path(__file__).resolve().parents[2]
PART = parts.Part("sample", "something", "tries", 10, "sample")


class Trial:
    """Ends at a unit, as by an interruption."""

    def __init__(self, ends_at=None, fails_at=()):
        self.ends_at, self.fails_at, self.tried = ends_at, fails_at, []

    def one(self, seed, unit):
        if unit == self.ends_at:
            raise KeyboardInterrupt
        self.tried.append(unit)
        found = {"failures": [f"{unit} is wrong"] if unit in self.fails_at else []}
        return found | {"sum": unit, "by": {"even": int(unit % 2 == 0)}, "worst": unit}

    def verdict(self, found):
        return []


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sample_cpu.json"


def begin(path, anew=False, **changes):
    asked = {"seed": 1, "count": 10, "measured": False} | changes
    return record.begin(path, PART, "cpu", asked, anew)


def test_an_interrupted_run_goes_on_where_it_was(path):
    first, second = Trial(ends_at=6, fails_at=(2,)), Trial()
    with pytest.raises(KeyboardInterrupt):
        record.work(path, first, begin(path))
    written = json.loads(path.read_text())
    assert written["done"] == 6 and not written["finished"]
    assert record.Pointer(path).read() == 6
    record.work(path, second, begin(path))
    written = json.loads(path.read_text())
    assert first.tried + second.tried == list(range(10))
    assert written["finished"] and written["found"] == {"sum": 45, "by": {"even": 5}, "worst": 9}
    assert written["failed"] == 1
    assert written["failures"] == [{"unit": 2, "what": "2 is wrong"}]
    assert record.bad(written) and os.listdir(path.parent) == [path.name]


def test_another_question_or_tree_begins_anew(path, monkeypatch):
    record.work(path, Trial(), begin(path))
    assert begin(path)["done"] == begin(path, count=11)["done"] == 10
    for changes in ({"count": 9}, {"seed": 2}, {"anew": True}):
        assert begin(path, **changes)["done"] == 0
    monkeypatch.setattr(record.gpu_record, "tree_hash", lambda: "another")
    assert begin(path)["done"] == 0


def test_shares_of_several_processes_become_one_without_a_crashed_unit(path):
    trials, shares = [Trial(), Trial(fails_at=(3,))], []
    for i, trial in enumerate(trials):
        begun = begin(path, anew=True, share=[i, 2])
        begun["crashed"] = {"4": "SIGSEGV"} if i == 0 else {}
        record.work(path, trial, begun, (i, 2))
        shares.append(json.loads(path.read_text()))
    assert [trial.tried for trial in trials] == [[0, 2, 6, 8], [1, 3, 5, 7, 9]]
    whole = record.merge(shares, Trial())
    assert (whole["done"], whole["failed"], whole["crashed"]) == (10, 1, {"4": "SIGSEGV"})
    assert whole["found"] == {"sum": 41, "by": {"even": 4}, "worst": 9} and whole["finished"]
    assert "share" not in whole["asked"] and record.bad(whole)


def certify(*words, **variables):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, str(ROOT / "tests" / "certify"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("call, key", [("of_ours", "crashed"), ("of_eager", "torch_crashed")])
def test_a_crash_is_recorded_and_does_not_end_the_run(tmp_path, call, key):
    """The process dies in the third case of the fuzz, every time it gets there."""
    environment = startup_code.environment(
        tmp_path,
        "from certify import fuzz, fuzz_cases\n"
        "third = str(fuzz_cases.Draw(1, 3, 'cpu').case())\n"
        f"right = fuzz.{call}\n"
        "def dies(case):\n"
        "    str(case) == third and os.kill(os.getpid(), 11)\n"
        "    return right(case)\n"
        f"fuzz.{call} = dies\n",
    )
    run = certify("fuzz", "--count", 6, "--records", tmp_path, **environment)
    ours = key == "crashed"
    assert run.returncode == int(ours), run.stderr
    words = "the process ended" if ours else "plain torch ended the process"
    assert f"3: {words} by SIGSEGV" in run.stdout, run.stdout + run.stderr
    found = json.loads((tmp_path / "fuzz_cpu.json").read_text())
    crashed = {"crashed": {}, "torch_crashed": {}} | {key: {"3": "SIGSEGV"}}
    assert found["finished"] and found["done"] == 6
    assert {name: found[name] for name in crashed} == crashed
    assert found["tree_hash"] == record.gpu_record.tree_hash()


def test_the_command_line_names_its_parts(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["nothing"])
    assert "no such part: nothing; there are fuzz" in capsys.readouterr().err
