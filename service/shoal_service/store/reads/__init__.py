"""Queries that only read: histories of a job, the comparison of two jobs, the numbers of /metrics, page cursors.
Called by store/store.py and store/submissions.py inside an open transaction.
Nothing here writes, commits or decides.
"""
