"""Planning a load: which of the saved parts a rank needs, and which of their slices fill which parts of its state.

Called by the checkpoint reader and by the snapshot store. It reads nothing itself, and needs no collective.
"""
