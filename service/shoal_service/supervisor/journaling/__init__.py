"""The records of a supervisor's journal: a whole entry, and the changes since.

Called by `supervisor/journal.py`, which stores them. Pure: it never reads or writes the head's store, and knows nothing
of lives and fences.
"""
