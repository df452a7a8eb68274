"""State of one attempt of a job: which processes exist, which of them form the group, and what it waits for.

A frozen value that round-trips through JSON: it is also the supervisor's journal.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shoal_service.core.attempt.incident import Incident
from shoal_service.core.goodput import Ledger
from shoal_workers.contract.base import Frozen
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.memory import Holding, MemorySource
from shoal_workers.contract.messages import Phase, SavedPart, ShardExit, ShardInfo
from shoal_workers.contract.spec import JobSpec


class Stage(StrEnum):
    """Where the attempt stands. The diagram in docs/architecture.md is generated from TRANSITIONS."""

    OPENING = "opening"
    """Reading which checkpoint is the newest."""
    STARTING = "starting"
    """Processes start; no group was formed yet."""
    WAITING = "waiting"
    """Fewer than elasticity.min_workers processes are warm; has a deadline."""
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


class Wanted(StrEnum):
    """What the user wants of the attempt."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


class AvoidedNode(Frozen):
    """A node that must not be used any longer."""

    node_id: str
    reason: str
    """For people and for the incident: "drain requested", "on probation: ..."."""
    deadline: float | None = None
    """Wall-clock time at which it goes away; None: there is time."""


class Hang(Frozen):
    """The last hang that was seen."""

    step: int
    """Completed steps at the time."""
    index: int
    """The process that it points at."""
    is_repeated: bool = False
    """The group has hung at this step before."""


class Process(Frozen):
    """One shard process. `index` counts the processes that the attempt ever started."""

    index: int
    shard_id: str
    started_at: float
    info: ShardInfo | None = None
    """None while it starts; set once it is warm."""
    warm_at: float | None = None
    in_run: bool = False
    """A `run` call is in flight."""
    unreachable_since: float | None = None
    """Calls to it fail, and nothing was heard of it since."""
    leave: AvoidedNode | None = None
    """The process (not its whole node) is about to be taken away."""

    @property
    def warm(self) -> bool:
        return self.info is not None


class LastBeat(Frozen):
    """The newest change of a member's beat in this generation."""

    beat: int
    step: int
    phase: Phase
    at: float
    """By the process's own clock."""
    seen_at: float
    """When it was heard of."""


class Timeouts(Frozen):
    """Seconds. Each waiting stage gives up after one of these, so nothing waits without a deadline."""

    quiesce_s: float = 3.0
    """A survivor that has heard that it shall leave `run`, and has not by then, is killed and replaced. So long are
    others waited for, too, that were asked what lies in their memory."""
    unresponsive_s: float = 0.5
    """A survivor that has not even heard it by then is killed and replaced: stopped, or cut off."""
    unreachable_s: float = 3.0
    """A process that does not answer for so long is given up, although nothing else speaks against it."""
    absence_s: float = 1.0
    """Without any event, not even a tick, for so long, the supervisor itself was away: the silence of others meanwhile
    says nothing about them."""
    user_error_grace_s: float = 1.0
    """After the first rank's user error the others may raise it too, to be grouped, before they are interrupted."""
    form_s: float = 120.0
    """From `run` to the first news of rank 0; building and restoring included."""
    start_s: float = 600.0
    """Without any warm process for so long, the attempt gives up."""
    gather_s: float = 15.0
    """The first group waits so long, since the last process became warm, for those that are still starting."""
    settle_s: float = 3.0
    """A group that could form smaller, or grow, waits so long for processes that are still starting."""
    commit_s: float = 120.0
    """For a commit marker, and for the storage to say what it holds."""
    switch_s: float = 900.0
    """From the request to stop until the step boundary; a step, a validation and a save must fit."""
    leave_margin_s: float = 5.0
    """So long before a node goes away, and two steps, the group switches away from it, ready or not."""


