"""Profiles of jobs in the database: requests, how they ended, and what is read of them.

Each module's functions work in an open transaction; `ProfileMethods` is the part of `Store`. It never reads a trace.
"""
