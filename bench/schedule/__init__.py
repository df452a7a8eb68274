"""The scheduler's benchmark: `cases` (traces and markets), `comparison` (all policies on a case), `speed`, `tables`.

`main` is run by `make bench-schedule`.
It needs neither Ray nor a server, and reads only the traces.
"""
