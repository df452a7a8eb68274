"""Groups of worker processes without Ray: CPU time of forming again after a death, and of small collectives.

Called by `make bench-reforming`. The processes are those of tests/kit.
"""
