"""Deletion of jobs and of what ended jobs leave behind, in bounded transactions.

Each module's functions work in an open transaction; `RetentionMethods` is a part of `Store`. It never
touches the storage.
"""
