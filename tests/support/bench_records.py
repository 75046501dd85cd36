"""Records of the benchmark, made up."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from torch_fused_linear.bench import results
from torch_fused_linear.bench.cases import Case
from torch_fused_linear.bench.results import Record
from torch_fused_linear.bench.timing import Number

ROOT = Path(__file__).resolve().parents[2]

STEP = Case("layer", (8, 16), 4, "fp32", "relu", "step")


@pytest.fixture(scope="module")
def make_table():
    spec = importlib.util.spec_from_file_location("make_table", ROOT / "benchmarks/make_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record_of(case: Case = STEP, **medians: float) -> Record:
    numbers = {name.replace("_", "-"): Number.once(value) for name, value in medians.items()}
    return Record(case, "us", numbers)


@pytest.fixture
def page(tmp_path, make_table):
    """A page with results of one machine beside it, and how to run the script on them."""
    folder = tmp_path / "results"
    folder.mkdir()
    header = {"machine": "NVIDIA X1", "device": "cuda", "torch": "2.11", "cublaslt": "13.1.0"}
    header |= {"driver": "580", "date": "2026-01-02T03:04:05+00:00"}

    records = [
        record_of(Case("layer", (768, 3072), 8192, "bf16", "relu", "forward"), ours=50, eager=65),
        record_of(
            Case("layer", (768, 3072), 8192, "bf16", "relu", "step"),
            **{"ours": 200, "eager": 250, "compile": 300, "max_autotune": 260},
        ),
        record_of(Case("layer", (768, 3072), 64, "fp16", "gelu", "step"), ours=100, eager=90),
        record_of(Case("ffn", (8, 32, 8), 8192, "bf16", "relu", "step"), ours=1, mlp=4, eager=2),
    ]
    results.save(folder / "x1.json", header, records)
    path = tmp_path / "page.md"
    path.write_text(f"before\n{make_table.BEGIN}\n{make_table.END}\nafter\n")

    def run(*arguments):
        return make_table.main([*arguments, "--page", str(path), "--results", str(folder)])

    return path, folder, header, run
