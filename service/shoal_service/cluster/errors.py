"""Errors of the package `cluster`: Ray, its head or a supervisor did not answer. Imports no Ray."""

from __future__ import annotations

#   ClusterError
#   |-- ClusterUnreachable
#   |   |-- GcsUnavailable
#   |   `-- OrderUnanswered
#   |-- ConnectionStale
#   |-- RayCallFailed
#   |-- SupervisorGone
#   `-- SupervisorUnavailable


class ClusterError(Exception):
    """Something of the Ray cluster did not answer."""


class ClusterUnreachable(ClusterError):
    """Ray does not answer."""


class OrderUnanswered(ClusterUnreachable):
    """The gateway reports, but has not answered an order in time."""


class ConnectionStale(ClusterError):
    """The gateway, which is a driver of the cluster, must connect anew.

    A driver outlives the head, and even the raylet that it is attached to. But without that raylet it cannot start
    anything, and a head that was restarted with other tables does not know it.
    """


class GcsUnavailable(ClusterUnreachable):
    """The head did not answer in time."""


class RayCallFailed(ClusterError):
    """A call failed for a reason that has no class here: an error of Shoal's own, or one of Ray's."""


class SupervisorGone(ClusterError):
    """No supervisor of that job attempt is alive in the cluster."""


class SupervisorUnavailable(ClusterError):
    """The supervisor does not answer now: it is being restarted, or cannot be reached. The call can be repeated."""
