"""Real processes: worker processes without Ray (`fleet`, `worker_pool`), a control plane (`server`), Ray's nodes.

Imported by the conftest files, by tests that start processes, and by bench/. Contains no test cases.
"""
