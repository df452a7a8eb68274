"""The gradient log: between two whole copies the buddy gets each step's gradients, and replays the optimizer on demand.

Called by the snapshot store, by its server and, for the operations of AdamW, by the engine's optimizer. It never opens
a network connection, never chooses a step to restore, and replays nothing until the result is read.
"""
