"""Commands that keep a service in order: delete jobs, delete what is old.

Registered by `cli/main.py`. They never touch the database or the storage themselves: the server does.
"""
