"""Proves a layout: two steps of a task whole, in one process, against the same ones split over a group, and once more
from a restored state.

    plain_loop    the whole side: the task's own model, loss and optimizer in a plain loop; on rank 0
    split_side    the split side: copies of the model that train by the trainer's own steps; on all ranks
    copies        what both sides train
    differences   how they differ
    prove         runs the sides, compares them, and names the cause
    attributes    what a program carries from step to step outside of what is saved
    compared      loss, metrics, each gradient, parameter and buffer

Called by the engine before the first step of a layout, and by `shoal check`. Never touches the model that is trained.
"""
