"""Checks of a job spec at submission: syntax and types, conflicting settings, legal layouts, enough workers.

Called by `spec_errors.parse_spec`, the only way to make a spec from a document; `legality` also by the planner.
They never estimate memory or time (the planner does), read no cluster state, and change nothing.
"""
