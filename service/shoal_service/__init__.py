"""The control plane without its HTTP interface: control loop, database, supervisors, planner and pure core.

Called by shoal_api, by Ray (the supervisor's actor) and by tests. It never imports torch, and never serves HTTP.
"""
