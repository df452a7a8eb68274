"""What the state of an attempt is made of: its workers, with what is known of each of them and of its node; and its
stages, with the table of transitions between them, and what each of them alone has to know.

Attempt.current holds one of the classes below. A field that has a meaning in one stage only cannot be read in another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from shoal_service.core.persistent import Table
from shoal_workers.contract import Frozen, ParallelismSpec, WorkerInfo


class AvoidedNode(Frozen):
    """A node that must not be used any longer."""

    node_id: str
    reason: str
    """Reason for people and for the incident, such as "drain requested" or "on probation: ..."."""
    deadline: float | None = None
    """Wall-clock time at which the node goes away; None if no deadline is known."""
    is_replaceable: bool = True
    """True if other nodes have room for the workers that leave this one. False if no replacement is waited for."""
    keeps_workers: bool = False
    """True if the workers on the node stay, and only new ones are not placed there (a cordon)."""
    is_suspected: bool = False
    """True if the node is avoided only because it may be at fault. A worker may start there to serve the snapshots in
    its memory; it never trains there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Why a worker is left out of groups: its node is silent, or it has not yet left the generation that went on
    without it."""

    since: float
    reason: str
    """Why the node counts as silent, for people."""
    generation: int | None = None
    """Generation whose `run` the worker has not left yet; None if it was not in `run`, or has left it."""
    answers_since: float | None = None
    """When the node began to answer again; None if it is silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker of the attempt, from its start to its end. `index` is unique in the attempt: it counts all workers
    that were ever started."""

    index: int
    worker_id: str
    avoids: tuple[str, ...] = ()
    """Ids of the nodes on which the worker was not to be started."""
    code: str = ""
    """Version of the job's code that the worker loads when it starts."""
    is_beside: bool = False
    """True if it was started next to a worker whose place it takes, so the cluster's scheduler counts no resources for
    it."""
    only_on: str = ""
    """Id of the node on which it was to be started, to serve the snapshots there; empty means any node with room."""
    info: WorkerInfo | None = None
    """What the worker reports about itself once it is warm; None while it starts."""
    warm_at: float | None = None
    in_run: bool = False
    """True if a `run` call to the worker is in flight."""
    acknowledged: int = 0
    """Newest lost generation whose interrupt the worker has acknowledged; 0 if none."""
    unreachable_since: float | None = None
    """Time since which all calls to the worker have failed; None if it answers."""
    left_out: LeftOut | None = None
    """Set while the worker's node is suspected to be gone: no group takes the worker until it answers. See
    losses.py."""
    leave: AvoidedNode | None = None
    """Set when the worker, not its whole node, is about to be taken away."""
    slow_until: float | None = None
    """Set for a straggler: the time until which a replacement is waited for; None if it is fast enough."""

    @property
    def warm(self) -> bool:
        return self.info is not None

    @property
    def node_id(self) -> str:
        """Id of the worker's node; empty while it starts."""
        return self.info.node_id if self.info is not None else ""

    @property
    def is_node_silent(self) -> bool:
        """True if the worker is left out because its node does not answer."""
        return self.left_out is not None and self.left_out.answers_since is None

    @property
    def is_usable(self) -> bool:
        """True if the worker could train: it is warm, not unreachable, and not left out."""
        return self.info is not None and self.unreachable_since is None and self.left_out is None

    @property
    def serves_snapshots(self) -> bool:
        """True if the worker can be asked for the snapshots on its node."""
        return self.is_usable and self.info is not None and self.info.snapshot_port != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPool:
    """Every worker that exists: starting, warm, or in a group."""

    workers: Table[Worker] = field(default_factory=Table)
    """Ordered by index, which only grows."""
    next_index: int = 0

    def worker(self, index: int) -> Worker | None:
        return self.workers.find(index)

    @property
    def warm(self) -> tuple[Worker, ...]:
        return tuple(worker for worker in self.workers if worker.warm)

    @property
    def usable(self) -> tuple[Worker, ...]:
        return tuple(worker for worker in self.workers if worker.is_usable)

    def with_new(self, worker: Worker) -> WorkerPool:
        """The pool with this worker added. Its index must be `next_index`."""
        return WorkerPool(workers=self.workers.added(worker), next_index=worker.index + 1)

    def with_worker(self, changed: Worker) -> WorkerPool:
        """The pool with this worker in place of the one of the same index."""
        return WorkerPool(workers=self.workers.replaced(changed), next_index=self.next_index)

    def without(self, index: int) -> WorkerPool:
        return WorkerPool(workers=self.workers.without(index), next_index=self.next_index)


def silent_nodes(pool: WorkerPool) -> frozenset[str]:
    """Nodes whose workers are left out because they are silent."""
    return frozenset(worker.node_id for worker in pool.workers if worker.is_node_silent)


