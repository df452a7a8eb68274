"""What an executor needs from the world outside: its protocols, and the errors that a fleet's calls raise.

The real ones are wired in `supervisor/actor.py`; the fakes are in `tests/doubles`, and pass the same contract tests.
Nothing here imports Ray.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal_service.clock import Clock
from shoal_service.cluster.node_table import NodeTable
from shoal_service.core.attempt.messages import Command, StartWorker
from shoal_service.supervisor.journal import JournalEntry, RecoveredState
from shoal_workers.checkpoint.errors import DamagedCheckpoint
from shoal_workers.contract import (
    Assignment,
    CheckpointName,
    CommitMarker,
    ErrorReport,
    IncidentCause,
    MetricsBatch,
    MetricsProgress,
    ModelShape,
    NodePoll,
    PollRequest,
    ProfileRequest,
    SavedPart,
    SnapshotPart,
    WorkerExit,
    WorkerInfo,
    WorkerPoll,
    WorkerStack,
    life_of,
)
from shoal_workers.contract.base import FieldError

Address = tuple[str, int]
"""Host and port of a socket."""


#   WorkerCallError        a call to a worker failed
#   |-- WorkerUnavailable    not a death: the call may succeed later
#   `-- WorkerDied           the worker's process has ended
#   AgentFailed            a call to an agent failed


class WorkerCallError(Exception):
    """A call to a worker failed; the message is one line."""

    cause = IncidentCause.WORKER_DIED


class WorkerUnavailable(WorkerCallError):
    """The worker cannot be reached now. Its calls can be repeated; Ray declares it dead after its own health check."""


@dataclass(eq=False)
class WorkerDied(FieldError, WorkerCallError, text="{message}"):
    """The worker's process has ended, alone or with its node."""

    message: str
    cause: IncidentCause


class AgentFailed(Exception):
    """A call to an agent failed: it has ended, or cannot be reached. The message is one line."""


class WorkerCalls(Protocol):
    """The calls that a worker answers itself, with its method of the same name. See Fleet for their errors."""

    async def run(self, index: int, assignment: Assignment) -> WorkerExit:
        """Runs a generation on a worker. It can be repeated: a generation that the worker has begun is not begun
        again."""

    async def join(self, index: int, generation: int) -> WorkerExit:
        """Return the result of a `run` call of this generation whose answer was lost. It can be repeated."""

    async def poll(self, index: int, after: int, acknowledged: int, wait_s: float) -> WorkerPoll:
        """Return the reports with a number above `after`, and wait up to `wait_s` seconds for the first one.

        Args:
            acknowledged: the worker drops the reports up to this number.
        """

    async def snapshot_parts(self, index: int) -> tuple[SnapshotPart, ...]:
        """Return the parts of snapshots in the memory of the worker's node."""

    async def model_shape(self, index: int) -> ModelShape | None:
        """Shape of the model that the worker trains; None if it has trained none yet."""

    async def build_model(self, index: int) -> ModelShape | ErrorReport:
        """Lets the worker's task build the model, of which nothing is kept. The worker must be warm and not in
        `run`."""

    async def interrupt(self, index: int, generation: int) -> None:
        """Have the worker leave every generation up to this one at once, also out of a collective."""

    async def request_yield(self, index: int, generation: int, durable: bool) -> None:
        """Have the group stop at a step boundary that its ranks agree on.

        Args:
            durable: with a checkpoint of that step; otherwise with a snapshot in memory only.
        """

    async def note_commit(self, index: int, generation: int, step: int, error: str) -> None:
        """Tell a worker that its last checkpoint is committed, or why it could not be: the worker waits for this."""

    async def request_profile(self, index: int, generation: int, request: ProfileRequest) -> None:
        """Passes on a request for a profile. It can be repeated: a worker ignores the number of a profile that it has
        had."""

    async def forward_metrics(self, index: int, batch: MetricsBatch) -> MetricsProgress:
        """Passes points on to the metrics hook. It can be repeated: a worker ignores points that it has had."""

    async def forget_snapshots(self, index: int) -> None:
        """Remove the attempt's snapshots from the worker's node. The attempt is over."""

    async def keep_files(self, index: int) -> bool | None:
        """Lets the worker store what the program has written on its node; None if it goes on: ask again. False: it
        cannot, another one of the node may."""


