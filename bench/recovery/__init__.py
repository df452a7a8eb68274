"""What failures cost: Shoal, Ray Train V2 elastic and torchrun on the same work. `main.py` is the command.

Called by `make bench-recovery` and `make bench`. `shoal` and `peers` run the systems; tools/measurements computes
figures. It never leaves a process behind: the command ends all its descendants.
"""
