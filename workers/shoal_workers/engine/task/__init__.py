"""The boundary to the user's code: the task contract, its defaults, random seeds, and how errors are reported.

Called by the engine and by every room above that calls into a task. Never knows of steps or of state.
"""
