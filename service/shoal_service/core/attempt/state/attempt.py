"""The parts of an attempt's state, and Attempt, which is made of them: frozen values with what follows from them alone.

`turn` replaces parts, the supervisor's journal writes them as JSON and reads them back. What only one stage knows is in
`stages`, workers are in `worker`. No value is ever mutated, and none decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from pydantic import TypeAdapter

from shoal_service.core.attempt.faults import FAULTS, Blame, describe_action
from shoal_service.core.attempt.state.parts import AvoidedNode, CurrentStage, Stage, Worker, WorkerPool
from shoal_service.core.attempt.state.timeouts import Timeouts
from shoal_service.core.desired import Desired
from shoal_service.core.goodput import Ledger
from shoal_service.core.hardware_profile import HardwareProfile
from shoal_service.core.node_loss import NodeLossBound
from shoal_service.core.persistent import IntMap
from shoal_workers.contract import (
    CheckpointName,
    ErrorClass,
    ExitKind,
    IncidentCause,
    JobSpec,
    Layout,
    LayoutProof,
    ParallelismSpec,
    Phase,
    ProofOutcome,
    SavedPart,
    SnapshotCost,
    SnapshotPart,
    SnapshotSource,
    SnapshotsStopped,
    Standing,
    StateSource,
    TrainingSettings,
    WorkerExit,
    settings_of,
    with_settings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptConfig:
    """What is fixed while the attempt lasts."""

    job_id: str
    attempt: int
    checkpoint_root: str
    timeouts: Timeouts = field(default_factory=Timeouts)
    profile: HardwareProfile | None = None
    """Hardware that the planner assumes of the nodes; None means its built-in profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the control plane wants of the attempt. Only directives change it."""

    spec: JobSpec
    granted: int
    """Most workers that may train at a time: the world size that the scheduler has granted."""
    desired: Desired = Desired.RUN
    avoided: tuple[AvoidedNode, ...] = ()
    server_stops: bool = False
    """The server is about to end the cluster, so the attempt saves and ends, whatever `desired` is."""
    is_preempted: bool = False
    """Another job gets the workers, or the job moves, so the attempt saves and ends, whatever `desired` is."""
    moves_to: str = ""
    """The cluster in which the job goes on; empty if it does not move."""
    pinned: tuple[str, ...] = ()
    """Names of the checkpoints that retention does not delete."""

    @property
    def saves_and_ends(self) -> bool:
        """True if the attempt saves at its next step boundary and ends: on a pause, if the server stops, or if another
        job gets the workers."""
        return self.server_stops or self.is_preempted or self.desired is Desired.PAUSE

    @property
    def suspected(self) -> frozenset[str]:
        """Ids of the nodes that are avoided only because they may be at fault."""
        return frozenset(node.node_id for node in self.avoided if node.is_suspected)

    @property
    def min_workers(self) -> int:
        return self.spec.elasticity.min_workers

    @property
    def num_workers(self) -> int:
        """How many workers should exist, standby included."""
        return self.granted + self.spec.elasticity.standby

    @property
    def is_program(self) -> bool:
        """True if the job trains by a script or a loop of its own, of whose model nothing is known."""
        return self.spec.program is not None

    @property
    def is_script(self) -> bool:
        """True if the job trains by a script of its own; see scripts.py."""
        return self.spec.script is not None

    @property
    def grace_s(self) -> float:
        """Seconds that the processes of a script have between SIGTERM and SIGKILL; 0 for a task."""
        return self.spec.script.grace_s if self.spec.script is not None else 0.0

    @property
    def keeps_snapshots(self) -> bool:
        return self.spec.snapshot.enabled and not self.is_script

    @property
    def settings(self) -> TrainingSettings:
        return settings_of(self.spec)

    def describe_layout(self, layout: Layout | None) -> str:
        """Describe the layout for people; empty if there is none, or a script splits its own work."""
        return "" if layout is None or self.is_script else layout.describe()

    def with_settings(self, settings: TrainingSettings) -> Target:
        return replace(self, spec=with_settings(self.spec, settings))

    def with_code(self, archive: str) -> Target:
        code = self.spec.code.model_copy(update={"archive": archive or None})
        return replace(self, spec=self.spec.model_copy(update={"code": code}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    recoveries: int = 0
    """Recoveries that retry.max_recoveries limits, within a day from `recoveries_since`."""
    recoveries_since: float = 0.0
    fruitless: int = 0
    """Groups formed again in a row without progress. Progress is a step that no group had completed before; or, while
    steps are done again, a group that begins at a later step than the group before it."""
    setbacks: int = 0
    """Groups that began at an earlier step than the group before, counted since the last step that no group had
    completed before. It is limited too, so a job that only goes back and forth ends."""
    start_step: int = 0
    """The step at which the newest group that formed began."""
    failed_starts: int = 0
    """Workers that died or could not load the task while they started. Set to 0 when a worker becomes warm, and when
    the attempt begins to wait."""
    rollbacks: int = 0
    """Rollbacks in a row because a step was not finite. Set to 0 when a checkpoint of the newest skipped step, or of a
    later one, is committed."""
    last_saves: int = 0
    """How often saving the state after the last step has failed."""
    form_not_before: float = 0.0
    """Wall-clock time before which the next group does not form: the end of the back-off."""
    grow_not_before: float = 0.0
    """Wall-clock time before which the group does not grow, because a save failed in a switch or a worker could not be
    started."""

    def recovered(self, now: float) -> Budgets:
        """The budgets with one more recovery. Those of the days before are forgiven."""
        if now - self.recoveries_since < 24 * 3600:
            return replace(self, recoveries=self.recoveries + 1)
        return replace(self, recoveries=1, recoveries_since=now)

    def formed(self, start_step: int, furthest_step: int) -> Budgets:
        """The budgets once a group has formed and restored the state of `start_step`."""
        return replace(
            self,
            fruitless=0 if self.start_step < start_step < furthest_step else self.fruitless,
            setbacks=self.setbacks + (start_step < self.start_step),
            start_step=start_step,
        )

    def advanced(self) -> Budgets:
        """The budgets once a step is completed that no group had completed before."""
        return replace(self, fruitless=0, setbacks=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    newest: str | None = None
    """Name of the newest committed checkpoint that can be restored; None if there is none, or it is not known yet."""
    expected: str | None = None
    """Name of the newest checkpoint that was committed, as far as it is known. A storage that has neither it nor a
    newer one is not the job's. None if none was committed."""
    origin: str | None = None
    """Name of another job's checkpoint, from which this job goes on while it has none of its own."""
    damaged: tuple[str, ...] = ()
    parts: dict[str, IntMap[SavedPart]] = field(default_factory=dict)
    """The parts that ranks have saved, by checkpoint name, then rank. They are kept until the commit has succeeded or
    failed."""
    committing: tuple[str, ...] = ()
    """Names of the checkpoints whose commit has begun and is not answered yet."""
    failed: tuple[str, ...] = ()
    """Names of the checkpoints of this attempt that will never be committed."""
    clean_step: int | None = None
    """Step of the newest state that is known to be equal on all ranks: a comparison of the replicas found it so, or a
    group began there from a checkpoint or the seed. None if no group was formed yet."""
    verified_step: int | None = None
    """Step of the newest state that a comparison of the replicas has found equal; None if there was no comparison."""
    unverified: tuple[str, ...] = ()
    """Names of the committed checkpoints of steps after `clean_step`; the newest ones only."""
    distrusted: tuple[int, int] | None = None
    """(generation, step): checkpoints of this generation and earlier ones are not read if their step is later than
    this. None if all are trusted."""
    unreadable_since: float | None = None
    """Wall-clock time at which a rank first could not read the storage for the checkpoint that the supervisor sees
    there; None once a group has restored its state."""
    must_search: bool = False
    """The newest checkpoint is no longer trusted, so the storage is asked for an older one before the next group
    forms."""

    def is_distrusted(self, name: str) -> bool:
        parsed = CheckpointName.parse(name)
        if parsed is None or self.distrusted is None:
            return False
        generation, step = self.distrusted
        return parsed.generation <= generation and parsed.step > step

    @property
    def trusts_seed_only(self) -> bool:
        """True if only step 0 is trusted: the state was found wrong before any comparison had found it equal."""
        return self.distrusted is not None and self.distrusted[1] == 0

    @property
    def durable_step(self) -> int:
        """Step of the durable checkpoint that would be restored now; 0 if there is none."""
        newest = CheckpointName.parse(self.newest or self.origin or "")
        return newest.step if newest else 0

    def is_durable(self, step: int) -> bool:
        return self.newest is not None and self.durable_step >= step


