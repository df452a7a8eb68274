"""What the scheduling policy knows of real jobs: `build` its state, `capacity` of nodes, and the `outlook` beside it.

Called by the control loop in each pass. It reads neither the store nor the cluster, and decides nothing.
"""
