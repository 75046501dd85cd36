"""`python -m benchmarks`: ours beside eager and others, interleaved in one process.

cases.py        the grid: which layers, sizes, dtypes and modes each suite measures
convolutions.py those of the grid, and what runs for one
gated.py        the same of gated blocks
rivals.py       feed-forward blocks of other libraries
operands.py     the data that all contenders of a case run on
contenders.py   what runs for a case: ours, eager, the bare products, torch.compile, ...
steps.py        the suites `activation` and `accumulation`, the mode `edge`: parts of a backward
memory.py       the suites that count bytes
models.py       the suite `models`: whole models, untouched, fused and compiled
results.py      one record a case, and the JSON file
machine.py      GPU, clocks and versions, for the header
table.py        the table on the terminal
__main__.py     the command line
pages           the tables and the chart of the docs

Commands of their own: first_calls.py, distributed.py; build_tools/tune_hopper.py.
"""
