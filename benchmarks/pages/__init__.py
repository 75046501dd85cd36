"""`python -m benchmarks.pages`: the tables of the docs and README's chart.

results.py     the files beside this, and what a table writes of one result
expect.py      the tables of what to expect
everything.py  the tables that list all GPU results
tables.py      the others, by name
records.py     those of the reliability page, of the records in tests
chart.py       README's chart
__main__.py    puts them into the pages, or says which is out of date
"""
