"""Sums of gradients, norms and losses that have the same bits for every world size, computed without rounding.

Called by the gradient pass and the validation of a job with `deterministic: true`. Never used otherwise.
"""
