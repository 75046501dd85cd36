"""Fixtures of the tests of the benchmark."""

from bench_records import make_table, page

__all__ = ["make_table", "page"]
