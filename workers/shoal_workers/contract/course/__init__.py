"""The course of a training run: where it begins, its learning rate and validation over the steps, and where it ends.

Keys of a spec. `shoal_workers.contract.spec` imports them; others import them from there.
"""
