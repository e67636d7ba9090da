"""The fault benchmark: real training runs, each with one thing wrong, and healthy ones.

`bench.py` runs a job on the demo's model, `injections.py` breaks a part of it, `fault_table.py` and
`healthy_table.py` say what is run, `__main__.py` prints what was found.
"""
