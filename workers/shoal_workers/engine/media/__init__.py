"""Media that a task or loop logs: copied on the training thread, encoded and written by a thread beside it.

capture   what the training thread does: check, thin out, copy      encode     PNG, bins, cells
recorder  the queue, the thread, the files, the limits
"""
