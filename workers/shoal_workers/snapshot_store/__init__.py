"""Snapshots of the training state in shared memory: they outlive their process, with a copy on another node.

Inside: `store.py`, the entry point; `slots/`, the shared-memory files and their retention; `transfer/`, reading and
copying over TCP. Two parts exist on a CPU only: `slots/live_slots.py`, the memory that a run trains in, and
`transfer/peer_maps.py`, maps of it in other processes. On a GPU snapshots are copies (`slots/own_slots.py`). Called by
the engine and by the worker's actor.
It never decides when to take a snapshot or from where to restore, writes nothing to storage, and imports no Ray.
"""
