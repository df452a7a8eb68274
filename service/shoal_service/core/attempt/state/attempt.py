"""The parts of an attempt's state, and Attempt, which is made of them: frozen values with what follows from them alone.

`turn` replaces parts, the supervisor's journal writes them as JSON and reads them back. What only one stage knows is in
`stages`, workers are in `worker`. No value is ever mutated, and none decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from pydantic import TypeAdapter

from shoal_service.core.attempt.faults import FAULTS, Blame, action_of
from shoal_service.core.attempt.state.persistent import IntMap
from shoal_service.core.attempt.state.stages import CurrentStage, Stage
from shoal_service.core.attempt.state.timeouts import Timeouts
from shoal_service.core.attempt.state.worker import AvoidedNode, Worker, WorkerPool
from shoal_service.core.desired import Desired
from shoal_service.core.goodput import Ledger
from shoal_service.core.hardware_profile import HardwareProfile
from shoal_service.core.node_loss import NodeLossBound
from shoal_workers.contract.exception_causes import ErrorClass
from shoal_workers.contract.job import IncidentCause, StateSource
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ExitKind, Phase, WorkerExit
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome, kind_of
from shoal_workers.contract.snapshots import SnapshotPart, SnapshotSource
from shoal_workers.contract.spec import (
    ElasticitySpec,
    JobSpec,
    ParallelismSpec,
    TrainingSettings,
    settings_of,
    with_settings,
)
from shoal_workers.contract.validation import Standing
from shoal_workers.contract.worker_reports import SavedPart, SnapshotCost, SnapshotsStopped


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptConfig:
    """Fixed while the attempt lasts."""

    job_id: str
    attempt: int
    checkpoint_root: str
    timeouts: Timeouts = field(default_factory=Timeouts)
    profile: HardwareProfile | None = None
    """What the planner assumes of the nodes; None: its built-in profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Changed by directives only."""

    spec: JobSpec
    granted: int
    """World size that the scheduler allows."""
    desired: Desired = Desired.RUN
    avoided: tuple[AvoidedNode, ...] = ()
    server_stops: bool = False
    """The server is about to end the cluster, whatever is desired."""
    is_preempted: bool = False
    """Another job gets the workers, whatever is desired."""
    pinned: tuple[str, ...] = ()
    """Names of the checkpoints that retention does not delete."""

    @property
    def ends_saved(self) -> bool:
        """The attempt saves at its next step boundary, and ends: in a pause, because the server stops, or since
        another job gets the workers."""
        return self.server_stops or self.is_preempted or self.desired is Desired.PAUSE

    @property
    def min_workers(self) -> int:
        return self.spec.elasticity.min_workers

    @property
    def num_workers(self) -> int:
        """How many workers should exist, standby included."""
        return self.granted + self.spec.elasticity.standby

    @property
    def keeps_snapshots(self) -> bool:
        return self.spec.snapshot.enabled

    @property
    def settings(self) -> TrainingSettings:
        return settings_of(self.spec)

    def with_settings(self, settings: TrainingSettings) -> Target:
        return replace(self, spec=with_settings(self.spec, settings))

    def with_code(self, archive: str) -> Target:
        code = self.spec.code.model_copy(update={"archive": archive or None})
        return replace(self, spec=self.spec.model_copy(update={"code": code}))

    def with_elasticity(self, elasticity: ElasticitySpec) -> Target:
        return replace(self, spec=self.spec.model_copy(update={"elasticity": elasticity}))

    def with_parallelism(self, parallelism: Literal["auto"] | ParallelismSpec) -> Target:
        return replace(self, spec=self.spec.model_copy(update={"parallelism": parallelism}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    recoveries: int = 0
    fruitless: int = 0
    """Re-formations since the last step that no group had completed before; while steps are done again, since a group
    began at a later one than the group before."""
    setbacks: int = 0
    """Groups that began at an earlier step than the one before, since the last step that none had completed before: so
    a job that only goes back and forth ends as well."""
    start_step: int = 0
    """The step at which the newest group that formed began."""
    failed_starts: int = 0
    """Workers that died while starting: since the last one that became warm, or since the attempt began to wait."""
    rollbacks: int = 0
    """In a row, because of steps that were not finite: since a newer checkpoint than the last of them."""
    last_saves: int = 0
    """Failed tries to save the state after the last step."""
    form_not_before: float = 0.0
    """The next group forms no earlier."""
    grow_not_before: float = 0.0
    """The group grows no earlier: a save failed in a switch, or a worker could not be started."""

    def formed(self, start_step: int, furthest_step: int) -> Budgets:
        """A group has formed and restored the state of this step."""
        return replace(
            self,
            fruitless=0 if self.start_step < start_step < furthest_step else self.fruitless,
            setbacks=self.setbacks + (start_step < self.start_step),
            start_step=start_step,
        )

    def advanced(self) -> Budgets:
        """A step is done that no group had completed before."""
        return replace(self, fruitless=0, setbacks=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    newest: str | None = None
    """The newest committed one."""
    origin: str | None = None
    """The one of another job that the job goes on from while it has none of its own."""
    damaged: tuple[str, ...] = ()
    parts: dict[str, IntMap[SavedPart]] = field(default_factory=dict)
    """By name, then rank: parts that wait for the others, then for their commit."""
    committing: tuple[str, ...] = ()
    """Their commit is in flight."""
    failed: tuple[str, ...] = ()
    """Checkpoints of this attempt that will never be committed."""
    clean_step: int | None = None
    """Completed steps of the newest state that every rank was found to hold alike; None: no group was formed yet."""
    verified_step: int | None = None
    """The same, if it follows from a comparison and not from how the group started."""
    unverified: tuple[str, ...] = ()
    """Committed ones of later steps."""
    distrusted: tuple[int, int] | None = None
    """(generation, step): checkpoints of this generation or an earlier one, and of later steps, are not read."""
    must_search: bool = False
    """The newest one is not trusted any more: the storage is asked for an older one before the next group forms."""

    def is_distrusted(self, name: str) -> bool:
        parsed = CheckpointName.parse(name)
        if parsed is None or self.distrusted is None:
            return False
        generation, step = self.distrusted
        return parsed.generation <= generation and parsed.step > step

    @property
    def trusts_seed_only(self) -> bool:
        """The state was found wrong before the first comparison that was clean."""
        return self.distrusted is not None and self.distrusted[1] == 0

    @property
    def durable_step(self) -> int:
        """Step of the checkpoint that would be restored; 0: there is none."""
        newest = CheckpointName.parse(self.newest or self.origin or "")
        return newest.step if newest else 0


class UpdatePhase(StrEnum):
    WARMING = "warming"
    """Workers with the new code start beside those that train."""
    TRIAL = "trial"
    """The new code trains; the workers with the code before are kept, and wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeUpdate:
    version: str
    """The new one."""
    since: float
    phase: UpdatePhase = UpdatePhase.WARMING
    comparing: bool = False
    """The answer to CompareModels is waited for."""
    is_same_model: bool = False
    """A worker with the new code has built the model: its parameters are those of the model that trains."""
    before: str = ""
    """TRIAL: the version before."""
    trial_since: float = 0.0
    generation: int = 0
    """TRIAL: the first generation with the new code."""
    step: int = 0
    """TRIAL: completed steps when it began."""
    standing: Standing | None = None
    """TRIAL: what the validations had shown by then."""
    paused_at: float = 0.0
    """TRIAL: when the last step of the code before was reported."""
    pause_s: float | None = None
    """TRIAL: from then until the group with the new code had formed."""
    median_before_s: float | None = None
    """TRIAL: median step with the code before; None: too few steps were measured."""
    step_times: tuple[float, ...] = ()
    """TRIAL: seconds of the steps with the new code, without the first one of each generation."""
    fault: str = ""
    """TRIAL: why the code before takes over at the next step boundary."""
    keeps_steps: bool = True
    """The steps of the new code are kept; counts with a `fault` only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    current: str = ""
    """Groups form of workers with this version."""
    wanted: str | None = None
    """The version that the last directive wants; None: it has not changed since the attempt began."""
    refused: str = ""
    """A version that was refused or rolled back; it is not tried again until another one is wanted."""
    update: CodeUpdate | None = None

    @property
    def warming(self) -> CodeUpdate | None:
        return self.update if self.update is not None and self.update.phase is UpdatePhase.WARMING else None

    @property
    def trial(self) -> CodeUpdate | None:
        return self.update if self.update is not None and self.update.phase is UpdatePhase.TRIAL else None


def short(version: str) -> str:
    """The version as people read it."""
    return version[:12] or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    generation: int = 0
    """0: no group was formed yet."""
    workers: tuple[int, ...] = ()
    """Worker indexes in rank order."""
    nodes: tuple[str, ...] = ()
    """Id of the node on which it is, by rank."""
    machines: tuple[str, ...] = ()
    """Workers with the same value share one memory; by rank."""
    layout: Layout | None = None
    levels: tuple[Layout, ...] = ()
    """The planned layout and its rivals at other shard levels; the group's own is one of them. See levels.py."""
    planned_by: Literal["auto"] | ParallelismSpec = "auto"
    """`parallelism` of the spec that the layout was planned for."""
    settings: TrainingSettings | None = None
    """Settings that the group trains with."""
    changes: tuple[str, ...] = ()
    """What differs in these settings from those of the group before."""
    source: SnapshotSource | None = None
    """The snapshot in memory that the group started from; None: from storage, or from the seed."""
    restored: str | None = None
    """Directory name of the newest checkpoint when the group was formed: it restored it unless it had `source`."""
    is_formed: bool = False
    """Rank 0 has reported that all ranks have met and restored the state."""
    has_trained: bool = False
    """The same workers have completed a step in this layout before."""
    start_step: int = 0
    exits: IntMap[WorkerExit] = field(default_factory=IntMap)
    """How the workers that have left `run` left it, by worker index; the first one first."""

    @property
    def ranks(self) -> Mapping[int, int]:
        """Rank by worker index."""
        return _ranks_of(self.workers)

    def rank_of(self, index: int) -> int | None:
        return self.ranks.get(index)


