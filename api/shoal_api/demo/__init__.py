"""`shoal demo`: trains a job that loses a worker, and compares it with an undisturbed run.

Called by `shoal demo` (cli/commands/server.py). Inside: the run, the server's process, the checks, the report.
Never uses anything but the public command and the public API, so that it shows what a user sees.
"""
