"""Slots, the shared-memory files of a process: own snapshots, copies for others, and the registry of all slots.

`retention` decides which of them stay. Called by the snapshot store, by the server that receives other nodes' copies,
and by the reader of local parts.
It never opens a network connection, and it never changes a slot that another process owns, except to delete the slots
of dead processes.
"""