_newest: list[tuple[tuple[int, ...], dict[int, int]]] = [((), {})]
"""A memo of `_ranks_of` for the group that was asked about last. To search the tuple for each event would take long."""


def _ranks_of(workers: tuple[int, ...]) -> dict[int, int]:
    known, ranks = _newest[0]
    if known is not workers:
        ranks = {index: rank for rank, index in enumerate(workers)}
        _newest[0] = (workers, ranks)
    return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBefore:
    """The group that was lost."""

    generation: int
    num_workers: int
    layout: str = ""
    step: int = 0
    """Its newest completed step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAfter:
    """The next group: what was decided when it began to form, and what it reported once it was formed."""

    forming_at: float
    num_workers: int
    layout: str
    num_spares: int
    """Its workers that were not in the group before."""
    state_source: StateSource
    form_s: float | None = None
    restore_s: float | None = None
    bytes_moved: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """The open incident; times are wall-clock."""

    id: int
    cause: IncidentCause
    witness: str
    message: str = ""
    ranks: tuple[int, ...] = ()
    worker_ids: tuple[str, ...] = ()
    node_id: str = ""
    before: GroupBefore
    at: float
    """When the supervisor took notice."""
    last_sign_at: float | None = None
    """Newest sign before `at`: the death of the worker as its node saw it (20-40 ms late), the report of a survivor
    whose collective failed, or else the last progress of the lost worker. The difference is the time to detect it. If
    only the progress is known (a dead node, a hang) the difference is an upper bound."""
    quiesced_at: float | None = None
    """When every worker had left `run`."""
    after: GroupAfter | None = None
    formed_at: float | None = None
    """When `after` was formed; None again if it was lost before its first step."""
    steps_lost: int | None = None
    node_loss: NodeLossBound | None = None
    """A node was lost: the bound that was in force."""

    @property
    def is_suspicion(self) -> bool:
        """No worker is known to be at fault; a later witness may still name one."""
        return not self.ranks and FAULTS[self.cause].blames is Blame.UNKNOWN

    @property
    def action(self) -> str:
        """What was done about it so far."""
        to_workers, num_spares = (self.after.num_workers, self.after.num_spares) if self.after else (None, 0)
        return action_of(self.cause, self.before.num_workers, to_workers, num_spares=num_spares)

    @property
    def detect_s(self) -> float | None:
        return seconds_between(self.last_sign_at, self.at)

    @property
    def quiesce_s(self) -> float | None:
        return seconds_between(self.at, self.quiesced_at)

    @property
    def plan_s(self) -> float | None:
        return seconds_between(self.quiesced_at, self.after.forming_at if self.after else None)

    def first_step_s(self, closed_at: float | None) -> float | None:
        return seconds_between(self.formed_at, closed_at)

    def recovery_s(self, closed_at: float | None) -> float | None:
        """`closed_at`: end of the first completed step of the next generation."""
        return seconds_between(self.at, closed_at)


def seconds_between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """A worker was lost on this node."""

    node_id: str
    at: float
    worker_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The last hang that was seen."""

    step: int
    """Completed steps at the time."""
    index: int
    """The worker that stood still first."""
    is_repeated: bool = False
    """The group has hung at this step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedFault:
    """The last exception for which workers were replaced."""

    step: int
    """Completed steps at the time."""
    kind: ExitKind
    error_class: ErrorClass
    times: int = 1
    """Times in a row at this step."""

    def is_like(self, other: RaisedFault) -> bool:
        return (self.step, self.kind, self.error_class) == (other.step, other.kind, other.error_class)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker's process died, and its exit status is not known yet."""

    worker_id: str
    rank: int
    generation: int
    step: int
    """Completed steps at the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The last crash of a worker: it was killed by a signal that its own code caused."""

    words: str
    """The signal and the place; equal words are the same place."""
    step: int
    """Completed steps at the first crash there."""
    generation: int
    """Generation of the last crash there."""
    times: int = 1
    """Groups in a row that crashed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedIncident:
    """It may still change: a silent node is declared dead, or the exit status of a worker becomes known."""

    incident: Incident
    closed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    hang: Hang | None = None
    raised: RaisedFault | None = None
    deaths: tuple[Death, ...] = ()
    explained: tuple[str, ...] = ()
    """Ids of the workers whose exit status was reported last. Several witnesses, and a supervisor after a restart, may
    ask for the same one."""
    crash: Crash | None = None
    losses: tuple[NodeLoss, ...] = ()
    """Recent ones."""
    suspected: dict[str, float] = field(default_factory=dict)
    """When a node was last put on probation, by node id."""
    silences: dict[str, ClosedIncident] = field(default_factory=dict)
    """The closed incidents of nodes that are silent still, by node id."""
    last_closed: ClosedIncident | None = None
    no_straggler_before: int = 0
    """Step before which no other straggler is named."""
    is_memory_scarce: bool = False
    """A worker was killed for lack of memory: new ones touch none before they need it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTime:
    layout: Layout
    step_s: float | None
    """Median seconds of a step; None: the group was lost before it was known, so this level is not tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    has_formed: bool = False
    """A group has formed at least once."""
    total_steps: int | None = None
    """Steps of the whole training run; None until a group has formed."""
    skip_steps: tuple[int, ...] = ()
    """Steps that are left out, since a rollback was made because of them."""
    standing: Standing | None = None
    """What the validations of the job have shown; None: there was none."""
    proofs: tuple[LayoutProof, ...] = ()
    """The newest proof of each kind of layout: proven, refused, or not proven."""
    level_times: tuple[LevelTime, ...] = ()
    """What steps of layouts take that differ in the shard level only."""
    trying: Layout | None = None
    """The one that is being measured, or is about to be."""
    num_incidents: int = 0
    steps_lost: int = 0

    @property
    def refused_layouts(self) -> tuple[Layout, ...]:
        """No layout that uses all that one of them uses is planned."""
        return tuple(proof.layout for proof in self.proofs if proof.outcome is ProofOutcome.REFUSED)

    def with_proof(self, proof: LayoutProof) -> History:
        kind = kind_of(proof.layout)
        others = tuple(one for one in self.proofs if kind_of(one.layout) != kind)
        return replace(self, proofs=(*others, proof))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressStamp:
    """The newest change of a worker's progress counter in this generation."""

    counter: int
    step: int
    phase: Phase
    at: float
    """By the worker's own clock."""
    seen_at: float
    """By our clock: when the poll was answered, less how long the counter had stood still by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    step: int = 0
    """Newest completed step of the current generation's line."""
    furthest_step: int = 0
    """Newest step that any generation of the attempt has completed: a step done again is none."""
    step_times: tuple[float, ...] = ()
    """Seconds of the last steps, newest last."""
    slowest_steps: tuple[float, ...] = ()
    """Seconds of the slowest step of each block of steps, newest last; without the first steps of generations."""
    num_measured: int = 0
    """Steps in these blocks, since the attempt began."""
    advanced_at: float = 0.0
    """When the group formed, or last completed a step."""
    stamps: dict[int, ProgressStamp] = field(default_factory=dict)
    """Stamps of the workers of this generation, by worker index."""
    starting: dict[int, ProgressStamp] = field(default_factory=dict)
    """Stamps of workers that are not warm yet and report progress of their preparation, by worker index."""
    answered_at: dict[int, float] = field(default_factory=dict)
    """When a worker last answered a poll, by worker index."""
    slow_steps: dict[int, int] = field(default_factory=dict)
    """For how many steps in a row a worker has been slower than the others, by worker index."""
    snapshots: SnapshotCost | None = None
    """The newest report of this generation."""
    stopped: dict[int, SnapshotsStopped] = field(default_factory=dict)
    """The reports of ranks that have no memory for snapshots in this generation, by rank."""
    last_event_at: float = 0.0
    """When the machine last handled an event."""
    is_late: bool = False
    """The last event came more than timeouts.absence_s after the event before it."""