class UpdatePhase(StrEnum):
    WARMING = "warming"
    """Workers with the new code start beside those that train."""
    TRIAL = "trial"
    """The new code trains; the workers with the code before are kept, and wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeUpdate:
    version: str
    """The new version."""
    since: float
    phase: UpdatePhase = UpdatePhase.WARMING
    comparing: bool = False
    """CompareModels was sent, and its answer is waited for."""
    is_same_model: bool = False
    """A worker with the new code has built the model: its parameters are those of the model that trains."""
    before: str = ""
    """TRIAL: the version before."""
    trial_since: float = 0.0
    generation: int = 0
    """TRIAL: the first generation with the new code."""
    step: int = 0
    """TRIAL: completed steps when the trial began."""
    standing: Standing | None = None
    """TRIAL: what the validations had shown when the trial began."""
    paused_at: float = 0.0
    """TRIAL: when the last step of the code before was reported."""
    pause_s: float | None = None
    """TRIAL: seconds from `paused_at` until the group with the new code had formed."""
    median_before_s: float | None = None
    """TRIAL: median step with the code before; None if too few steps were measured."""
    step_times: tuple[float, ...] = ()
    """TRIAL: seconds of the steps with the new code, without the first one of each generation."""
    fault: str = ""
    """TRIAL: why the code before takes over at the next step boundary; empty if it does not."""
    keeps_steps: bool = True
    """True if the steps that the new code has trained are kept when it is rolled back. It has a meaning only with a
    `fault`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    current: str = ""
    """Version of the code with which groups train: only workers that have loaded it are given ranks."""
    wanted: str | None = None
    """Version that the last directive asks for; None if it has not changed since the attempt began."""
    refused: str = ""
    """A version that was refused or rolled back. It is not tried again until another version is wanted."""
    update: CodeUpdate | None = None

    @property
    def warming(self) -> CodeUpdate | None:
        return self.update if self.update is not None and self.update.phase is UpdatePhase.WARMING else None

    @property
    def trial(self) -> CodeUpdate | None:
        return self.update if self.update is not None and self.update.phase is UpdatePhase.TRIAL else None


