"""What belongs to the worker as a process: its outbox, its position, how a generation ends, and its memory.

Called by the engine and the trainer; the control thread reads outbox and position. Never touches a tensor of the model.
"""
