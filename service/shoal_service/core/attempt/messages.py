"""What goes into the attempt machine and what comes out: the closed union of events that `machine.step` consumes, and
that of commands that it decides. The executor performs commands; their results come back as events.

Those of `Order` reach a worker or the storage. The executor numbers them and keeps them in the journal until they are
answered (see `unanswered`), so a restarted supervisor repeats them. The supervisor may have died before it performed an
order, or after, when its answer was lost with it. Its successor cannot distinguish the two, so every order can be
repeated: a worker recognises a `run` of a generation that it has run already, fences and requests only grow, a
checkpoint is committed once, and only one worker can have a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, assert_never

from pydantic import Field

from shoal_service.core.attempt.state import Attempt, AvoidedNode, FallingBack, Incident, Opening, Stage
from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events import JobEvent
from shoal_workers.contract import (
    Assignment,
    ElasticitySpec,
    ErrorReport,
    Frozen,
    IncidentCause,
    ParallelismSpec,
    Progress,
    SavedPart,
    SnapshotPart,
    TrainingSettings,
    WorkerExit,
    WorkerInfo,
    WorkerReport,
)


@dataclass(frozen=True, slots=True)
class CheckpointFound:
    """The answer to FindCheckpoint: the newest usable checkpoint, or None."""

    name: str | None
    damaged: tuple[tuple[str, str], ...] = ()
    """Newer checkpoints whose commit marker is damaged: (name, message) of each."""


@dataclass(frozen=True, slots=True)
class StorageUnusable:
    """The checkpoint URL cannot be read or written at all: the configuration must be changed."""

    message: str


@dataclass(frozen=True, slots=True)
class StorageAway:
    """The search for a checkpoint failed, and may succeed later."""

    message: str
    is_missing: bool = False
    """The storage has answered, without what the job has committed (`checkpoints.is_missing`)."""


@dataclass(frozen=True, slots=True)
class FromWorker:
    """An event that a worker has caused, or that is about it."""

    index: int


@dataclass(frozen=True, slots=True)
class WorkerWarm(FromWorker):
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerFailedToStart(FromWorker):
    """The worker's process has started, but the user's code or data cannot be loaded in it."""

    error: ErrorReport


@dataclass(frozen=True, slots=True)
class WorkerLost(FromWorker):
    """A worker is gone: its process has ended, or is treated as ended."""

    cause: IncidentCause
    witness: str
    message: str


@dataclass(frozen=True, slots=True)
class DeathDated:
    """When a worker died, as observed by the process that watched it. It follows WorkerLost, which does not wait for
    it."""

    worker_id: str
    at: float
    """Wall-clock time, by the clock of Ray's head."""


@dataclass(frozen=True, slots=True)
class DeathExplained:
    """How a worker's process ended, in words. It follows WorkerLost, which does not wait for it."""

    worker_id: str
    message: str


@dataclass(frozen=True, slots=True)
class RunReturned(FromWorker):
    exit: WorkerExit


@dataclass(frozen=True, slots=True)
class ReportArrived(FromWorker):
    item: WorkerReport


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    name: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class CommitFailed:
    name: str
    generation: int
    message: str


class Directed(Frozen):
    """What the control plane wants of the attempt: every value, not only those that have changed."""

    granted: int
    desired: Desired
    elasticity: ElasticitySpec
    parallelism: Literal["auto"] | ParallelismSpec
    """Value of the spec; if it has changed, the group takes another layout at the next step boundary."""
    server_stops: bool = False
    """True if the server ends this cluster: the attempt saves and ends, and the job returns to the queue. False after
    True: another server has taken over."""
    is_preempted: bool = False
    """True if another job gets the workers, or the job moves: the attempt saves and ends, and the job returns to the
    queue."""
    moves_to: str = ""
    """The cluster in which the job goes on; empty if it does not move."""
    pinned: tuple[str, ...] = ()
    """Names of the checkpoints that retention does not delete."""
    settings: TrainingSettings | None = None
    """Training settings of the newest spec, which the group takes at the next step boundary; None if they stay as they
    are."""
    code: str | None = None
    """`code.archive` of the newest spec, which is stored in the cluster; empty if the spec has none; None if the code
    stays as it is. Workers with other code start while the present workers train, and take over at a step boundary."""


@dataclass(frozen=True, slots=True)
class ModelsCompared(FromWorker):
    """The answer to CompareModels."""

    difference: str
    """The difference in words; empty if there is none."""


@dataclass(frozen=True, slots=True)
class ClockJumped:
    """The wall clock was set, or the machine was suspended. No time has passed for the attempt."""

    by_s: float


@dataclass(frozen=True, slots=True)
class ProgressReported(FromWorker):
    """A worker has answered a poll. The event is sent even if the progress has not changed, because the answer itself
    counts."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class InterruptAcknowledged(FromWorker):
    """The worker's control thread has fenced that generation and is waking the training thread."""

    generation: int


