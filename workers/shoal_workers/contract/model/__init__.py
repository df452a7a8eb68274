"""Settings of the built-in models, and plans of how a model may be split: which module each parallel axis acts on.

Called by the submit check, the planner and the engine, which all read the same plan.
It never imports torch or transformers; the models themselves are built in `shoal_workers.tasks`.
"""
