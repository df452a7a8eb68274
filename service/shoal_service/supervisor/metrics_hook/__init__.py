"""The forwarder of metrics: takes points from the reporter's backlog, and passes them to a worker's hook process.

Used by Inspection. It decides nothing about the attempt, and imports no code of the user.
"""
