"""`shoal doctor`: checks this machine and the server, and names what would make a job fail.

`probes.py` measures, `findings.py` judges, `database.py` tries the database. Called by `commands/check.py`.
Never changes anything, and never imports torch or Ray into the command's own process.
"""
