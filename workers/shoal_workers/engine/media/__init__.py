"""Media that a task, a loop or a script logs: copied on the training thread, encoded and written by a thread beside it.

capture   what the training thread does: check, thin out, copy      staging    the memory of the copies
encode    PNG, bins, cells                                          recorder   the queue, the thread, files, limits
current   which recorder `shoal.log` of a task means
"""
