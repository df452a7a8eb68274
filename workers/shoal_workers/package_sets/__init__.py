"""The packages that `code.pip` has had installed on a node, as directories: who uses one, and which are old.

Called by the engine, which installs them, and for the service's retention in a process on each node. Standard library
only; it never removes what a process uses.
"""