def short(version: str) -> str:
    """The version as people read it: its first 12 characters."""
    return version[:12] or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    generation: int = 0
    """Number of the group, which every message about it carries; 0 if no group was formed yet."""
    workers: tuple[int, ...] = ()
    """Worker indexes in rank order."""
    nodes: tuple[str, ...] = ()
    """Node id of each worker, by rank."""
    machines: tuple[str, ...] = ()
    """Identity of each worker's machine, by rank. Workers with the same value share one memory."""
    layout: Layout | None = None
    levels: tuple[Layout, ...] = ()
    """The planned layout and its rivals at other shard levels; `layout` is one of them. See `switching`."""
    planned_by: Literal["auto"] | ParallelismSpec = "auto"
    """Value of the spec's `parallelism` for which the layout was planned."""
    settings: TrainingSettings | None = None
    """Training settings that the group was formed with; None if no group was formed yet."""
    changes: tuple[str, ...] = ()
    """One text for each training setting that differs from those of the group before, such as `stop.steps 120 ->
    200`."""
    source: SnapshotSource | None = None
    """Snapshot in memory from which the group restores its state; None if it reads a checkpoint, or begins from the
    seed."""
    restored: str | None = None
    """Name of the job's newest checkpoint when the group was formed, which the group restores unless it has a `source`;
    None if the job had none of its own."""
    is_formed: bool = False
    """Rank 0 has reported that all ranks have joined and restored the state."""
    has_trained: bool = False
    """The same workers have completed a step in this layout before, in an earlier generation."""
    start_step: int = 0
    is_start_known: bool = True
    """True if `start_step` is the step at which the group began. False if a script has not reported a step in this
    generation, and `start_step` is the newest step of the groups before."""
    exits: IntMap[WorkerExit] = field(default_factory=IntMap)
    """How each worker that has left `run` has left it, by worker index, in the order in which they left."""

    @property
    def ranks(self) -> Mapping[int, int]:
        """Rank by worker index."""
        return _ranks_of(self.workers)

    def rank_of(self, index: int) -> int | None:
        return self.ranks.get(index)