class Stage(StrEnum):
    """Where the attempt stands. The diagram in docs/architecture.md is generated from TRANSITIONS."""

    OPENING = "opening"
    """The storage is asked which checkpoint is the newest."""
    STARTING = "starting"
    """Workers start, and no group was formed yet."""
    WAITING = "waiting"
    """No group can form yet: too few workers are warm, they do not fit into the memory of their nodes, a back-off runs,
    or snapshots are looked for. The stage has a deadline."""
    FORMING = "forming"
    """`run(generation)` was sent; the group forms and restores."""
    RUNNING = "running"
    QUIESCING = "quiescing"
    """The group is lost: survivors are interrupted. The next group forms when every `run` has returned and the
    snapshots in memory are known."""
    SWITCHING = "switching"
    """The group was asked to stop at the next step boundary (to grow, shrink or pause), or its workers are leaving
    after the last step."""
    COMMITTING = "committing"
    """Every worker of the group has left `run` as planned; the durable checkpoint of that step is being committed."""
    FALLING_BACK = "falling_back"
    """The checkpoint to restore was damaged or is not trusted, and the storage is asked for an older one."""
    ENDED = "ended"


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.OPENING: frozenset({Stage.STARTING, Stage.ENDED}),
    Stage.STARTING: frozenset({Stage.FORMING, Stage.WAITING, Stage.ENDED}),
    Stage.WAITING: frozenset({Stage.FORMING, Stage.ENDED}),
    Stage.FORMING: frozenset({Stage.RUNNING, Stage.SWITCHING, Stage.QUIESCING, Stage.ENDED}),
    Stage.RUNNING: frozenset({Stage.SWITCHING, Stage.QUIESCING, Stage.ENDED}),
    Stage.SWITCHING: frozenset({Stage.QUIESCING, Stage.COMMITTING, Stage.FORMING, Stage.WAITING, Stage.ENDED}),
    Stage.QUIESCING: frozenset({Stage.FORMING, Stage.WAITING, Stage.FALLING_BACK, Stage.COMMITTING, Stage.ENDED}),
    Stage.COMMITTING: frozenset({Stage.FORMING, Stage.WAITING, Stage.ENDED}),
    Stage.FALLING_BACK: frozenset({Stage.FORMING, Stage.WAITING, Stage.ENDED}),
    Stage.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnyStage:
    since: float
    """Wall-clock time at which the stage began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for a checkpoint, in a storage that may not answer."""

    num_failures: int = 0
    error: str = ""
    """Error of the last try; empty if no try has failed."""
    retry_at: float | None = None
    """Wall-clock time at which the storage is asked again; None if its answer is waited for."""
    is_missing: bool = False
    """The storage answered last, without the checkpoints that the job has committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening(_AnyStage):
    search: Search = Search()
    stage: Literal[Stage.OPENING] = Stage.OPENING


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting(_AnyStage):
    stage: Literal[Stage.STARTING] = Stage.STARTING


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(_AnyStage):
    orphans_until: float | None = None
    """Until this time the next group waits for workers that were started on nodes with unreported snapshots; None if no
    such workers were started. See memory_snapshots.py."""
    refused: str = ""
    """Why the usable workers cannot form a group: the memory that they need on a node; empty if there are too few of
    them."""
    stage: Literal[Stage.WAITING] = Stage.WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class Forming(_AnyStage):
    stage: Literal[Stage.FORMING] = Stage.FORMING


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What the layout depends on while an attempt lasts; the rest of the spec cannot change."""

    num_workers: int
    parallelism: Literal["auto"] | ParallelismSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(_AnyStage):
    draining_since: float | None = None
    """When a worker of the group first had to leave; None if all may stay."""
    kept_layout_for: PlanInputs | None = None
    """Inputs for which a layout was planned last and the group kept its own. They are not planned for again."""
    stage: Literal[Stage.RUNNING] = Stage.RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiescing(_AnyStage):
    __pydantic_config__: ClassVar = ConfigDict(extra="ignore")
    """Unknown fields are ignored. This is a part of wire version 3."""
    interrupt_at: float | None = None
    """The workers of the group are not interrupted before this time; None if they have been interrupted."""
    interrupted_at: float | None = None
    left_at: float | None = None
    """When the newest worker has left; None if none has since the group was lost."""
    durable: bool
    """True if the group had been asked for a durable checkpoint before it was lost, as in Switching."""
    stage: Literal[Stage.QUIESCING] = Stage.QUIESCING


@dataclass(frozen=True, slots=True, kw_only=True)
class Switching(_AnyStage):
    durable: bool
    """True if the next group starts from a durable checkpoint of the step boundary; False if from
    the snapshot of that step in memory."""
    stage: Literal[Stage.SWITCHING] = Stage.SWITCHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Committing(_AnyStage):
    stage: Literal[Stage.COMMITTING] = Stage.COMMITTING


@dataclass(frozen=True, slots=True, kw_only=True)
class FallingBack(_AnyStage):
    search: Search = Search()
    stage: Literal[Stage.FALLING_BACK] = Stage.FALLING_BACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(_AnyStage):
    stage: Literal[Stage.ENDED] = Stage.ENDED


CurrentStage = Annotated[
    Opening | Starting | Waiting | Forming | Running | Quiescing | Switching | Committing | FallingBack | Ended,
    Field(discriminator="stage"),
]