WORKER_CALLS = frozenset(name for name in vars(WorkerCalls) if not name.startswith("_"))
"""The names of these methods."""


class Fleet(WorkerCalls, Protocol):
    """The workers of one attempt, by worker index. Called on the executor's loop only.

    Every call to a worker raises WorkerCallError, and carries the life of this supervisor. A worker refuses the calls
    of a supervisor older than the newest that has called it. A supervisor whose call is refused has a successor: its
    process ends, and the call does not return.
    """

    async def start(self, order: StartWorker) -> None:
        """Asks for a worker. It may wait for resources; its first call returns when it runs."""

    def find(self, index: int, worker_id: str, info: WorkerInfo | None) -> bool:
        """Finds a worker by its name, after a restart of the supervisor. False: there is none of that name."""

    async def adopt(self, index: int, generation: int) -> None:
        """Makes a worker obey this supervisor. Called after a restart, before other calls: the worker leaves every
        generation later than this one, the newest that is in the journal, and obeys no older supervisor from now on."""

    async def prepare(self, index: int) -> WorkerInfo | ErrorReport:
        """Make the worker warm, or return the error of the user's code. It can be repeated."""

    async def stack(self, index: int, *, native: bool = False) -> WorkerStack:
        """Takes the stack of the worker's training thread, also if the worker answers no call. It needs some seconds at
        most, and raises nothing."""

    def knows(self, index: int) -> bool:
        """Return whether the worker was started or found, and neither killed nor forgotten since."""

    def by_node(self) -> dict[str, list[int]]:
        """Indexes of the known workers by node id, without those whose node is not known."""

    async def kill(self, index: int) -> None:
        """Ends the worker, whatever state it is in. Returns when it was ended, or when Ray will end it."""

    def forget(self, index: int) -> None:
        """Forgets a worker that is known to have ended."""

    def actor_id(self, index: int) -> str | None:
        """Ray's id of a known worker, to ask for its death later."""

    async def exit_words(self, info: WorkerInfo) -> str | None:
        """How the process of a worker has ended, in words: "was killed by signal 9 (SIGKILL)", "exited with 3". None:
        that is not known, or not known yet. Raises nothing."""

    async def died_at(self, actor_id: str) -> float | None:
        """Wall-clock time of a worker's death, by the clock of Ray's head; None if it is not known."""


class PollAgents(Protocol):
    """The agents of one attempt, by node id. Called on the executor's loop only.

    Every call carries the life of this supervisor. An agent refuses a supervisor that has a successor, whose process
    then ends, as with `protocols.Fleet`.
    """

    async def start(self, node_id: str) -> None:
        """Starts the node's agent. Returns once an agent answers: the one that is there, or a new one. Raises
        AgentFailed."""

    async def poll(self, node_id: str, requests: Sequence[PollRequest]) -> NodePoll:
        """Returns when a worker has answered, and a little after the longest `wait_s` in any case. Raises
        AgentFailed."""

    async def end(self, node_id: str) -> None:
        """Ends the node's agent, whatever state it is in, if there is one. Raises nothing."""


class Journal(Protocol):
    """The journal of an attempt: what a supervisor must still know after its own death."""

    def read(self) -> JournalEntry | None:
        """Reads the newest entry. Blocks until the head answers."""

    def begin(self, now: float) -> RecoveredState:
        """Claims the next life of this attempt's supervisor, then reads what its predecessors have left. Blocks like
        `read`. Called once, before everything else."""

    @property
    def life(self) -> int:
        """Number of the life that `begin` has claimed; 0: none yet."""

    def require_current(self) -> None:
        """Returns once the head has confirmed that this attempt has no later supervisor. Blocks like `read`."""

    def obey(self, epoch: int) -> None:
        """Keeps the lease epoch for the successors: called before the first directive with a higher one is obeyed."""

    def write(self, entry: JournalEntry, *, wait: bool = True) -> None:
        """Writes an entry. With `wait`, it returns when the entry is written, or after a moment if the head is away;
        otherwise it returns immediately."""

    def delete(self) -> None:
        """Delete all that is stored of the attempt. Its end is stored in the service."""


@dataclass(frozen=True, slots=True)
class Deleter:
    """Who deletes checkpoints: a supervisor. One that was replaced deletes nothing, and none deletes what a later
    attempt, or a later supervisor of its attempt, has written."""

    attempt: int
    life: int
    require_current: Callable[[], None]
    """The journal's `require_current`, which does not return if there is a later supervisor."""

    def may_delete(self, name: CheckpointName) -> bool:
        if (name.attempt, life_of(name.generation)) > (self.attempt, self.life):
            return False
        self.require_current()
        return True


