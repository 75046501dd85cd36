"""Records: written as a whole, gone on with, and told of crashes."""

import json
import os

import pytest
from processes import ROOT, python, starting_with

from certify import __main__, parts, record

PART = parts.Part("sample", "something", "tries", 10, "sample")


def results(units, ends_at=None):
    """Yields findings until a unit is interrupted; unit 2 is wrong."""
    for unit in units:
        if unit == ends_at:
            raise KeyboardInterrupt
        failures = ["2 is wrong"] if unit == 2 else []
        yield {"failures": failures, "sum": unit, "by": {"even": int(unit % 2 == 0)}}


def keep(path, begun, **changes):
    units = range(begun["done"], begun["asked"]["count"])
    record.keep(path, begun, results(units, **changes), verdict=lambda found: [])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sample_cpu.json"


def begin(path, anew=False, **changes):
    asked = {"seed": 1, "count": 10, "measured": False} | changes
    return record.begin(path, PART, "cpu", asked, anew)


def test_an_interrupted_run_goes_on_where_it_was(path):
    with pytest.raises(KeyboardInterrupt):
        keep(path, begin(path), ends_at=6)
    written = json.loads(path.read_text())
    assert written["done"] == 6 and not written["finished"]
    keep(path, begin(path))
    written = json.loads(path.read_text())
    assert written["finished"] and written["found"] == {"sum": 45, "by": {"even": 5}}
    assert written["failed"] == 1
    assert written["failures"] == [{"unit": 2, "what": "2 is wrong"}]
    assert record.bad(written) and os.listdir(path.parent) == [path.name]


def test_another_question_or_tree_begins_anew(path, monkeypatch):
    keep(path, begin(path))
    assert begin(path)["done"] == begin(path, count=11)["done"] == 10
    for changes in ({"count": 9}, {"seed": 2}, {"anew": True}):
        assert begin(path, **changes)["done"] == 0
    monkeypatch.setattr(record.gpu_record, "tree_hash", lambda: "another")
    assert begin(path)["done"] == 0


def certify(*words, code=0, **variables):
    """Runs it without a GPU."""
    variables |= {"CUDA_VISIBLE_DEVICES": ""}
    return python(ROOT / "tests" / "certify", *words, code=code, **variables)


@pytest.mark.parametrize(
    "call, key, jobs", [("of_ours", "crashed", 1), ("of_eager", "torch_crashed", 2)]
)
def test_a_crash_is_recorded_and_does_not_end_the_run(tmp_path, call, key, jobs):
    """The process dies in the third case of the fuzz, every time it gets there."""
    environment = starting_with(
        tmp_path,
        "from certify import fuzz, fuzz_cases\n"
        "third = str(fuzz_cases.Draw(1, 3, 'cpu').case())\n"
        f"right = fuzz.{call}\n"
        "def dies(case):\n"
        "    str(case) == third and os.kill(os.getpid(), 11)\n"
        "    return right(case)\n"
        f"fuzz.{call} = dies\n",
    )
    words = ("--count", 6, "--jobs", jobs, "--records", tmp_path)
    ours = key == "crashed"
    run = certify("fuzz", *words, code=int(ours), **environment)
    words = "the process ended" if ours else "plain torch ended the process"
    assert f"3: {words} by SIGSEGV" in run.stdout, run.stdout + run.stderr
    found = json.loads((tmp_path / "fuzz_cpu.json").read_text())
    crashed = {"crashed": {}, "torch_crashed": {}} | {key: {"3": "SIGSEGV"}}
    assert found["finished"] and found["done"] == 6
    assert {name: found[name] for name in crashed} == crashed
    counts = [c["cases"] for dtypes in found["found"]["by"].values() for c in dtypes.values()]
    assert sum(counts) == 5, "each other case is counted once"
    assert found["tree_hash"] == record.gpu_record.tree_hash()


def test_the_command_line_names_its_parts(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["nothing"])
    assert "no such part: nothing; there are fuzz" in capsys.readouterr().err
