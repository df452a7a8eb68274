"""Sweeps in the store: their jobs, submitted and cancelled together; what these have reached, and the end of one that
is worse than the others.

Methods of `Store`, for the HTTP edge and the control loop; who is ended is decided in `core/sweeps`.
"""
