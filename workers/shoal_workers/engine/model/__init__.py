"""A model with its optimizer and state as one object, ModelRuntime: building it, and reusing it in the next generation.

Called by the engine on the training thread. Never trains.
"""
