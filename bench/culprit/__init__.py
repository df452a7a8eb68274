"""Does each slow-down and each incident name the right rank? `main.py` is the command; `make bench-culprit` runs it.

`injections` causes faults of eight kinds in a real job on three hosts, `task/` is the job's code.
"""
