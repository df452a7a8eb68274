"""What the control plane needs from a Ray cluster: its protocol. Supervisors dial home, see `shoal_service/home.py`.

The real ones are in `control/ray_process/`, wired by `shoal serve`; the fakes are in `tests/doubles`. No Ray here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from shoal_service.control.market.demand import RoomKind
from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_service.home import Home
from shoal_service.supervisor.config import SupervisorConfig

AttemptKey: TypeAlias = tuple[str, int]
"""Job id, and number of the attempt."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one worker of a job has reserved on a node."""

    worker_id: str
    job_id: str
    node_id: str
    need: WorkerNeed
    is_alive: bool = True
    """False: Ray is creating it, and may or may not have reserved the resources by now."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The cluster at one moment."""

    nodes: tuple[Node, ...]
    free: Mapping[str, WorkerNeed] = field(default_factory=dict)
    """What nobody has reserved, by node id. A node that is missing has not reported yet."""
    reservations: tuple[Reservation, ...] = ()
    """Of the workers of all jobs."""
    attempts: frozenset[AttemptKey] = frozenset()
    """Those that have actors, also of other control planes."""


@dataclass(frozen=True, slots=True)
class UnusedPackages:
    """A set of packages of `code.pip` on a node that no process uses."""

    node_id: str
    node_ip: str
    name: str
    num_bytes: int
    unused_s: float


class PackageStores(Protocol):
    """The packages that jobs have had installed on the nodes. Each method may raise ClusterUnreachable."""

    async def unused_packages(self, for_s: float) -> tuple[UnusedPackages, ...]:
        """Of all nodes that are alive and answer: those that no process has used for so long."""

    async def remove_packages(self, node_id: str, name: str, for_s: float) -> bool:
        """False: they were used meanwhile, or the node does not answer."""


@dataclass(frozen=True, slots=True)
class FoundSupervisor:
    """The actor of an attempt's supervisor, which may be starting."""

    can_dial: bool
    """False: a release whose supervisors are called, and do not dial home, has started it."""
    dials_here: bool
    """It was given the address that this control plane has."""


class Cluster(PackageStores, Protocol):
    """A connection to one Ray cluster. All methods that are no coroutines block; each may raise ClusterUnreachable."""

    address: str

    @property
    def connected(self) -> bool: ...

    def snapshot(self) -> ClusterSnapshot:
        """Raises ConnectionStale: call `reconnect`."""

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Calls `changed`, on any thread, soon after a node has come, gone or begun to drain. Returns how to stop."""

    def reconnect(self) -> None:
        """Makes a new connection."""

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
        """Ask the cluster's autoscaler for room for so many workers of each kind, in place of the last request."""

    def upload_code(self, job_id: str, attempt: int, archive: bytes) -> str:
        """Stores a zip archive in the cluster for the runtime environments of an attempt's workers; its URI, the same
        for equal bytes."""
