"""For tests of deploy/: the fields of a RayCluster, and the control plane with the packages of its image only.

Called by tests/unit/deploy. Contains no test cases.
"""
