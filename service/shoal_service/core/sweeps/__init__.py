"""Sweeps: jobs that try values of some keys, a few at a time. Which of them are ended early, and the grid itself. Pure.

Used by the control loop (pruning), by the command line and the client (grids). The limit of a sweep is a rule of the
scheduler, in `core/scheduling`.
"""