@dataclass(frozen=True, slots=True)
class SnapshotPartsReported(FromWorker):
    """The answer to RequestSnapshotParts: the snapshot parts in the memory of the worker's node."""

    snapshot_parts: tuple[SnapshotPart, ...]


@dataclass(frozen=True, slots=True)
class WorkerUnreachable(FromWorker):
    """Calls to the worker fail, but it is not known to be dead: its node or the network to it may have failed."""


@dataclass(frozen=True, slots=True)
class Reopened:
    """The supervisor was restarted from the journal, which may be older than what its predecessor did last."""


@dataclass(frozen=True, slots=True)
class NodesAvoided:
    """All nodes that must not be used, because they are drained or on probation. It replaces the list before."""

    nodes: tuple[AvoidedNode, ...]


@dataclass(frozen=True, slots=True)
class NodesSilent:
    """All nodes whose kernels answer no connect, with the reason of each. It replaces the list before, and is repeated
    while there is such a node."""

    nodes: dict[str, str]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; deadlines are checked."""


WorkerEvent = (
    WorkerWarm
    | WorkerFailedToStart
    | WorkerLost
    | WorkerUnreachable
    | RunReturned
    | InterruptAcknowledged
    | ModelsCompared
)
"""Events that matter only while the worker is in the pool."""
Event = (
    WorkerEvent
    | CheckpointFound
    | StorageUnusable
    | StorageAway
    | DeathDated
    | DeathExplained
    | ReportArrived
    | CheckpointCommitted
    | CommitFailed
    | Directed
    | ClockJumped
    | ProgressReported
    | SnapshotPartsReported
    | Reopened
    | NodesAvoided
    | NodesSilent
    | Tick
)


@dataclass(frozen=True, slots=True)
class FindCheckpoint:
    """Look for the newest committed checkpoint that is not in `excluding`. It is answered by CheckpointFound."""

    excluding: tuple[str, ...] = ()
    expected: str | None = None
    """A storage that has neither this one nor a newer one is not the job's: nothing is written there, and the answer is
    StorageAway."""
    kind: Literal["find_checkpoint"] = "find_checkpoint"


@dataclass(frozen=True, slots=True)
class ToWorker:
    """An order that one worker carries out, or that is about it."""

    index: int


@dataclass(frozen=True, slots=True)
class StartWorker(ToWorker):
    worker_id: str
    avoid_nodes: tuple[str, ...] = ()
    """Ids of the nodes on which the worker must not be placed."""
    only_on: str = ""
    """Id of the node on which the worker must be placed; empty means any node but those to avoid."""
    touches_memory: bool = True
    """True if the worker may touch the memory that it is expected to need while it waits for its first group."""
    code: str = ""
    """Version of the job's code; empty means the one that the attempt began with."""
    is_beside: bool = False
    """True if the worker takes the place of one that is still there: the cluster's scheduler counts no resources for
    it."""
    num_missing: int = 1
    """Number of workers that this turn still starts, this one included. They should be near each other."""
    tp: int = 1
    """Size of a tensor-parallel group, whose workers should be on one node."""
    kind: Literal["start_worker"] = "start_worker"


@dataclass(frozen=True, slots=True)
class KillWorker(ToWorker):
    """End the process of a worker, whatever it does (`supervisor/workers/ray_fleet.py`, `kill`)."""

    reason: str
    kind: Literal["kill_worker"] = "kill_worker"


@dataclass(frozen=True, slots=True)
class Run(ToWorker):
    """Have a worker form and train a generation (`Engine.run`, `ScriptRunner.run`). It is answered by RunReturned."""

    assignment: Assignment
    kind: Literal["run"] = "run"


@dataclass(frozen=True, slots=True)
class Interrupt(ToWorker):
    """Wake a worker out of a generation that is lost. It is answered by InterruptAcknowledged, then by RunReturned."""

    generation: int
    kind: Literal["interrupt"] = "interrupt"


@dataclass(frozen=True, slots=True)
class RequestYield(ToWorker):
    """Ask a rank to stop at the next step boundary, and to save there. All ranks of a task or a loop agree on it in
    their vote; a script gets SIGTERM, and `script.grace_s` to save. It is answered by RunReturned."""

    generation: int
    durable: bool = True
    """True if each rank also saves its part of a durable checkpoint of that step; False if the snapshot in memory is
    enough."""
    kind: Literal["request_yield"] = "request_yield"


@dataclass(frozen=True, slots=True)
class NoteCommit(ToWorker):
    """Report to a worker that the last checkpoint is committed, or could not be. Its final validation waits for
    this."""

    generation: int
    step: int
    error: str = ""
    """Why the checkpoint could not be committed; empty if it is committed."""
    kind: Literal["note_commit"] = "note_commit"


