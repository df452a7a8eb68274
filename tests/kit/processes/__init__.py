"""Real processes of the tests: worker processes without Ray (`fleet`, `worker_pool`), and a served control plane.

Imported by the conftest files and by tests that start processes. Decides nothing about what they should do.
"""
