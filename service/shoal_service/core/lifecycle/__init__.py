"""A job's whole life beyond one run: where it begins, and how an ended job goes on.

Pure decisions, called by the store. Nothing here reads a checkpoint or starts a worker.
"""
