"""Where the metrics of a job go besides the service: the spec's part, and the messages of points and progress.

Imported by `contract/spec.py`, the supervisor, the worker's actor and the hook's process. Pure data.
"""
