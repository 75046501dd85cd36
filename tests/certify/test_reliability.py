"""docs/reliability.md says what the records say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "tests" / "certify" / "records"


def made(*words):
    command = [sys.executable, "benchmarks/make_reliability.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_page_is_of_the_records():
    run = made("--check")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def copies(tmp_path):
    page, records = tmp_path / "reliability.md", tmp_path / "records"
    page.write_text((ROOT / "docs" / "reliability.md").read_text())
    records.mkdir()
    for path in RECORDS.glob("*.json"):
        (records / path.name).write_text(path.read_text())
    return page, records


def test_a_record_that_changes_makes_the_page_old(copies):
    page, records = copies
    path = next(records.glob("fuzz*.json"))
    record = json.loads(path.read_text())
    record["failed"] += 1
    record["failures"].insert(0, {"unit": 17, "what": "a failure [planted]"})
    record["crashed"]["18"] = "SIGSEGV"
    path.write_text(json.dumps(record))
    assert made("--check", "--page", page, "--records", records).returncode == 1
    assert made("--page", page, "--records", records).returncode == 0
    text = page.read_text()
    assert r"17: a failure \[planted\]" in text and "18: ended by SIGSEGV" in text
    assert made("--check", "--page", page, "--records", records).returncode == 0


def test_a_page_without_a_place_is_refused(copies):
    page, records = copies
    page.write_text(page.read_text().replace("records: faults: begin", "records: begin"))
    run = made("--page", page, "--records", records)
    assert run.returncode == 2 and "places for" in run.stderr
