"""Slots, the shared-memory files of a process: their pool, their retention, and the registry of all processes' slots.

Called by the snapshot store, by the server that receives other nodes' copies, and by the reader of local parts.
It never opens a network connection, and it never changes a slot that another process owns, except to delete the slots
of dead processes.
"""
