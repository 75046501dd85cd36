"""`python -m benchmarks.pages`: the tables of the docs and README's chart.

results.py   the files beside this, and what a table writes of a number
expect.py    the tables of what to expect
overview.py  the tables that list all GPU results
tables.py    the others, by name
records.py   those of the reliability page, of the records in tests
chart.py     README's chart
__main__.py  puts them into the pages, or says which is out of date
"""
