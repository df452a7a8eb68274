"""FakeCluster and FakeSupervisor: the Ray cluster as the control plane sees it, and a supervisor in it that dials home
without HTTP.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal_service.clock import Clock
from shoal_service.cluster.errors import ClusterError, ClusterUnreachable
from shoal_service.clusters.wire import ClusterSnapshot, FoundSupervisor, Reservation, RoomKind, UnusedPackages
from shoal_service.control.supervisor_reports import SupervisorEndpoint
from shoal_service.core.access import hash_secret
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_service.home import AttemptCaller, Home, HomeReport
from shoal_service.reports import StacksAnswer
from shoal_service.store.errors import AttemptTokenRefused, SupervisorReplaced
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_service.supervisor.reporting.reporter import Outbox
from shoal_workers.contract.messages import Stacks

_SIGN_S = 1.0
_REFUSED_S = 2.0


@dataclass
class FakeSupervisor:
    """The supervisor of one attempt. It reports what a test puts into its outbox, and keeps the directives."""

    config: SupervisorConfig
    outbox: Outbox
    endpoint: SupervisorEndpoint | None = None
    """None: it does not report."""
    clock: Clock | None = None
    life: int = 1
    directives: list[Directive] = field(default_factory=list)
    sent_after: list[int] = field(default_factory=list)
    """What each report has named as acknowledged."""
    is_released: bool = False
    is_replaced: bool = False
    num_refused: int = 0
    """Reports whose token was refused."""
    _tasks: tuple[asyncio.Task[None], ...] = ()

    def __post_init__(self) -> None:
        self._changed, self._is_there = asyncio.Event(), asyncio.Event()
        self._is_there.set()
        if self.endpoint is not None:
            self._tasks = (asyncio.create_task(self._report()), asyncio.create_task(self._obey()))

    @property
    def caller(self) -> AttemptCaller:
        assert self.config.home is not None
        return AttemptCaller(self.config.job_id, self.config.attempt, hash_secret(self.config.home.token))

    def report(self, *items: Any) -> None:
        self.outbox.add(*items)
        self._changed.set()

    def end(self, end: AttemptEnd) -> None:
        self.outbox.add_end(end)
        self._changed.set()

    def stop(self) -> None:
        """Its process ends."""
        for task in self._tasks:
            task.cancel()

    def cut_off(self) -> None:
        self._is_there.clear()

    def reconnect(self) -> None:
        self._is_there.set()

    async def _report(self) -> None:
        assert self.endpoint is not None and self.clock is not None
        acknowledged = 0
        while True:
            await self._is_there.wait()
            if self.outbox.has_status:
                self._changed.clear()
                self.sent_after.append(acknowledged)
                reports = self.outbox.pull(acknowledged, 0.0)
                report = HomeReport(life=self.life, after=acknowledged, reports=reports)
                try:
                    receipt = await self.endpoint.store_report(self.caller, report)
                except AttemptTokenRefused:
                    self.num_refused += 1
                    await self.clock.sleep(_REFUSED_S)
                    continue
                except SupervisorReplaced:
                    self.is_replaced = True
                    return
                acknowledged = receipt.acknowledged
                self.outbox.pull(acknowledged, 0.0)
                if receipt.released:
                    self.is_released = True
                    return
            try:
                await self.clock.wait_for(self._changed.wait(), _SIGN_S)
            except TimeoutError:
                pass  # a sign of life

    async def _obey(self) -> None:
        assert self.endpoint is not None and self.clock is not None
        after = 0
        while True:
            await self._is_there.wait()
            try:
                answer = await self.endpoint.wait_for_directive(self.caller, after, 20.0)
            except AttemptTokenRefused:
                await self.clock.sleep(_REFUSED_S)
                continue
            await self._is_there.wait()
            after = answer.number
            if answer.directive is None:
                continue
            directive = Directive.model_validate(answer.directive)
            if directive.stacks is not None:
                stacks = Stacks(
                    at=0.0, generation=1, reason="requested", clusters=(), summary=f"rank {directive.stacks.rank}"
                )
                self.outbox.answer(StacksAnswer(number=directive.stacks.number, stacks=stacks))
                self._changed.set()
            elif directive != (self.directives[-1] if self.directives else None):
                self.directives.append(directive)


class FakeCluster:
    """A `control.protocols.Cluster`."""

    def __init__(
        self,
        nodes: tuple[Node, ...] = (),
        *,
        endpoint: SupervisorEndpoint | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`endpoint` and `clock`: of the supervisors that it starts; None: they do not report."""
        self._endpoint, self._clock = endpoint, clock
        self.address = "127.0.0.1:6379"
        self.connected = True
        self.silent_s: float | None = 0.0
        self.storage: dict[str, str] = {}
        """By URL of a job's directory: why it cannot be read. Others can."""
        self.asked_storage: list[tuple[str, str]] = []
        """URL, and name of the checkpoint."""
        self.nodes = nodes
        self.supervisors: dict[tuple[str, int], FakeSupervisor] = {}
        self.avoided: list[frozenset[str]] = []
        """`avoid_nodes` of each supervisor that was started."""
        self.places: dict[str, dict[str, int]] = {}
        """Where workers of each job were expected when its supervisor was started."""
        self.reaped: list[tuple[str, int]] = []
        self.silent_node = ""
        """The node of the supervisors, if their hosts do not answer."""
        self.num_unrecorded = 0
        """Processes of each supervisor that died before they recorded their start."""
        self.ends: tuple[ProcessEnd, ...] = ()
        """How these have ended."""
        self.start_error: ClusterError | None = None
        """Why no supervisor can be created."""
        self.raises_start_error = False
        """The order to start a supervisor is answered with that error."""
        self.error_of_find: ClusterError | None = None
        """Raised when a supervisor is looked for."""
        self.notices_failures = False
        """Its gateway says at once that a supervisor could not be created."""
        self._failed: set[tuple[str, int]] = set()
        """Its supervisors do not dial home."""
        self.address_changed = False
        self.has_configurations = True
        """False: the cluster has lost the configurations of its supervisors, so none can be started in their place."""
        """Its supervisors were given another address than the control plane has now."""
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
        self.away: ClusterUnreachable | None = None
        """Raised by every call to it; see `cut_off`."""
        self.reservations: list[Reservation] = []
        """What Shoal's workers have reserved."""
        self.foreign: dict[str, float] = {}
        """CPUs that others have reserved, by node id."""
        self.requested: list[dict[RoomKind, int]] = []
        """Room that was asked of the autoscaler."""
        self._watchers: list[Callable[[], None]] = []

    def cut_off(self, *, with_supervisors: bool = True) -> None:
        """Its gateway is silent. Supervisors dial by themselves, unless they are cut off too."""
        self.away = ClusterUnreachable("the gateway of the cluster is silent")
        for supervisor in self.supervisors.values() if with_supervisors else ():
            supervisor.cut_off()

    def reconnect(self) -> None:
        self.away = None
        for supervisor in self.supervisors.values():
            supervisor.reconnect()

    def _require_link(self) -> None:
        if self.away is not None:
            raise self.away

    def snapshot(self) -> ClusterSnapshot:
        self._require_link()
        if self.error is not None:
            raise self.error
        return ClusterSnapshot(
            nodes=self.nodes,
            free=self._free(),
            reservations=tuple(self.reservations),
            attempts=frozenset(self.supervisors),
            failed=frozenset(self._failed),
        )

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    def change_nodes(self, *nodes: Node) -> None:
        """With a notice to those who watch."""
        self.nodes = nodes
        self._notify()

    def start_supervisor(
        self, config: SupervisorConfig, *, avoid_nodes: frozenset[str], places: Mapping[str, int]
    ) -> None:
        self._require_link()
        if self.start_error is not None and self.raises_start_error:
            raise self.start_error
        self.avoided.append(avoid_nodes)
        self.places[config.job_id] = dict(places)
        key = config.job_id, config.attempt
        known = self.supervisors.get(key)
        if known is not None and known.config.home != config.home:
            known.stop()
            del self.supervisors[key]
        self._failed.discard(key)
        if self.start_error is not None and self.notices_failures:
            self._failed.add(key)
            self._notify()
        if key not in self.supervisors and self.start_error is None:
            self.supervisors[key] = FakeSupervisor(config, Outbox(config.attempt), self._endpoint, self._clock)

    def look_now(self) -> None:
        self.num_fresh += 1

    def keep_ready(self, avoid_nodes: frozenset[str]) -> None:
        pass

    def find_supervisor(self, job_id: str, attempt: int) -> FoundSupervisor | None:
        self._require_link()
        if self.error_of_find is not None:
            raise self.error_of_find
        if (job_id, attempt) not in self.supervisors:
            return None
        return FoundSupervisor(dials_here=not self.address_changed)

    def why_gone(self, job_id: str, attempt: int) -> str:
        return str(self.start_error or "")

    def kill_supervisor(self, job_id: str, attempt: int) -> None:
        """Its actor dies, and Ray makes no other."""
        self.supervisors.pop((job_id, attempt)).stop()

    def silent_supervisor(self, job_id: str, attempt: int) -> str:
        return self.silent_node if (job_id, attempt) in self.supervisors else ""

    def replace_supervisor(self, job_id: str, attempt: int, silent_node: str, home: Home) -> bool:
        """The successor continues with the predecessor's reports, as one does that reads the journal."""
        if not self.has_configurations:
            return False
        old = self.supervisors.pop((job_id, attempt))
        if not silent_node:
            old.stop()
        self.avoided.append(frozenset({silent_node}))
        config = old.config.model_copy(update={"home": home})
        new = FakeSupervisor(config, old.outbox, self._endpoint, self._clock, life=old.life + 1)
        self.supervisors[job_id, attempt] = new
        self.silent_node, self.address_changed = "", False
        return True

    def unrecorded_starts(self, job_id: str, attempt: int) -> int:
        return self.num_unrecorded

    def last_ends(self, job_id: str, attempt: int) -> tuple[ProcessEnd, ...]:
        return self.ends

    def reap(self, job_id: str, attempt: int) -> int:
        self._require_link()
        self.reaped.append((job_id, attempt))
        self._failed.discard((job_id, attempt))
        reaped = self.supervisors.pop((job_id, attempt), None)
        if reaped is None:
            return 0
        reaped.stop()
        return 1

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

    def request_room(self, workers: tuple[tuple[RoomKind, int], ...]) -> None:
        self.requested.append(dict(workers))

    def upload_code(self, job_id: str, attempt: int, sha256: str) -> str:
        self.uploads.append(sha256)
        return f"gcs://code-{len(self.uploads)}.zip"

    def _notify(self) -> None:
        for changed in tuple(self._watchers):
            changed()

    async def sees_storage(self, url: str, name: str) -> str:
        self._require_link()
        if self.error is not None:
            raise self.error
        self.asked_storage.append((url, name))
        return self.storage.get(url, "")

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
