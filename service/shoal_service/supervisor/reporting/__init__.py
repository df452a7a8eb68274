"""What a supervisor reports: status and incidents as resources, numbered in an outbox until they are acknowledged.

Called by the executor and, to pull, by the control plane. It never decides and never writes to the database.
"""
