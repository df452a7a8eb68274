"""The commands of `shoal`, one file per subject.

`cli/main.py` registers them; docs/reference/cli.md is generated from their signatures and docstrings.
They never import heavy modules at the top: each body imports what it needs, so that the other commands start fast.
"""
