"""State of one attempt of a job: which processes exist, which of them form the group, and what it waits for.

A frozen value that round-trips through JSON: it is also the supervisor's journal.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import SavedPart, ShardExit, ShardInfo
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
    """A member is lost: survivors are being woken; the group re-forms when every `run` has returned."""
    SWITCHING = "switching"
    """Asked to stop at the next step boundary, to grow, shrink, pause; or members are leaving after the last step."""
    COMMITTING = "committing"
    """Every member has left `run` as planned; the checkpoint of that step is being committed."""
    FALLING_BACK = "falling_back"
    """The checkpoint to restore was damaged; looking for the one before it."""
    ENDED = "ended"


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.OPENING: frozenset({Stage.STARTING, Stage.ENDED}),
    Stage.STARTING: frozenset({Stage.FORMING, Stage.ENDED}),
    Stage.WAITING: frozenset({Stage.FORMING, Stage.ENDED}),
    Stage.FORMING: frozenset({Stage.RUNNING, Stage.QUIESCING, Stage.COMMITTING, Stage.ENDED}),
    Stage.RUNNING: frozenset({Stage.SWITCHING, Stage.QUIESCING, Stage.COMMITTING, Stage.ENDED}),
    Stage.SWITCHING: frozenset({Stage.QUIESCING, Stage.COMMITTING, Stage.ENDED}),
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

    @property
    def warm(self) -> bool:
        return self.info is not None


class Incident(Frozen):
    """The open incident; times are wall-clock."""

    id: int
    cause: IncidentCause
    witness: str
    ranks: tuple[int, ...] = ()
    shard_ids: tuple[str, ...] = ()
    node_id: str = ""
    generation: int
    at: float
    from_workers: int
    message: str = ""
    quiesced_at: float | None = None
    forming_at: float | None = None
    form_s: float | None = None
    restore_s: float | None = None
    formed_at: float | None = None
    to_workers: int | None = None
    step_before: int = 0
    steps_lost: int | None = None
    state_source: str | None = None


class Timeouts(Frozen):
    """Seconds. Each waiting stage gives up after one of these, so nothing waits without a deadline."""

    quiesce_s: float = 10.0
    """A survivor that has not left `run` by then is killed and replaced."""
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
    interrupt_at: float | None = None
    """In QUIESCING: members are left alone until then."""
    grow_not_before: float = 0.0
    """Back-off after a save failed in a switch."""
    generation: int = 0
    processes: tuple[Process, ...] = ()
    members: tuple[int, ...] = ()
    """Process indexes in rank order of the current (or last) generation."""
    exits: dict[int, ShardExit] = Field(default_factory=dict)
    """By process index: members of this generation that left `run`."""
    next_index: int = 0

    newest: str | None = None
    """Directory name of the newest committed checkpoint."""
    restored: str | None = None
    """Directory name of the one that the current (or last) generation started from; `newest` may be newer by now."""
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
    formed_once: bool = False
    incident: Incident | None = None
    num_incidents: int = 0
    steps_lost: int = 0
    recoveries: int = 0
    fruitless: int = 0
    """Re-formations since the last completed step."""
    failed_starts: int = 0
    """Processes that died while starting since the last one that came up."""

    def process(self, index: int) -> Process | None:
        return next((p for p in self.processes if p.index == index), None)

    def rank_of(self, index: int) -> int | None:
        return self.members.index(index) if index in self.members else None

    @property
    def warm(self) -> tuple[Process, ...]:
        return tuple(p for p in self.processes if p.warm)

    @property
    def group_active(self) -> bool:
        """Members are in `run`, or still on their way out of it."""
        return self.stage in (Stage.FORMING, Stage.RUNNING, Stage.SWITCHING, Stage.QUIESCING)

    @property
    def num_usable(self) -> int:
        """Warm processes that the grant allows to train."""
        return min(self.granted, len(self.warm))

    @property
    def min_workers(self) -> int:
        return self.spec.elasticity.min_workers

    @property
    def target_processes(self) -> int:
        return self.granted + self.spec.elasticity.standby
