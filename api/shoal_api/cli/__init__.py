"""The `shoal` command: a thin client of the REST API.

Inside: the commands, their output, the errors as people read them. Called by the console script `shoal` (`entry.py`).
Never decides anything about a job, and never loads torch or Ray: `shoal --help` must appear without a delay.
"""