ANYBODY = Deleter(1 << 62, 1 << 62, lambda: None)
"""A caller without supervisors."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a search for a checkpoint."""

    name: CheckpointName | None
    """Name of the newest checkpoint with a valid commit marker; None if there is none."""
    damaged: tuple[tuple[CheckpointName, DamagedCheckpoint], ...]
    """Newer checkpoints whose marker is there, but damaged."""
    newest_there: CheckpointName | None = None
    """The newest checkpoint with a marker, also if it is damaged or was excluded."""


class Catalog(Protocol):
    """The checkpoints of one job in durable storage. Every call may block; OSError: the storage does not answer."""

    def url(self, name: CheckpointName) -> str:
        """Return the place of a checkpoint, which need not exist."""

    def check_writable(self) -> None:
        """Writes, reads and deletes a small file. Raises StorageUnusable."""

    def begin(self, attempt: int) -> None:
        """Notes what is there before the attempt searches: what earlier attempts commit from now on never counts, and
        they delete nothing."""

    def commit(self, parts: Sequence[SavedPart], *, job_id: str, attempt: int, now: float) -> CommitMarker:
        """Commits a checkpoint. The first commit of one stays (compare and set).

        Raises:
            DamagedCheckpoint: a part is not there, or has another length.
            CommitConflict: it was committed with other files.
            AttemptFollowed: a later attempt has begun.
        """

    def search(self, excluding: Collection[CheckpointName] = ()) -> Found:
        """Finds the checkpoint to start from."""

    def retain(
        self,
        keep: int,
        *,
        damaged: Collection[CheckpointName],
        in_flight: Collection[CheckpointName],
        pinned: Collection[CheckpointName] = (),
        best: Collection[int] = (),
        by: Deleter = ANYBODY,
    ) -> list[CheckpointName]:
        """Deletes old checkpoints that `by` may delete, and returns their names."""

    def remove_torn(self, *, in_flight: Collection[CheckpointName], by: Deleter = ANYBODY) -> list[CheckpointName]:
        """Deletes every directory without a marker that `by` may delete, and returns their names."""


class NodeWatch(Protocol):
    """Reports changes of the node table."""

    def start(self, report: Callable[[NodeTable], None]) -> None:
        """Starts the watch. `report` is called with each new table, on a thread of the watch."""

    def stop(self) -> None:
        """Stops the watch. Returns immediately; nothing is reported afterwards."""

    def dead_nodes(self) -> frozenset[str]:
        """Ids of the nodes that the head reports as dead when it is asked now; empty if it does not answer."""


class HostWatch(Protocol):
    """Reports which hosts answer no connect."""

    def start(self, report: Callable[[dict[str, str]], None], silent: frozenset[str] = frozenset()) -> None:
        """Starts the watch. `report` is called on a thread of the watch with all silent nodes and the reasons: when
        they change, and every second while there are any. `silent`: nodes that were silent before; they have answered
        once."""

    def watch(self, nodes: Mapping[str, Address], head: str) -> None:
        """Sets the nodes to watch, each with the address of its raylet. `head`: the node of Ray's head. Any thread."""

    def stop(self) -> None:
        """Stops the watch. Returns immediately."""


@dataclass(frozen=True, slots=True)
class Gone:
    """No process listens at the worker's port, or soon none will."""

    at: float
    """Wall-clock time at which the connection broke."""
    with_raylet: bool
    """The node's raylet has ended too, and with it all workers of that node."""


UntilGone = Callable[[Address, Callable[[], Address | None]], Awaitable[Gone | None]]
"""The type of `probes.until_gone`."""


@dataclass(frozen=True, slots=True)
class World:
    """The world outside of the supervisor, as far as an executor talks to it."""

    fleet: Fleet
    journal: Journal
    catalog: Catalog
    node_watch: NodeWatch
    host_watch: HostWatch
    clock: Clock
    until_gone: UntilGone
    agents: PollAgents | None = None
    """The agents that poll workers; None if the supervisor polls every worker itself."""
    before_command: Callable[[Command], None] = lambda command: None
    """Called when a command is in the journal and is not performed yet. Fault tests end the supervisor here."""
