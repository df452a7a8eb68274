"""The code of a job as a spec names it: where it comes from, and what its processes find in their environment.

Imported by `contract/spec.py`. Pure data, and never the value of a secret: `engine/process/secrets.py` reads those on
the worker's node.
"""
