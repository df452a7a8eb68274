"""Everything of Ray that is not a supervisor: embedded cluster, node table and key-value store of the head, node tests.

Called by `control`, `supervisor` and `shoal serve`. It never decides which job runs where; the core does.
"""
