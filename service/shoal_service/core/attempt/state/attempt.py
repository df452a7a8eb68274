"""State of one attempt of a job: which workers exist, which of them form the group, and what it waits for.

A frozen value that round-trips through JSON: it is also the supervisor's journal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from shoal_service.core.attempt.state.incident import Incident
from shoal_service.core.attempt.state.timeouts import Timeouts as Timeouts
from shoal_service.core.attempt.state.worker import AvoidedNode as AvoidedNode
from shoal_service.core.attempt.state.worker import Hang as Hang
from shoal_service.core.attempt.state.worker import LastBeat as LastBeat
from shoal_service.core.attempt.state.worker import NodeLoss as NodeLoss
from shoal_service.core.attempt.state.worker import Worker as Worker
from shoal_service.core.desired import Desired as Desired
from shoal_service.core.goodput import Ledger
from shoal_service.core.hardware_profile import HardwareProfile
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import SavedPart, WorkerExit
from shoal_workers.contract.snapshots import SnapshotPart, SnapshotSource
from shoal_workers.contract.spec import JobSpec, ParallelismSpec


class Stage(StrEnum):
    """Where the attempt stands. The diagram in docs/architecture.md is generated from TRANSITIONS."""

    OPENING = "opening"
    """Reading which checkpoint is the newest."""
    STARTING = "starting"
    """Workers start; no group was formed yet."""
    WAITING = "waiting"
    """Fewer than elasticity.min_workers workers are warm; has a deadline."""
    FORMING = "forming"
    """`run(generation)` is out; the group comes together and restores."""
    RUNNING = "running"
    QUIESCING = "quiescing"
    """A member is lost: survivors are being woken; the group re-forms when every `run` has returned, and all that lies
    in memory is known."""
    SWITCHING = "switching"
    """Asked to stop at the next step boundary, to grow, shrink, pause; or members are leaving after the last step."""
    COMMITTING = "committing"
    """Every member has left `run` as planned; the durable checkpoint of that step is being committed."""
    FALLING_BACK = "falling_back"
    """The checkpoint to restore was damaged; looking for the one before it."""
    ENDED = "ended"


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.OPENING: frozenset({Stage.STARTING, Stage.ENDED}),
    Stage.STARTING: frozenset({Stage.FORMING, Stage.ENDED}),
    Stage.WAITING: frozenset({Stage.FORMING, Stage.ENDED}),
    Stage.FORMING: frozenset({Stage.RUNNING, Stage.SWITCHING, Stage.QUIESCING, Stage.ENDED}),
    Stage.RUNNING: frozenset({Stage.SWITCHING, Stage.QUIESCING, Stage.ENDED}),
    Stage.SWITCHING: frozenset({Stage.QUIESCING, Stage.COMMITTING, Stage.FORMING, Stage.WAITING, Stage.ENDED}),
    Stage.QUIESCING: frozenset({Stage.FORMING, Stage.WAITING, Stage.FALLING_BACK, Stage.COMMITTING, Stage.ENDED}),
    Stage.COMMITTING: frozenset({Stage.FORMING, Stage.WAITING, Stage.ENDED}),
    Stage.FALLING_BACK: frozenset({Stage.FORMING, Stage.WAITING, Stage.ENDED}),
    Stage.ENDED: frozenset(),
}


class Attempt(Frozen):
    """Everything that `step` decides from."""

    job_id: str
    attempt: int
    spec: JobSpec
    checkpoint_root: str
    granted: int
    """World size that the scheduler allows."""
    desired: Desired = Desired.RUN
    timeouts: Timeouts = Timeouts()
    profile: HardwareProfile | None = None
    """What the planner goes by; None: what is built in."""

    stage: Stage = Stage.OPENING
    since: float
    """When `stage` began."""
    not_before: float = 0.0
    """Back-off: the next group forms no earlier."""
    turned_at: float = 0.0
    """When anything was last looked at."""
    interrupt_at: float | None = None
    """In QUIESCING: members are left alone until then."""
    interrupted_at: float | None = None
    """In QUIESCING: when members were interrupted."""
    acknowledged: tuple[int, ...] = ()
    """In QUIESCING: worker indexes that have acknowledged the interrupt."""
    switch_durable: bool = True
    """In SWITCHING: a durable checkpoint of the boundary was asked for."""
    grow_not_before: float = 0.0
    """Back-off after a save failed in a switch."""
    generation: int = 0
    workers: tuple[Worker, ...] = ()
    members: tuple[int, ...] = ()
    """Worker indexes in rank order of the current (or last) generation."""
    exits: dict[int, WorkerExit] = Field(default_factory=dict)
    """By worker index: members of this generation that left `run`."""
    next_index: int = 0
    layout: Layout | None = None
    """Of the current (or last) generation."""
    planned_by: Literal["auto"] | ParallelismSpec = "auto"
    """What the spec asked for when that layout was planned."""

    asked: dict[int, float] = Field(default_factory=dict)
    """By worker index: since when an answer to RequestSnapshotParts is waited for."""
    told: dict[int, tuple[SnapshotPart, ...]] = Field(default_factory=dict)
    """By worker index: what lies in memory, as others than members told since the group ended."""
    memory: SnapshotSource | None = None
    """What the current (or last) generation started from, if from memory."""
    unreadable: tuple[tuple[int, int], ...] = ()
    """(generation, step) of snapshots of which a part could not be read."""
    doubted: tuple[tuple[int, int], ...] = ()
    """The same, where it may have been the fault of a worker that is gone by now."""
    oldest_snapshot: int = 0
    """Snapshots of earlier generations are not to be trusted."""

    left_behind: tuple[str, ...] = ()
    """Ids of nodes on which members of the last group died by themselves: what lies in their memory nobody told."""
    recall_until: float | None = None
    """So long the next group waits for workers that were sent there; None: none were."""

    newest: str | None = None
    """Directory name of the newest committed checkpoint."""
    restored: str | None = None
    """Directory name of the one that the current (or last) generation started from, or would have without a snapshot in
    memory; `newest` may be newer by now."""
    damaged: tuple[str, ...] = ()
    parts: dict[str, dict[int, SavedPart]] = Field(default_factory=dict)
    """By directory name, then rank: parts that wait for the others, then for their commit."""
    committing: tuple[str, ...] = ()
    """Directory names whose commit is in flight."""
    failed_saves: tuple[str, ...] = ()
    """Directory names of this attempt that will never be committed."""

    formed: int = 0
    """The last generation that was up and restored."""
    step: int = 0
    """Newest completed step of the current generation's line."""
    start_step: int = 0
    total_steps: int | None = None
    step_times: tuple[float, ...] = ()
    """Seconds of the last steps, newest last."""
    beats: dict[int, LastBeat] = Field(default_factory=dict)
    """By worker index: members of this generation."""
    answered: dict[int, float] = Field(default_factory=dict)
    """By worker index: when it last answered a poll."""
    progressed_at: float = 0.0
    """When the group formed, or last completed a step."""
    hang: Hang | None = None
    avoided: tuple[AvoidedNode, ...] = ()
    draining_since: float | None = None
    """In RUNNING: since when a member has to go."""
    losses: tuple[NodeLoss, ...] = ()
    """Recent ones."""
    suspected: dict[str, float] = Field(default_factory=dict)
    """By node: when it was last put on probation."""
    slow: dict[int, int] = Field(default_factory=dict)
    """By worker index: for how many steps in a row it has been slower than the others."""
    no_straggler_before: int = 0
    """Step."""
    skip_steps: tuple[int, ...] = ()
    """Steps that are left out, since a rollback was made because of them."""
    rollbacks: int = 0
    """In a row, because of steps that were not finite: since a newer checkpoint than the last of them."""
    num_skipped: int = 0
    """Steps that the engine skipped because they were not finite."""
    formed_once: bool = False
    incident: Incident | None = None
    num_incidents: int = 0
    steps_lost: int = 0
    recoveries: int = 0
    last_saves: int = 0
    """Failed tries to save the state after the last step."""
    fruitless: int = 0
    """Re-formations since the last completed step."""
    failed_starts: int = 0
    """Workers that died while starting since the last one that came up."""
    ledger: Ledger = Ledger()
    """Where the worker-seconds went; kept by `booking`, never decided upon."""

    def worker(self, index: int) -> Worker | None:
        return next((p for p in self.workers if p.index == index), None)

    def rank_of(self, index: int) -> int | None:
        return self.members.index(index) if index in self.members else None

    @property
    def warm(self) -> tuple[Worker, ...]:
        return tuple(p for p in self.workers if p.warm)

    @property
    def usable(self) -> tuple[Worker, ...]:
        """Those that could train: warm, and they answer."""
        return tuple(p for p in self.workers if p.warm and p.unreachable_since is None)

    @property
    def in_run(self) -> tuple[int, ...]:
        """Worker indexes of members that have not left this generation, by rank."""
        running = {p.index for p in self.workers if p.in_run}
        return tuple(index for index in self.members if index in running)

    @property
    def group_active(self) -> bool:
        """Members are in `run`, or still on their way out of it."""
        return self.stage in (Stage.FORMING, Stage.RUNNING, Stage.SWITCHING, Stage.QUIESCING)

    @property
    def num_usable(self) -> int:
        """Workers that the grant allows to train."""
        return min(self.granted, len(self.usable))

    @property
    def keeps_snapshots(self) -> bool:
        return self.spec.snapshot.enabled

    @property
    def min_workers(self) -> int:
        return self.spec.elasticity.min_workers

    @property
    def target_workers(self) -> int:
        return self.granted + self.spec.elasticity.standby


def essential(state: Attempt) -> Attempt:
    """What must be in the journal: without the pulse of a healthy group, which changes with every step and every poll,
    and which a restarted supervisor takes anew. The executor writes the journal when this differs, and every few
    seconds for the step alone."""
    pulse = {
        "step": 0,
        "fruitless": 0,
        "turned_at": 0.0,
        "progressed_at": 0.0,
        "step_times": (),
        "beats": {},
        "answered": {},
        "slow": {},
    }
    return state.model_copy(update={**pulse, "ledger": Ledger()})