_newest: list[tuple[tuple[int, ...], dict[int, int]]] = [((), {})]
"""Memo of `_ranks_of` for the group that was asked about last. A search of the tuple for each event would take long."""


def _ranks_of(workers: tuple[int, ...]) -> dict[int, int]:
    known, ranks = _newest[0]
    if known is not workers:
        ranks = {index: rank for rank, index in enumerate(workers)}
        _newest[0] = (workers, ranks)
    return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBefore:
    """What an incident keeps of the group that was lost."""

    generation: int
    num_workers: int
    layout: str = ""
    step: int = 0
    """Newest step that the group had completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAfter:
    """What an incident keeps of the next group: what was decided when it began to form, and what it reported once it
    was formed."""

    forming_at: float
    num_workers: int
    layout: str
    num_spares: int
    """Number of its workers that were not in the group before."""
    state_source: StateSource | None
    """None if a script goes on from its own checkpoint."""
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
    """When the supervisor noticed the fault."""
    last_sign_at: float | None = None
    """Newest sign of the fault before `at`: the death of the worker as its node saw it (20-40 ms late), the report of a
    survivor whose collective failed, or else the last progress of the lost worker. The time between the two is the time
    to detect it. If only the progress is known (a dead node, a hang), it is an upper bound."""
    quiesced_at: float | None = None
    """When every worker had left `run`; None if not yet."""
    after: GroupAfter | None = None
    formed_at: float | None = None
    """When the group `after` had formed; None if not yet, or it was lost before its first step."""
    steps_lost: int | None = None
    node_loss: NodeLossBound | None = None
    """Bound on the lost steps that was in force when a node was lost; None if no node was lost."""

    @property
    def is_suspicion(self) -> bool:
        """True if no worker is known to be at fault yet. A later witness may still name one."""
        return not self.ranks and FAULTS[self.cause].blames is Blame.UNKNOWN

    @property
    def action(self) -> str:
        """Return what has been done about the incident so far."""
        to_workers, num_spares = (self.after.num_workers, self.after.num_spares) if self.after else (None, 0)
        return describe_action(self.cause, self.before.num_workers, to_workers, num_spares=num_spares)

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
        """Seconds from the detection to `closed_at`, which is the end of the next generation's first completed step."""
        return seconds_between(self.at, closed_at)


