"""Markets of real jobs: `build` makes the state that the scheduling policy reads, `outlook` what follows from it.

Called by the control loop in each pass. It reads neither the store nor the cluster, and decides nothing.
"""
