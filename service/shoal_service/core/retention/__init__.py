"""What may be deleted, and when: checkpoints of a running job, and what ended jobs leave behind.

Names and times in, decisions with reasons out; it never touches the storage or the database. Called by the supervisor's
catalog, by `store/` and by `control/retention.py`.
"""
