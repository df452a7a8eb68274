"""The state of a run: its tensors by name, where they are in memory, snapshots, checkpoint parts, and restoring it.

Called by the trainer on the training thread. Never decides which snapshot or checkpoint a generation starts from: the
assignment names it.
"""
