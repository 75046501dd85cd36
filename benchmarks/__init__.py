"""`python -m benchmarks`: ours beside eager and others, interleaved in one process.

cases.py        the grid: which layers, sizes, dtypes and modes each suite measures
convolutions.py those of the grid, and what runs for one
operands.py     the data that all contenders of a case run on
contenders.py   what runs for a case: ours, eager, the bare products, torch.compile, ...
traffic.py      the suites that count bytes: `activation` and `memory`
problems.py     those that the suite `first-calls` draws, and
first_calls.py  how it measures them
models.py       the suite `models`: whole models, untouched, fused and compiled
results.py      one record a case, and the JSON file
machine.py      GPU, clocks and versions, for the header
table.py        the table on the terminal
pictures.py     speed-up over eager and fraction of the bare products
__main__.py     the command line
"""