@dataclass(frozen=True, slots=True)
class Discarded:
    """Generations, both included, that trained with code that was rolled back."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotIndex:
    requested: IntMap[float] = field(default_factory=IntMap)
    """Since when an answer to RequestSnapshotParts is waited for, by worker index."""
    reported: IntMap[tuple[SnapshotPart, ...]] = field(default_factory=IntMap)
    """The answers of workers outside the group since the group ended, by worker index."""
    unreadable: tuple[tuple[int, int], ...] = ()
    """(generation, step) of snapshots of which a part could not be read."""
    doubtful: tuple[tuple[int, int], ...] = ()
    """The same, where a lost worker may have been the reason. A second failure makes them unreadable."""
    oldest_generation: int = 0
    """Snapshots of earlier generations may hold a wrong state and are not used."""
    discarded: Discarded | None = None
    """Snapshots of these generations are not used."""
    unreported_nodes: tuple[str, ...] = ()
    """Ids of nodes on which workers of the last group died before any worker reported the snapshots there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    config: AttemptConfig
    target: Target
    current: CurrentStage
    """The stage, with what only that stage knows."""
    life: int = 1
    """Life of the supervisor; see `contract.ids`."""
    group: Group = field(default_factory=Group)
    pool: WorkerPool = field(default_factory=WorkerPool)
    snapshots: SnapshotIndex = field(default_factory=SnapshotIndex)
    checkpoints: CheckpointIndex = field(default_factory=CheckpointIndex)
    budgets: Budgets = field(default_factory=Budgets)
    health: Health = field(default_factory=Health)
    history: History = field(default_factory=History)
    incident: Incident | None = None
    """The open one."""
    progress: GroupProgress = field(default_factory=GroupProgress)
    code: Code = field(default_factory=Code)
    ledger: Ledger = field(default_factory=Ledger)
    """Where the worker-seconds went; kept by `booking`, never decided upon."""

    @property
    def stage(self) -> Stage:
        return self.current.stage

    @property
    def group_active(self) -> bool:
        """Workers of the group are in `run`, or still on their way out of it."""
        return self.stage in (Stage.FORMING, Stage.RUNNING, Stage.SWITCHING, Stage.QUIESCING)

    @property
    def in_run(self) -> tuple[int, ...]:
        """Indexes of the group's workers that have not left this generation, by rank."""
        running = {worker.index for worker in self.pool.workers if worker.in_run}
        return tuple(index for index in self.group.workers if index in running)

    @property
    def all_left(self) -> bool:
        """No worker of the group is in `run`."""
        ranks = self.group.ranks
        # The newest first: those that leave in the order in which they started are not passed over again and again.
        return not any(worker.in_run and worker.index in ranks for worker in reversed(self.pool.workers))

    @property
    def num_usable(self) -> int:
        """Workers that the grant allows to train."""
        return min(self.target.granted, len(self.usable))

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers with the current version of the code: they may train. The others belong to an update of it."""
        return tuple(worker for worker in self.pool.workers if worker.code == self.code.current)

    @property
    def usable(self) -> tuple[Worker, ...]:
        return tuple(worker for worker in self.workers if worker.is_usable)

    @property
    def is_finishing(self) -> bool:
        """The last step is done."""
        return self.history.total_steps is not None and self.progress.step >= self.history.total_steps


ATTEMPT_JSON = TypeAdapter(Attempt)


def essential(state: Attempt) -> Attempt:
    """What must be in the journal. Left out are the ledger and the progress of a healthy group: it changes with every
    step and every poll, and a restarted supervisor learns it anew. The executor writes the journal when this differs,
    and every few seconds for the step alone. Parts that an event did not touch are the same objects, so comparing two
    states costs next to nothing."""
    return replace(state, progress=_NO_PROGRESS, ledger=_NO_LEDGER)


_NO_PROGRESS = GroupProgress()
_NO_LEDGER = Ledger()
