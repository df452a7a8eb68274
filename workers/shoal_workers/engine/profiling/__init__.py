"""Profiles of a running worker: where a step's time goes, a trace, a memory timeline. Training never depends on them.

Called by the engine and the trainer. Only recording.py imports torch; digest.py is a program of its own, which costs
the training thread nothing. Nothing here changes a number of the training, and no error here reaches it.
"""