@dataclass(frozen=True, slots=True)
class RequestSnapshotParts(ToWorker):
    """Ask which snapshot parts are in the memory of the worker's node. It is answered by SnapshotPartsReported, or by
    the loss of the worker."""

    kind: Literal["request_snapshot_parts"] = "request_snapshot_parts"


@dataclass(frozen=True, slots=True)
class CompareModels(ToWorker):
    """Have the worker build the model of its code, and compare its parameters with those of the model that worker
    `trained` trains. It is answered by ModelsCompared, or by the loss of one of them."""

    trained: int
    kind: Literal["compare_models"] = "compare_models"


@dataclass(frozen=True, slots=True)
class SuspectNode:
    """Suspect a node, because a worker on it was at fault: the job avoids the node, and the control plane tests it."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the commit marker of a checkpoint, which makes it durable (`CheckpointCoordinator.commit`). It is answered
    by CheckpointCommitted or CommitFailed."""

    name: str
    parts: tuple[SavedPart, ...]
    kind: Literal["commit"] = "commit"


@dataclass(frozen=True, slots=True)
class ForgetDamaged:
    """Show a checkpoint as damaged, because it failed verification or is not trusted any more."""

    name: str
    message: str
    kind: Literal["forget_damaged"] = "forget_damaged"


@dataclass(frozen=True, slots=True)
class Emit:
    """Add an entry to the job's history."""

    event: JobEvent


@dataclass(frozen=True, slots=True)
class ShowIncident:
    incident: Incident
    closed_at: float | None = None
    """When the first step after the incident was completed; None if the incident is still open."""


@dataclass(frozen=True, slots=True)
class End:
    end: AttemptEnd


Order = (
    FindCheckpoint
    | StartWorker
    | KillWorker
    | Run
    | Interrupt
    | RequestYield
    | NoteCommit
    | RequestSnapshotParts
    | CompareModels
    | Commit
    | ForgetDamaged
)
Command = Order | SuspectNode | Emit | ShowIncident | End


@dataclass(frozen=True, slots=True)
class IssuedOrder:
    """An order with its number, which is unique in the attempt: a supervisor repeats an order of its predecessor under
    the number that it had."""

    id: int
    order: Annotated[Order, Field(discriminator="kind")]


_TRAINING = (Stage.RUNNING, Stage.SWITCHING)


def unanswered(orders: Mapping[int, Order], state: Attempt) -> dict[int, Order]:
    """The numbered orders whose answer is missing in this state and would still matter."""
    in_run = frozenset(state.in_run)
    return {number: order for number, order in orders.items() if _is_unanswered(order, state, in_run)}


def still_due(commands: Sequence[Command], state: Attempt) -> list[Command]:
    """The commands of a turn of several events, without the requests that a later event of the turn has answered, such
    as the interrupt of a worker that had left already."""
    in_run = frozenset(state.in_run)
    requests = (Interrupt, RequestYield, RequestSnapshotParts)
    return [c for c in commands if not isinstance(c, requests) or _is_unanswered(c, state, in_run)]


def _is_unanswered(order: Order, state: Attempt, in_run: frozenset[int]) -> bool:
    match order:
        case FindCheckpoint():
            return isinstance(state.current, (Opening, FallingBack)) and state.current.search.retry_at is None
        case StartWorker(index=index):
            worker = state.pool.worker(index)
            return worker is not None and not worker.warm
        case Run(index=index, assignment=assignment):
            is_current = assignment.generation == state.group.generation and index in in_run
            return is_current and not state.group.is_formed  # a formed group: all its workers have their assignments
        case Interrupt(index=index, generation=generation):
            worker = state.pool.worker(index)
            if worker is not None and worker.left_out is not None:
                return worker.left_out.generation == generation
            is_current = generation == state.group.generation and index in in_run
            return is_current and state.stage is Stage.QUIESCING
        case RequestYield(index=index, generation=generation):
            is_current = generation == state.group.generation and index in in_run
            return is_current and state.stage is Stage.SWITCHING
        case NoteCommit(index=index, generation=generation):
            return generation == state.group.generation and index in in_run and state.stage in _TRAINING
        case RequestSnapshotParts(index=index):
            return index in state.snapshots.requested and state.pool.worker(index) is not None
        case CompareModels(index=index):
            warming = state.code.warming
            return warming is not None and warming.comparing and state.pool.worker(index) is not None
        case Commit(name=name):
            return name in state.checkpoints.committing and state.stage is not Stage.ENDED
        case KillWorker() | ForgetDamaged():
            return True  # the machine forgets what it has ended; the executor knows when it is done
        case _:
            assert_never(order)
