"""The experiments of the paper, run with the public library. `tailavg reproduce` calls them.

Read `regression.py` first (the problem and the averages), then `claims.py`, `run.py` and
`report.py`.
"""
