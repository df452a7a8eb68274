"""What the control plane needs from the Ray clusters that have joined. Supervisors dial home: `shoal_service/home.py`.

The real ones are in `control/clusters/`, wired by `shoal serve`; the fakes are in `tests/doubles`. No Ray here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shoal_service.clusters.snapshot import ClusterSnapshot, FoundSupervisor, RoomKind, UnusedPackages
from shoal_service.core.nodes import Cordon, Node
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_service.home import Home
from shoal_service.supervisor.config import SupervisorConfig


class PackageStores(Protocol):
    """The packages that jobs have had installed on the nodes. Each method may raise ClusterUnreachable."""

    async def unused_packages(self, for_s: float) -> tuple[UnusedPackages, ...]:
        """The packages that no process has used for `for_s` seconds, on all nodes that are alive and answer."""

    async def remove_packages(self, node_id: str, name: str, for_s: float) -> bool:
        """False: they were used meanwhile, or the node does not answer."""


class Cluster(PackageStores, Protocol):
    """One Ray cluster. All methods that are no coroutines block; each may raise ClusterUnreachable."""

    @property
    def address(self) -> str: ...

    @property
    def connected(self) -> bool: ...

    def snapshot(self, *, fresh: bool = False) -> ClusterSnapshot:
        """As it was at most some seconds ago; `fresh`: not before this call, if that is possible within a second."""

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Calls `changed`, on any thread, soon after a node has come, gone or begun to drain, or a supervisor could not
        be created. Returns how to stop."""

    def start_supervisor(
        self, config: SupervisorConfig, *, avoid_nodes: frozenset[str], places: Mapping[str, int]
    ) -> None:
        """Idempotent: an attempt has one supervisor. One that was given another `home` is replaced. It is kept off
        `avoid_nodes` if there are other nodes. `places`: how many of its workers are expected on which node, once
        others have given these places back; their processes may start at once. The cluster fills in the address of
        `config.home`."""

    def keep_ready(self, avoid_nodes: frozenset[str]) -> None:
        """Called again and again: has a process started, now and then, in which the next supervisor begins at once."""

    def find_supervisor(self, job_id: str, attempt: int) -> FoundSupervisor | None:
        """None: no actor of the attempt's supervisor is there, and Ray makes none any more."""

    def why_gone(self, job_id: str, attempt: int) -> str:
        """Why there is none, in Ray's words; empty: not known."""

    def silent_supervisor(self, job_id: str, attempt: int) -> str:
        """The node of the attempt's supervisor, if its host answers no connect for 1.5 s although the head answers;
        else empty."""

    def replace_supervisor(self, job_id: str, attempt: int, silent_node: str, home: Home) -> bool:
        """Starts a supervisor with the same configuration and this home, on another node in the place of the one on
        `silent_node`; if that is empty, in the place of the one that there is. May be repeated. False: that
        configuration is not known, or is that of a release whose supervisors do not dial home."""

    def unrecorded_starts(self, job_id: str, attempt: int) -> int:
        """Processes of the attempt's supervisor that were started and have not recorded it; one of them may be about to
        do so."""

    def last_ends(self, job_id: str, attempt: int) -> tuple[ProcessEnd, ...]:
        """How the last processes of the attempt's supervisor have ended, oldest first; empty: not known."""

    def reap(self, job_id: str, attempt: int) -> int:
        """Kills all actors of an attempt and deletes its journal. Returns the number of actors."""

    async def fault_of_node(self, suspect: Node, partner: str | None) -> str:
        """The probation test of a node: what was wrong; empty: it passed. Takes some seconds."""

    def request_room(self, workers: Mapping[RoomKind, int]) -> None:
        """Ask the cluster's autoscaler for room for these workers of each kind, in place of the last request."""

    def upload_code(self, job_id: str, attempt: int, sha256: str) -> str:
        """Stores a code archive of the store in the cluster, for the runtime environments of an attempt's workers; its
        URI, the same for equal bytes."""

    def sees_storage(self, url: str, name: str) -> str:
        """Why the checkpoint of this name in the job's directory cannot be read from there; empty: it can. With an
        empty name: why the directory is not there."""

    @property
    def silent_s(self) -> float | None:
        """Seconds since the newest report; None: none has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedAs:
    """One of the clusters, and what users have set for it."""

    cluster: Cluster
    labels: Mapping[str, str] = field(default_factory=dict)
    """Added to those of its nodes."""
    cordon: Cordon | None = None


class Clusters(Protocol):
    """All clusters that have joined, by name."""

    @property
    def own(self) -> str:
        """The name of the one that this service has for itself, or that its settings name. Attempts whose cluster is
        not known are there. It counts as joined from the start."""

    def refresh(self) -> None:
        """Reads which ones have joined or were removed since; blocks. Raises StoreUnavailable."""

    @property
    def joined(self) -> Mapping[str, JoinedAs]:
        """As of the last `refresh`: the own one first, the others by name."""

    def of(self, name: str) -> Cluster:
        """The one of this name; empty: the own one. One that has not joined, or was removed, answers no call."""

    def watch(self, changed: Callable[[str], None]) -> Callable[[], None]:
        """Calls `changed` with the name of a cluster, on any thread, soon after a node of it has come, gone or begun to
        drain. Returns how to stop."""