def seconds_between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """One loss of a worker, counted against its node."""

    node_id: str
    at: float
    worker_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The last hang that was detected."""

    step: int
    """Completed steps at the time."""
    index: int
    """Index of the worker that stood still first."""
    is_repeated: bool = False
    """The group has hung at this step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedFault:
    """The last exception because of which workers were replaced."""

    step: int
    """Completed steps at the time."""
    kind: ExitKind
    error_class: ErrorClass
    times: int = 1
    """How often in a row it was raised at this step."""
    places: tuple[int | str, ...] = ()
    """Ranks that raised it, and ids of their nodes; empty in a journal of an earlier release."""

    def is_like(self, other: RaisedFault) -> bool:
        """True if both have one cause. Hardware that fails at one step by chance does so on other ranks and nodes."""
        is_hardware = self.error_class in (ErrorClass.DEVICE, ErrorClass.NETWORK)
        is_same = (self.step, self.kind, self.error_class) == (other.step, other.kind, other.error_class)
        return is_same and not (is_hardware and set(self.places).isdisjoint(other.places))


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker's process that died and whose exit status is not known yet."""

    worker_id: str
    rank: int
    generation: int
    step: int
    """Completed steps at the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """The last crash of a worker: it was killed by a signal that its own code caused."""

    words: str
    """The signal and the place of the crash, in words; equal words mean the same place."""
    step: int
    """Completed steps at the first crash there."""
    generation: int
    """Generation of the last crash there."""
    times: int = 1
    """Number of groups in a row that crashed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedIncident:
    """A closed incident, which may still change: a silent node is declared dead, or the exit status of a worker becomes
    known."""

    incident: Incident
    closed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    hang: Hang | None = None
    raised: RaisedFault | None = None
    deaths: tuple[Death, ...] = ()
    explained: tuple[str, ...] = ()
    """Ids of the workers whose exit status was reported last. Several witnesses, and a supervisor after a restart, may
    ask for the same one, and each is reported once."""
    crash: Crash | None = None
    program_end: Crash | None = None
    """The last end of a script that no lost worker explains, counted like a crash; see scripts.py. None if there was no
    such end, or the script has made progress since."""
    losses: tuple[NodeLoss, ...] = ()
    """Recent losses of workers, by which nodes are suspected."""
    suspected: dict[str, float] = field(default_factory=dict)
    """Wall-clock time at which each node was last suspected, by node id."""
    silences: dict[str, ClosedIncident] = field(default_factory=dict)
    """Closed incidents of nodes that are still silent, by node id."""
    last_closed: ClosedIncident | None = None
    no_straggler_before: int = 0
    """No other straggler is named before this step."""
    is_memory_scarce: bool = False
    """A worker was killed for lack of memory, so new workers touch no memory before they need it."""


