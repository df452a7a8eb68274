"""Applies a layout to a model from outside: one module per axis, and the collectives that the axes need.

Called when a model is built (`assemble`), and in forward and backward passes through what it installed in the model.
Never reads data, never steps an optimizer.
"""
