"""What the scheduling policy knows of real jobs: `build` the state, `foreign` others' use, `curves`, `measured`.

Called by the control loop in each pass. It reads neither the store nor the cluster, and decides nothing.
"""