_CLEARLY_FASTER = 0.97
"""A level is left for one that needs at most this share of its step time, because medians of equally fast levels differ
too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTime:
    layout: Layout
    step_s: float | None
    """Median duration of a step, in seconds; None if the group was lost before it was known, so this level is not tried
    again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    has_formed: bool = False
    """A group has formed at least once."""
    has_run_long: bool = False
    """A group of a script has run for so long that the attempt counts as progress, whatever it has reported."""
    total_steps: int | None = None
    """Number of steps of the whole training run; None if no group has formed yet, or a script does not say."""
    skip_steps: tuple[int, ...] = ()
    """Steps that are left out because they were rolled back."""
    standing: Standing | None = None
    """Result of the job's validations so far; None if there was none."""
    proofs: tuple[LayoutProof, ...] = ()
    """Newest proof of each kind of layout: proven, refused, or not proven."""
    level_times: tuple[LevelTime, ...] = ()
    """Measured step times of layouts that differ in the shard level only."""
    trying: Layout | None = None
    """Layout that is being measured, or is about to be; None if no level is on trial."""
    num_incidents: int = 0
    incidents_since: float = 0.0
    """Wall-clock time of the attempt's first incident; 0 if there was none."""
    steps_lost: int = 0

    @property
    def refused_layouts(self) -> tuple[Layout, ...]:
        """Layouts that a proof has refused. The planner chooses none that uses everything that one of them uses."""
        return tuple(proof.layout for proof in self.proofs if proof.outcome is ProofOutcome.REFUSED)

    @property
    def measured_s(self) -> dict[Layout, float | None]:
        """Step time of each layout in `level_times`."""
        return {level.layout: level.step_s for level in self.level_times}

    def fastest_layout(self, family: Sequence[Layout]) -> Layout:
        """Return the fastest layout of the family by the measured times; the first if no other is clearly faster."""
        measured_s, best = self.measured_s, family[0]
        for layout in family[1:]:
            step_s, best_s = measured_s.get(layout), measured_s.get(best)
            if step_s is not None and best_s is not None and step_s < _CLEARLY_FASTER * best_s:
                best = layout
        return best

    def with_measured(self, layout: Layout, step_s: float | None) -> History:
        """The history with the step time of this layout, which is not on trial any longer."""
        others = tuple(level for level in self.level_times if level.layout != layout)
        return replace(self, level_times=(*others, LevelTime(layout=layout, step_s=step_s)), trying=None)

    def with_proof(self, proof: LayoutProof) -> History:
        others = tuple(known for known in self.proofs if known.layout.features != proof.layout.features)
        return replace(self, proofs=(*others, proof))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressStamp:
    """The newest change of a worker's progress counter in this generation."""

    counter: int
    step: int
    phase: Phase
    at: float
    """When the counter changed, by the worker's own clock."""
    seen_at: float
    """When the counter changed, by the supervisor's clock: the time of the poll's answer, less how long the counter had
    stood still by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    step: int = 0
    """Newest step that is completed in the current generation and those that it continues; it goes back when a group
    begins at an earlier step."""
    furthest_step: int = 0
    """Newest step that any generation of the attempt has completed. Steps that are done again do not change it."""
    step_times: tuple[float, ...] = ()
    """Durations of the last steps in seconds, newest last."""
    slowest_steps: tuple[float, ...] = ()
    """Duration in seconds of the slowest step of each block of steps, newest last. The first steps of generations are
    left out."""
    num_measured: int = 0
    """Number of steps measured for these blocks since the attempt began."""
    advanced_at: float = 0.0
    """When the group last completed a step, or formed if it has completed none."""
    stamps: dict[int, ProgressStamp] = field(default_factory=dict)
    """Progress stamps of the workers of this generation, by worker index."""
    starting: dict[int, ProgressStamp] = field(default_factory=dict)
    """Progress stamps of workers that are not warm yet and report progress of their preparation, by worker index."""
    answered_at: dict[int, float] = field(default_factory=dict)
    """When each worker last answered a poll, by worker index."""
    slow_steps: dict[int, int] = field(default_factory=dict)
    """Number of steps in a row in which a worker has been slower than the others, by worker index."""
    snapshots: SnapshotCost | None = None
    """Newest report of this generation on what its snapshots cost; None if there was none."""
    stopped: dict[int, SnapshotsStopped] = field(default_factory=dict)
    """Reports of the ranks that have no memory for snapshots in this generation, by rank."""
    last_event_at: float = 0.0
    """When the machine last handled an event."""
    is_late: bool = False
    """The last event came more than timeouts.absence_s after the event before it."""


@dataclass(frozen=True, slots=True)
class Discarded:
    """The generations from `first` to `last`, both included, that trained with code that was rolled back."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotIndex:
    requested: IntMap[float] = field(default_factory=IntMap)
    """When RequestSnapshotParts was sent, for each worker that has not answered yet, by worker index."""
    reported: IntMap[tuple[SnapshotPart, ...]] = field(default_factory=IntMap)
    """What workers outside the group have answered since the group ended, by worker index."""
    unreadable: tuple[tuple[int, int], ...] = ()
    """(generation, step) of the snapshots of which a part could not be read. They are not chosen again."""
    doubtful: tuple[tuple[int, int], ...] = ()
    """(generation, step) of the snapshots of which a part could not be read, perhaps because a worker was lost. A
    second failure makes them `unreadable`."""
    oldest_generation: int = 0
    """Snapshots of generations before this one may hold a wrong state and are not used."""
    discarded: Discarded | None = None
    """Generations whose snapshots are not used, because their code was rolled back; None if there are none."""
    unreported_nodes: tuple[str, ...] = ()
    """Ids of the nodes on which workers of the last group died before any worker had reported the snapshots there."""


