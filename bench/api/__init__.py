"""Speed and memory of the control plane. `main.py` is the command; `make bench-api` runs it.

`requests` measures submissions, lists and memory, `reads` scrapes and pages of full databases, `streams` what 200 open
pages of one job cost. `http_edge.py` is the process that `reads` asks.
"""
