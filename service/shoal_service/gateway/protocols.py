"""What the gateway needs from Ray. The real one is `ray_cluster.py`, the fake is in `tests/doubles`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from shoal_service.clusters.snapshot import ClusterSnapshot, FoundSupervisor, RoomKind, UnusedPackages
from shoal_service.core.nodes import Node
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_service.home import Home
from shoal_service.supervisor.config import SupervisorConfig


class RayAccess(Protocol):
    """A connection to one Ray cluster. `control.protocols.Cluster` says what the calls of the same names do. All that
    are no coroutines block; each may raise ClusterUnreachable."""

    address: str
    """Empty until it is connected."""

    ray_cluster: str
    """Id of the Ray cluster, in hexadecimal digits; empty until it is connected."""

    def connect(self, address: str) -> None:
        """Become a driver of the cluster."""

    def reconnect(self) -> None:
        """Makes a new connection."""

    def disconnect(self) -> None: ...

    def snapshot(self) -> ClusterSnapshot:
        """Raises ConnectionStale: call `reconnect`."""

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]: ...

    def start_supervisor(
        self, config: SupervisorConfig, *, avoid_nodes: frozenset[str], places: Mapping[str, int]
    ) -> None: ...

    def keep_ready(self, avoid_nodes: frozenset[str]) -> None: ...

    def find_supervisor(self, job_id: str, attempt: int) -> FoundSupervisor | None: ...

    def why_gone(self, job_id: str, attempt: int) -> str: ...

    def silent_supervisor(self, job_id: str, attempt: int) -> str: ...

    def replace_supervisor(self, job_id: str, attempt: int, silent_node: str, home: Home) -> bool: ...

    def unrecorded_starts(self, job_id: str, attempt: int) -> int: ...

    def last_ends(self, job_id: str, attempt: int) -> tuple[ProcessEnd, ...]: ...

    def reap(self, job_id: str, attempt: int) -> int: ...

    async def fault_of_node(self, suspect: Node, partner: str | None) -> str: ...

    async def unused_packages(self, for_s: float) -> tuple[UnusedPackages, ...]: ...

    async def remove_packages(self, node_id: str, name: str, for_s: float) -> bool: ...

    def request_room(self, workers: Mapping[RoomKind, int]) -> None: ...

    def upload_code(self, job_id: str, attempt: int, archive: bytes) -> str:
        """Stores a zip archive in the cluster; its URI, the same for equal bytes."""
