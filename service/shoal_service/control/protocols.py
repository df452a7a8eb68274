"""What the control plane needs from the Ray clusters that have joined. Supervisors dial home: `shoal_service/home.py`.

The real ones are in `joined_clusters.py`, wired by `shoal serve`; the fakes are in `tests/doubles`. No Ray here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shoal_service.clusters.verbs import GatewayVerbs, RayVerbs
from shoal_service.clusters.wire import ClusterSnapshot
from shoal_service.core.nodes import Cordon


class Cluster(RayVerbs, GatewayVerbs, Protocol):
    """One Ray cluster: what it last reported, and the verbs that can be asked of it (`clusters/verbs.py`)."""

    @property
    def address(self) -> str:
        """Return the address of the Ray cluster; empty if its gateway has not reported."""

    @property
    def connected(self) -> bool:
        """Return True if the gateway reports and its Ray head answers."""

    def snapshot(self) -> ClusterSnapshot:
        """The cluster as it was at most some seconds ago. Raises ClusterUnreachable."""

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed`, on any thread, soon after a node has come, gone or begun to drain, or a supervisor could not
        be created. Return how to stop."""

    @property
    def silent_s(self) -> float | None:
        """Seconds since the newest report; None if none has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMembership:
    """One of the clusters, and what users have set for it."""

    cluster: Cluster
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that are added to those of its nodes."""
    cordon: Cordon | None = None


class Clusters(Protocol):
    """All clusters that have joined, by name."""

    @property
    def own(self) -> str:
        """Name of the cluster that this service has for itself, or that its settings name. Attempts whose cluster is
        not known are there. It counts as joined from the start."""

    def refresh(self) -> None:
        """Read which ones have joined or were removed since; blocks. Raises StoreUnavailable."""

    @property
    def joined(self) -> Mapping[str, ClusterMembership]:
        """The clusters as of the last `refresh`: the own one first, the others by name."""

    def of(self, name: str) -> Cluster:
        """The cluster of this name; empty: the own one. One that has not joined, or was removed, answers no call."""

    def watch(self, changed: Callable[[str], None]) -> Callable[[], None]:
        """Call `changed` with the name of a cluster, on any thread, soon after a node of it has come, gone or begun to
        drain. Return how to stop."""
