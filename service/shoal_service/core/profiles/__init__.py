"""Decisions about profiles of running jobs: to which worker a request goes, and when it ends. Pure.

Called by the supervisor's ProfileTaker on its loop. It never sees a trace, and decides nothing about the training.
"""
