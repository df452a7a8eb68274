"""The decisions of the service, as functions of values: scheduling, the life of a job, the attempt machine, accounts.

Called by `control/`, `store/` and `supervisor/`, which carry the decisions out; `views` shows their data.
It imports the standard library and the contract only: no clock, no log, no I/O, no other room of the service.
"""