LONG_S = 60.0
"""A group of a script that has run this long has made progress: it does not fail at its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    config: AttemptConfig
    target: Target
    current: CurrentStage
    """The current stage, with what only that stage knows."""
    life: int = 1
    """Number of the supervisor's current life, from 1; see `contract.ids`."""
    group: Group = field(default_factory=Group)
    pool: WorkerPool = field(default_factory=WorkerPool)
    snapshots: SnapshotIndex = field(default_factory=SnapshotIndex)
    checkpoints: CheckpointIndex = field(default_factory=CheckpointIndex)
    budgets: Budgets = field(default_factory=Budgets)
    health: Health = field(default_factory=Health)
    history: History = field(default_factory=History)
    incident: Incident | None = None
    """The open incident; None if there is none."""
    progress: GroupProgress = field(default_factory=GroupProgress)
    code: Code = field(default_factory=Code)
    ledger: Ledger = field(default_factory=Ledger)
    """Where the worker-seconds went. `booking` keeps it, and no decision depends on it."""

    @property
    def stage(self) -> Stage:
        return self.current.stage

    @property
    def group_active(self) -> bool:
        """True if workers of the group are in `run`, or still on their way out of it."""
        return self.stage in (Stage.FORMING, Stage.RUNNING, Stage.SWITCHING, Stage.QUIESCING)

    @property
    def in_run(self) -> tuple[int, ...]:
        """Indexes of the group's workers that have not left this generation, by rank."""
        running = {worker.index for worker in self.pool.workers if worker.in_run}
        return tuple(index for index in self.group.workers if index in running)

    @property
    def all_left(self) -> bool:
        """True if no worker of the group is in `run`."""
        ranks = self.group.ranks
        # The newest first: those that leave in the order in which they started are not passed over again and again.
        return not any(worker.in_run and worker.index in ranks for worker in reversed(self.pool.workers))

    @property
    def num_usable(self) -> int:
        """Number of workers that could train now: the usable ones, at most as many as are granted."""
        return min(self.target.granted, len(self.usable))

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers that may train. The others belong to an update of the code, or only serve snapshots."""
        current = (worker for worker in self.pool.workers if worker.code == self.code.current)
        return tuple(worker for worker in current if not self.only_serves(worker))

    def only_serves(self, worker: Worker) -> bool:
        """True if the worker was started to serve the snapshots of a node that is suspected: it never trains there."""
        is_sent = bool(worker.only_on) and not worker.is_beside and worker.index not in self.group.ranks
        return is_sent and worker.only_on in self.target.suspected

    @property
    def usable(self) -> tuple[Worker, ...]:
        return tuple(worker for worker in self.workers if worker.is_usable)

    @property
    def leave_s(self) -> float:
        """Seconds that the workers of a lost group have to leave it. A script has its grace besides."""
        return self.config.timeouts.quiesce_s + self.target.grace_s

    @property
    def quiesce_s(self) -> float:
        """The same for a worker whose answer waits behind all the others, and to report snapshots."""
        return self.leave_s + self.config.timeouts.later_s(len(self.pool.workers))

    @property
    def has_reported(self) -> bool:
        """True if a script has reported a step, in this attempt or in one before."""
        return bool(self.progress.step_times) or self.progress.step > 0

    def has_run_long(self, now: float) -> bool:
        """True if a group of a script has run for LONG_S."""
        return self.target.is_script and self.stage is Stage.RUNNING and now - self.current.since >= LONG_S

    @property
    def is_finishing(self) -> bool:
        """True if the last step of the training run is done. A program is finishing once it has ended on one rank."""
        if self.target.is_program:
            return any(worker_exit.kind is ExitKind.FINISHED for worker_exit in self.group.exits.values())
        return self.history.total_steps is not None and self.progress.step >= self.history.total_steps


ATTEMPT_JSON = TypeAdapter(Attempt)


def essential(state: Attempt) -> Attempt:
    """The part of the state that must be in the journal. The ledger and the progress of a healthy group are left out,
    because the progress changes with every step and every poll, and a restarted supervisor learns it anew. The executor
    writes the journal when this part differs, and every few seconds for the step alone. Parts that an event did not
    touch are the same objects, so comparing two states costs next to nothing."""
    return replace(state, progress=_NO_PROGRESS, ledger=_NO_LEDGER)


_NO_PROGRESS = GroupProgress()
_NO_LEDGER = Ledger()
