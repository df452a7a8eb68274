"""FakeCluster and FakeSupervisor: the Ray cluster as the control plane sees it, and a supervisor in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal_service.cluster.errors import ClusterError, SupervisorGone, SupervisorUnavailable
from shoal_service.clusters.snapshot import ClusterSnapshot, Reservation, RoomKind, UnusedPackages
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_service.reports import SupervisorReports
from shoal_service.signing.calls import CallName, PullArguments, ReleaseArguments, SignedCall, StacksArguments
from shoal_service.signing.gate import Gate
from shoal_service.supervisor.config import Directive, StaleEpoch, SupervisorConfig
from shoal_service.supervisor.reporting.outbox import Outbox
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.messages import Stacks


@dataclass
class FakeSupervisor:
    """The supervisor of one attempt, and a `protocols.SupervisorHandle` to it."""

    config: SupervisorConfig
    outbox: Outbox
    directives: list[Directive] = field(default_factory=list)
    pulls: list[int] = field(default_factory=list)
    """The sequence number of each pull."""
    is_released: bool = False
    epoch: int = 0
    _error: ClusterError | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._gate = Gate(self.config.public_key, self.config.job_id, self.config.attempt)

    def report(self, *items: Any) -> None:
        self.outbox.add(*items)
        self._changed.set()

    def end(self, end: AttemptEnd) -> None:
        self.outbox.add_end(end)
        self._changed.set()

    def die(self) -> None:
        self._error = SupervisorGone("the actor died")
        self._changed.set()

    def cut_off(self) -> None:
        self._error = SupervisorUnavailable("the actor is being restarted")
        self._changed.set()

    def reconnect(self) -> None:
        self._error = None

    async def pull(self, after: int, wait_s: float, epoch: int, signed: SignedCall | None = None) -> SupervisorReports:
        self._admit(CallName.PULL, signed, PullArguments)
        self.pulls.append(after)
        while True:
            self._check(epoch)
            reports = self.outbox.pull(after, 0.0)
            if reports.seq > after or reports.end is not None:
                return reports
            self._changed.clear()
            await self._changed.wait()

    async def direct(self, directive: Directive, signed: SignedCall | None = None) -> None:
        self._admit(CallName.DIRECT, signed, Directive)
        self._check(directive.epoch)
        self._gate.require_order(directive.epoch, directive.number)
        self.directives.append(directive)

    async def stacks(
        self, rank: int | None, native: bool, epoch: int, signed: SignedCall | None = None
    ) -> Stacks | None:
        self._admit(CallName.STACKS, signed, StacksArguments)
        self._check(epoch)
        return Stacks(at=0.0, generation=1, reason="requested", clusters=(), summary=f"rank {rank}")

    async def release(self, epoch: int, signed: SignedCall | None = None) -> None:
        self._admit(CallName.RELEASE, signed, ReleaseArguments)
        self.is_released = True

    def _admit(self, name: CallName, signed: SignedCall | None, kind: type[Frozen]) -> None:
        if signed is None:
            self._gate.require_no_key(name)
        else:
            self._gate.opened(signed, name, kind)

    def _check(self, epoch: int) -> None:
        if self._error is not None:
            raise self._error
        if epoch < self.epoch:
            raise StaleEpoch(epoch, self.epoch)
        self.epoch = epoch


class FakeCluster:
    """A `control.protocols.Cluster`."""

    def __init__(self, nodes: tuple[Node, ...] = ()) -> None:
        self.address = "127.0.0.1:6379"
        self.connected = True
        self.nodes = nodes
        self.supervisors: dict[tuple[str, int], FakeSupervisor] = {}
        self.avoided: list[frozenset[str]] = []
        """`avoid_nodes` of each supervisor that was started."""
        self.places: dict[str, dict[str, int]] = {}
        """Where workers of each job were expected when its supervisor was started."""
        self.reaped: list[tuple[str, int]] = []
        self.silent_node = ""
        """Of the supervisors, if their hosts do not answer."""
        self.num_unrecorded = 0
        """Processes of each supervisor that died before they recorded their start."""
        self.ends: tuple[ProcessEnd, ...] = ()
        """How these have ended."""
        self.start_error: ClusterError | None = None
        """What each new supervisor raises."""
        self.uploads: list[str] = []
        """SHA-256 of each code archive."""
        self.num_fresh = 0
        """Looks that had to be new ones."""
        self.tested: list[tuple[str, str | None]] = []
        """Nodes that were tested, each with its partner."""
        self.packages: list[UnusedPackages] = []
        """On its nodes, by nobody used."""
        self.fault = ""
        """The outcome of every node test."""
        self.error: ClusterError | None = None
        """Raised by every look at the cluster."""
        self.reservations: list[Reservation] = []
        """Of Shoal's workers."""
        self.foreign: dict[str, float] = {}
        """CPUs that others have reserved, by node id."""
        self.requested: list[dict[RoomKind, int]] = []
        """Of the autoscaler."""
        self._watchers: list[Callable[[], None]] = []

    def snapshot(self, *, fresh: bool = False) -> ClusterSnapshot:
        self.num_fresh += fresh
        if self.error is not None:
            raise self.error
        return ClusterSnapshot(
            nodes=self.nodes,
            free=self._free(),
            reservations=tuple(self.reservations),
            attempts=frozenset(self.supervisors),
        )

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    def change_nodes(self, *nodes: Node) -> None:
        """With a notice to those who watch."""
        self.nodes = nodes
        for changed in self._watchers:
            changed()

    def start_supervisor(
        self, config: SupervisorConfig, *, avoid_nodes: frozenset[str], places: Mapping[str, int]
    ) -> FakeSupervisor:
        self.avoided.append(avoid_nodes)
        self.places[config.job_id] = dict(places)
        key = config.job_id, config.attempt
        if key not in self.supervisors:
            self.supervisors[key] = FakeSupervisor(
                config, Outbox(config.attempt), epoch=config.epoch, _error=self.start_error
            )
        return self.supervisors[key]

    def keep_ready(self, avoid_nodes: frozenset[str]) -> None:
        pass

    def find_supervisor(self, job_id: str, attempt: int) -> FakeSupervisor | None:
        return self.supervisors.get((job_id, attempt))

    def silent_supervisor(self, job_id: str, attempt: int) -> str:
        return self.silent_node if (job_id, attempt) in self.supervisors else ""

    def replace_supervisor(self, job_id: str, attempt: int, silent_node: str, public_key: str) -> bool:
        """The successor continues with the predecessor's reports, as one does that reads the journal."""
        old = self.supervisors.pop((job_id, attempt))
        config = old.config.model_copy(update={"public_key": public_key})
        new = self.start_supervisor(config, avoid_nodes=frozenset({silent_node}), places={})
        new.outbox, self.silent_node = old.outbox, ""
        return True

    def unrecorded_starts(self, job_id: str, attempt: int) -> int:
        return self.num_unrecorded

    def last_ends(self, job_id: str, attempt: int) -> tuple[ProcessEnd, ...]:
        return self.ends

    def reap(self, job_id: str, attempt: int) -> int:
        self.reaped.append((job_id, attempt))
        return 1 if self.supervisors.pop((job_id, attempt), None) is not None else 0

    async def unused_packages(self, for_s: float) -> tuple[UnusedPackages, ...]:
        if self.error is not None:
            raise self.error
        return tuple(one for one in self.packages if one.unused_s >= for_s)

    async def remove_packages(self, node_id: str, name: str, for_s: float) -> bool:
        if self.error is not None:
            raise self.error
        kept = [one for one in self.packages if (one.node_id, one.name) != (node_id, name) or one.unused_s < for_s]
        found, self.packages = len(kept) < len(self.packages), kept
        return found

    async def fault_of_node(self, suspect: Node, partner: str | None) -> str:
        self.tested.append((suspect.node_id, partner))
        return self.fault

    def request_room(self, workers: Mapping[RoomKind, int]) -> None:
        self.requested.append(dict(workers))

    def upload_code(self, job_id: str, attempt: int, sha256: str) -> str:
        self.uploads.append(sha256)
        return f"gcs://code-{len(self.uploads)}.zip"

    def _free(self) -> dict[str, WorkerNeed]:
        return {
            node.node_id: WorkerNeed(
                cpus=node.cpus
                - self.foreign.get(node.node_id, 0.0)
                - sum(one.need.cpus for one in self.reservations if one.node_id == node.node_id),
                gpus=node.gpus,
                memory_gib=node.memory_gib,
            )
            for node in self.nodes
            if node.alive
        }
