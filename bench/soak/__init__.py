"""Random faults for minutes, then checks of losses, ledgers and leftovers. `main.py` is the command.

Called by `make soak`. `faults` causes faults, `jobs` submits the jobs, `leaks` looks for leftovers.
It never changes the control plane's database other than by locking it.
"""
