"""The control plane: the loop that holds the lease, one driver per attempt, submission of jobs, profiles, spec parsing.

Called by `shoal serve`, the HTTP edge and the CLI. It never trains, and training never waits for it.
"""
