"""What an executor needs from the world outside: its protocols, and the errors that a fleet's calls raise.

The real ones are wired in `supervisor/actor.py`; the fakes are in `tests/doubles`, and pass the same contract tests.
Nothing here imports Ray.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal_service.clock import Clock
from shoal_service.cluster.node_table import NodeTable
from shoal_service.supervisor.journal import JournalEntry
from shoal_service.supervisor.workers.liveness_probe import Address, Gone
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.marker import CheckpointName, CommitMarker
from shoal_workers.contract.messages import Assignment, ErrorReport, WorkerExit, WorkerInfo, WorkerPoll
from shoal_workers.contract.snapshots import SnapshotPart
from shoal_workers.contract.worker_reports import SavedPart

#   WorkerCallError
#   |-- WorkerUnavailable    not a death: the call may succeed later
#   `-- WorkerDied           the worker's process has ended


class WorkerCallError(Exception):
    """A call to a worker failed; the message is one line."""

    cause = IncidentCause.WORKER_DIED


class WorkerUnavailable(WorkerCallError):
    """The worker cannot be reached now. Its calls can be repeated; Ray declares it dead after its own health check."""


class WorkerDied(WorkerCallError):
    """The worker's process has ended, alone or with its node."""

    def __init__(self, message: str, cause: IncidentCause) -> None:
        super().__init__(message, cause)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


class Fleet(Protocol):
    """The workers of one attempt, by worker index. Called on the executor's loop only.

    Every call to a worker raises WorkerCallError.
    """

    async def start(self, index: int, worker_id: str, avoid_nodes: tuple[str, ...], only_on: str) -> None:
        """Ask for a worker. It may wait for resources; its first call returns when it runs."""

    def find(self, index: int, worker_id: str, info: WorkerInfo | None) -> bool:
        """Reattach to a worker by its name, after a restart of the supervisor. False: there is none of that name."""

    async def prepare(self, index: int) -> WorkerInfo | ErrorReport: ...

    async def run(self, index: int, assignment: Assignment) -> WorkerExit: ...

    async def join(self, index: int, generation: int) -> WorkerExit: ...

    async def poll(self, index: int, after: int, acknowledged: int, wait_s: float) -> WorkerPoll: ...

    async def snapshot_parts(self, index: int) -> tuple[SnapshotPart, ...]: ...

    async def interrupt(self, index: int, generation: int) -> None: ...

    async def request_yield(self, index: int, generation: int, durable: bool) -> None: ...

    async def forget_memory(self, index: int) -> None: ...

    def knows(self, index: int) -> bool:
        """It was started or found, and neither killed nor forgotten since."""

    def by_node(self) -> dict[str, list[int]]:
        """Indexes of the known workers whose node is known, by node id."""

    async def kill(self, index: int) -> None:
        """End the worker, whatever state it is in. Returns when it was ended, or when Ray will end it."""

    def forget(self, index: int) -> None:
        """The worker is known to have ended."""

    def actor_id(self, index: int) -> str | None:
        """Ray's id of a known worker, to ask for its death later."""

    async def died_at(self, actor_id: str) -> float | None:
        """Wall-clock time of that worker's death, by the clock of Ray's head; None: unknown."""


class Journal(Protocol):
    """What a supervisor must still know after its own death."""

    def read(self) -> JournalEntry | None:
        """The newest entry. Blocks until the head answers."""

    def record_start(self, now: float) -> list[float]:
        """Adds a start of this attempt's supervisor; when each one began, oldest first. Blocks like `read`."""

    def require_current(self) -> None:
        """Returns once the head has confirmed that this attempt has no later supervisor. Blocks like `read`."""

    def write(self, entry: JournalEntry, *, wait: bool = True) -> None:
        """`wait`: returns when it is written, or after a moment if the head is away. Otherwise: returns immediately."""

    def delete(self) -> None: ...


class Catalog(Protocol):
    """The checkpoints of one job in durable storage. Every call may block; OSError: the storage does not answer."""

    def url(self, name: CheckpointName) -> str: ...

    def check_writable(self) -> None:
        """Raises StorageUnusable."""

    def commit(self, parts: Sequence[SavedPart], *, job_id: str, attempt: int, now: float) -> CommitMarker:
        """Raises DamagedCheckpoint: a part is not there, or has another length."""

    def newest(
        self, *, before: CheckpointName | None = None, excluding: Collection[CheckpointName] = ()
    ) -> CheckpointName | None: ...

    def retain(
        self, keep: int, *, damaged: Collection[CheckpointName], in_flight: Collection[CheckpointName]
    ) -> list[CheckpointName]:
        """Deletes old checkpoints; the names of those that are deleted."""

    def remove_torn(self, *, in_flight: Collection[CheckpointName]) -> list[CheckpointName]:
        """Deletes every directory without a marker; their names."""


class NodeWatch(Protocol):
    """Reports changes of the node table."""

    def start(self, report: Callable[[NodeTable], None]) -> None:
        """`report` is called with each new table, on a thread of the watch."""

    def stop(self) -> None:
        """Returns immediately; nothing is reported afterwards."""

    def dead_nodes(self) -> frozenset[str]:
        """Asks the head now; empty if it does not answer."""


UntilGone = Callable[[Address, Callable[[], Address | None]], Awaitable[Gone | None]]
"""`liveness_probe.until_gone`."""


@dataclass(frozen=True, slots=True)
class World:
    """Everything outside of the supervisor that an executor talks to."""

    fleet: Fleet
    journal: Journal
    catalog: Catalog
    node_watch: NodeWatch
    clock: Clock
    until_gone: UntilGone
