"""What the store knows of sweeps: what their jobs have reached, and the end of a job that is worse than the others.

Methods of `Store`; the decision is `core/sweeps/pruning`, the control loop asks.
"""
