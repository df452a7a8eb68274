"""The `shoal` command: a thin client of the REST API.

Inside: the commands, their output, the errors as people read them. `entry.py` is the console script `shoal`.
Never decides anything about a job, and never loads torch or Ray: `shoal --help` must appear without a delay.
"""
