"""Webhooks in the store: hooks, a cursor for each hook and job, and what is waiting. Called by `Store`.

The events themselves are those of the table of events; a cursor is the number of the last one that is settled.
Never sends anything, and never holds a secret.
"""
