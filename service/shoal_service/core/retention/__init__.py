"""What may be deleted, and when: checkpoints of a running job, and what ended jobs leave behind. Names and times in,
decisions with reasons out; nothing here touches the storage or the database.
"""
