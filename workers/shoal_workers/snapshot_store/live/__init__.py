"""Only on a CPU: slots that a run's state lives in while it trains, and maps of the slots of other workers.

On a GPU the state is in the device's memory, snapshots are copies (`slots/own_slots.py`), and nothing here has anything
to do. Called by the snapshot store and by the engine's CPU room. It never decides which step counts.
"""