class Attempt(Frozen):
    """Everything that `step` decides from."""

    job_id: str
    attempt: int
    spec: JobSpec
    checkpoint_root: str
    granted: int
    """World size that the scheduler allows."""
    wanted: Wanted = Wanted.RUN
    timeouts: Timeouts = Timeouts()

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
    heard: tuple[int, ...] = ()
    """In QUIESCING: process indexes that have heard the interrupt."""
    switch_durable: bool = True
    """In SWITCHING: a durable checkpoint of the boundary was asked for."""
    grow_not_before: float = 0.0
    """Back-off after a save failed in a switch."""
    generation: int = 0
    processes: tuple[Process, ...] = ()
    members: tuple[int, ...] = ()
    """Process indexes in rank order of the current (or last) generation."""
    exits: dict[int, ShardExit] = Field(default_factory=dict)
    """By process index: members of this generation that left `run`."""
    next_index: int = 0
    layout: Layout | None = None
    """Of the current (or last) generation."""

    asked: dict[int, float] = Field(default_factory=dict)
    """By process index: since when an answer to AskHoldings is waited for."""
    told: dict[int, tuple[Holding, ...]] = Field(default_factory=dict)
    """By process index: what lies in memory, as others than members told since the group ended."""
    memory: MemorySource | None = None
    """What the current (or last) generation started from, if from memory."""
    unreadable: tuple[tuple[int, int], ...] = ()
    """(generation, step) of snapshots of which a part could not be read."""
    doubted: tuple[tuple[int, int], ...] = ()
    """The same, where it may have been the fault of a process that is gone by now."""
    oldest_snapshot: int = 0
    """Snapshots of earlier generations are not to be trusted."""

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

    step: int = 0
    """Newest completed step of the current generation's line."""
    start_step: int = 0
    total_steps: int | None = None
    step_times: tuple[float, ...] = ()
    """Seconds of the last steps, newest last."""
    beats: dict[int, LastBeat] = Field(default_factory=dict)
    """By process index: members of this generation."""
    progressed_at: float = 0.0
    """When the group formed, or last completed a step."""
    hang: Hang | None = None
    avoided: tuple[AvoidedNode, ...] = ()
    draining_since: float | None = None
    """In RUNNING: since when a member has to go."""
    formed_once: bool = False
    incident: Incident | None = None
    num_incidents: int = 0
    steps_lost: int = 0
    recoveries: int = 0
    fruitless: int = 0
    """Re-formations since the last completed step."""
    failed_starts: int = 0
    """Processes that died while starting since the last one that came up."""
    ledger: Ledger = Ledger()
    """Where the worker-seconds went; kept by `booking`, never decided upon."""

    def process(self, index: int) -> Process | None:
        return next((p for p in self.processes if p.index == index), None)

    def rank_of(self, index: int) -> int | None:
        return self.members.index(index) if index in self.members else None

    @property
    def warm(self) -> tuple[Process, ...]:
        return tuple(p for p in self.processes if p.warm)

    @property
    def usable(self) -> tuple[Process, ...]:
        """Those that could train: warm, and they answer."""
        return tuple(p for p in self.processes if p.warm and p.unreachable_since is None)

    @property
    def in_run(self) -> tuple[int, ...]:
        """Process indexes of members that have not left this generation, by rank."""
        running = {p.index for p in self.processes if p.in_run}
        return tuple(index for index in self.members if index in running)

    @property
    def group_active(self) -> bool:
        """Members are in `run`, or still on their way out of it."""
        return self.stage in (Stage.FORMING, Stage.RUNNING, Stage.SWITCHING, Stage.QUIESCING)

    @property
    def num_usable(self) -> int:
        """Processes that the grant allows to train."""
        return min(self.granted, len(self.usable))

    @property
    def keeps_snapshots(self) -> bool:
        return self.spec.snapshot.enabled

    @property
    def min_workers(self) -> int:
        return self.spec.elasticity.min_workers

    @property
    def target_processes(self) -> int:
        return self.granted + self.spec.elasticity.standby


def essential(state: Attempt) -> Attempt:
    """What must be in the journal: without the pulse of a healthy group, which changes with every step and every poll,
    and which a restarted supervisor takes anew. The executor writes the journal when this differs."""
    pulse = {"step": 0, "fruitless": 0, "turned_at": 0.0, "progressed_at": 0.0, "step_times": (), "beats": {}}
    return state.model_copy(update={**pulse, "ledger": Ledger()})
