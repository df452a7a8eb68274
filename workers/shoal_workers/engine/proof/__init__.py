"""Proves a layout: one micro-batch of a task whole, in one process, against the same one split over a group.

    whole       the task's own model and loss, and a plain loop; on rank 0
    split       a second copy of the same model, assembled as for training; on all ranks
    compared    loss, metrics, every parameter's gradient. If they differ, every module's output, to name the first one

Called by the engine before the first step of a layout, and by `shoal check`. Never touches the model that is trained.
"""
