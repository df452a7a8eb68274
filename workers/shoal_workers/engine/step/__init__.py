"""One optimizer step: batches, forward and backward passes, gradients, vote, clipping, update, loss scale, validation.

Called by the trainer on the training thread. Never writes a snapshot or a checkpoint, and never forms a group.
"""
