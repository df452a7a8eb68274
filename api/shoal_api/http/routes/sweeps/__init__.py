"""Routes of sweeps: jobs of a grid, submitted, shown and cancelled together.

Called by `http/app.py`. They decide nothing: the specs of the jobs are made in `control/sweeps`, the store keeps them.
"""
