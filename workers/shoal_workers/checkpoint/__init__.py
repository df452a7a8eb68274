"""Durable, sharded checkpoints: plan, stage and write a rank's part; commit; verify; load into any layout.

Called by the engine (writer, reader), by the service (commit, integrity, storage: these import no torch) and by export.
It never runs a collective, never unpickles anything, and never chooses which checkpoint to restore or delete.
"""
