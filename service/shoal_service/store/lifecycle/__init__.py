"""How jobs go on: from another job's checkpoint, to more steps, after a failure.

Functions of an open transaction; `LifecycleMethods` is a part of `Store`. Whether a job may go on is decided in
`core/lifecycle`; no storage is touched.
"""
