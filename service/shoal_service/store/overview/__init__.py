"""What the pages show: roll-ups of the series, samples of the accounts, labels, and the documents made of them.

`methods.py` is the part of `Store`; it imports the others. `edit.py` and `reports.py` of the store write through
`samples.py` and `rollups.py`. Nothing here changes a job.
"""
