"""Fixtures of the tests of the benchmark."""

from bench_records import make_table, readme

__all__ = ["make_table", "readme"]
