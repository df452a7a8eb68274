"""What an attempt looks like from outside: JobStatus, WorkerView and IncidentView from its state and readings. Pure.

Hidden here: which words and reasons a state of the machine has for people, and why a group has fewer workers than the
scheduler has granted. It repeats no decision: it reads what `switching`, `losses` and `worker_pool` have
left in the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shoal_service.core import goodput
from shoal_service.core.attempt import checkpoints, hangs, placement, switching
from shoal_service.core.attempt.deadlines import Wait, find_wait
from shoal_service.core.attempt.forming import readiness
from shoal_service.core.attempt.incidents import bound_node_loss, bound_worker_loss
from shoal_service.core.attempt.memory_snapshots import waiting_until
from shoal_service.core.attempt.placement import next_workers
from shoal_service.core.attempt.state import Attempt, Incident, Running, Stage, Waiting, Worker, short
from shoal_service.core.desired import Desired
from shoal_service.core.quantities import count_text
from shoal_service.views import CodeView, Condition, ConditionType, IncidentView, JobStatus, WorkerState, WorkerView
from shoal_workers.contract import (
    CheckpointName,
    EndReason,
    JobState,
    Phase,
    Progress,
    SnapshotCost,
    StepReport,
    ValidationReport,
    WorkerUse,
)

_EMA = 0.1
_DATA_WINDOW_S = 1.0
"""The share of the time that is spent on data is measured over at least this time."""
_REPORTED_PHASES = (Phase.SAVING, Phase.COMMITTING, Phase.VALIDATING)
"""What a group does beside its steps; its progress is shown."""


@dataclass(slots=True)
class Readings:
    """The values that were measured last. The reporter keeps them, and no decision depends on them."""

    step: StepReport | None = None
    validation: ValidationReport | None = None
    standstill: str = ""
    """Where the ranks of a group stand that stands still, by their stacks; empty if none were taken."""
    step_s: float | None = None
    """Moving average of the seconds of a step at the current world size."""
    communication_share: float | None = None
    """Moving average of the share of a step in which the training threads wait in collectives; None means not
    measured."""
    num_parameters: int | None = None
    layout: str = ""
    layout_reason: str = ""
    progress: dict[int, Progress] = field(default_factory=dict)
    use: dict[int, WorkerUse] = field(default_factory=dict)
    """Newest use of resources that each worker has reported, by worker index."""
    data_shares: dict[int, float] = field(default_factory=dict)
    """Share of its time in which a worker's training thread makes batches, by worker index; moving average."""
    data_marks: dict[int, Progress] = field(default_factory=dict)
    """The progress from which the next share is measured, by worker index."""
    refused_calls: dict[int, int] = field(default_factory=dict)
    """By worker index."""
    snapshots: SnapshotCost | None = None
    checkpoint_error: str | None = None
    checkpoint_error_since: float = 0.0
    is_storage_stalled: bool = False

    def add(self, report: StepReport) -> None:
        fresh = self.step is None or self.step.generation != report.generation or self.step_s is None
        self.step_s = _average(None if fresh else self.step_s, report.step_s)
        if report.compute_s and report.step_s > 0:
            waiting = min(1.0, max(0.0, 1 - sum(report.compute_s) / len(report.compute_s) / report.step_s))
            self.communication_share = _average(None if fresh else self.communication_share, waiting)
        self.step = report

    def add_progress(self, index: int, progress: Progress) -> None:
        self.progress[index] = progress
        mark = self.data_marks.get(index)
        if mark is None or mark.generation != progress.generation:
            self.data_marks[index] = progress
            self.data_shares.pop(index, None)
        elif (elapsed_s := progress.at - mark.at) >= _DATA_WINDOW_S:
            share = min(1.0, max(0.0, (progress.data_s - mark.data_s) / elapsed_s))
            self.data_shares[index] = _average(self.data_shares.get(index), share)
            self.data_marks[index] = progress

    def data_share(self, group: tuple[int, ...]) -> float | None:
        """Return the largest share of its time that a worker of the group spends on data; the others wait for it."""
        return max((self.data_shares[index] for index in group if index in self.data_shares), default=None)


def _average(before: float | None, newest: float) -> float:
    return newest if before is None else (1 - _EMA) * before + _EMA * newest


def make_status(state: Attempt, readings: Readings, *, spec_version: int, now: float) -> JobStatus:
    report, validation = readings.step, readings.validation
    wait = find_wait(state)
    keeps_snapshots = all(item.only_copies for item in state.progress.stopped.values())
    is_script = state.target.is_script
    left = None if state.history.total_steps is None else max(0, state.history.total_steps - state.progress.step)
    newest = CheckpointName.parse(state.checkpoints.newest or state.checkpoints.expected or "")
    return JobStatus(
        state=job_state(state),
        reason=_choose_reason(state),
        message=_describe_obstacle(state, now),
        deadline=wait.until if wait else None,
        observed_generation=spec_version,
        attempt=state.config.attempt,
        generation=state.group.generation,
        workers=len(state.group.workers) if state.group_active else 0,
        desired_workers=state.target.granted,
        layout=readings.layout,
        layout_reason=readings.layout_reason,
        step=_count_steps(state, report),
        total_steps=state.history.total_steps,
        loss=report.loss if report else None,
        val_loss=validation.loss if validation else None,
        metrics=report.metrics if report else {},
        best=state.history.standing,
        val_metrics=validation.metrics if validation else {},
        val_bits_per_byte=validation.bits_per_byte if validation else None,
        tokens_per_s=_compute_tokens_per_s(readings),
        tokens=_count_tokens(state, report),
        grad_norm=report.grad_norm if report else None,
        lr=report.lr if report else None,
        step_s=readings.step_s,
        step_at=report.at if report else None,
        # with NCCL the GPU waits, and not the thread whose time is measured: it would be 0
        communication_share=None if state.target.spec.worker.gpus else readings.communication_share,
        data_share=None if is_script else readings.data_share(tuple(state.group.workers)),
        steps_lost=state.history.steps_lost,
        incidents=state.history.num_incidents,
        checkpoint_step=newest.step if newest else None,
        verified_step=state.checkpoints.verified_step,
        num_parameters=readings.num_parameters,
        proofs=state.history.proofs,
        eta_s=left * readings.step_s if left and readings.step_s else None,
        note=_describe_progress(state, readings, wait, now),
        conditions=_make_conditions(state, readings, now),
        goodput=goodput.show(state.ledger),
        refused_calls=sum(readings.refused_calls.values()),
        snapshot_every_steps=readings.snapshots.every_steps if readings.snapshots and keeps_snapshots else None,
        snapshot_share=readings.snapshots.share if readings.snapshots else None,
        node_loss=bound_node_loss(state),
        worker_loss=bound_worker_loss(state),
        code=_make_code_view(state),
    )


def _count_steps(state: Attempt, report: StepReport | None) -> int:
    """Count completed steps, also the last one of a script, which may report it after its end."""
    is_of_the_group = report is not None and report.generation == state.group.generation
    return max(state.progress.step, report.step) if is_of_the_group and report is not None else state.progress.step


def _compute_tokens_per_s(readings: Readings) -> float | None:
    report = readings.step
    if report is None or report.tokens is None or not readings.step_s:
        return None
    return report.tokens / readings.step_s


def _count_tokens(state: Attempt, report: StepReport | None) -> int | None:
    """Count the tokens of all steps; None if a script does not report them."""
    if report is None:
        return None if state.target.is_script else 0
    return None if report.tokens is None else report.tokens * _count_steps(state, report)


def _make_code_view(state: Attempt) -> CodeView | None:
    code = state.code
    if not code.current:
        return None
    if code.update is None:
        return CodeView(version=short(code.current))
    return CodeView(version=short(code.current), updating_to=short(code.update.version), update=code.update.phase.value)


def job_state(state: Attempt) -> JobState:
    """Return the job state that a user sees, from the stage of the attempt.

    An attempt that saves and ends is never shown as running again: its end is stored after its last status.
    """
    if state.target.saves_and_ends:
        return JobState.PAUSING
    match state.stage:
        case Stage.WAITING if waiting_until(state) is not None:
            return JobState.RECOVERING
        case Stage.WAITING if state.history.has_formed:
            return JobState.WAITING
        case Stage.OPENING | Stage.STARTING | Stage.WAITING:
            return JobState.STARTING
        case Stage.QUIESCING | Stage.FALLING_BACK:
            return JobState.RECOVERING
        case Stage.SWITCHING | Stage.COMMITTING:
            is_resizing = state.target.desired is Desired.RUN and not state.is_finishing
            return JobState.RESIZING if is_resizing else JobState.RUNNING
        case Stage.FORMING if state.incident is not None:
            return JobState.RECOVERING
        case Stage.FORMING:
            return JobState.RESIZING if state.history.has_formed else JobState.STARTING
        case Stage.RUNNING | Stage.ENDED:
            return JobState.RUNNING


def make_worker_views(state: Attempt, readings: Readings) -> tuple[WorkerView, ...]:
    return tuple(_make_worker_view(state, readings, worker) for worker in state.pool.workers)


def make_incident_view(incident: Incident, *, closed_at: float | None) -> IncidentView:
    """Make the view of an incident.

    Args:
        closed_at: end of the first completed step of the next generation; None while the incident is open.
    """
    before, after = incident.before, incident.after
    return IncidentView(
        id=incident.id,
        cause=incident.cause,
        witness=incident.witness,
        ranks=incident.ranks,
        worker_ids=incident.worker_ids,
        node_id=incident.node_id,
        generation=before.generation,
        at=incident.at,
        from_workers=before.num_workers,
        to_workers=after.num_workers if after else None,
        detect_s=incident.detect_s,
        quiesce_s=incident.quiesce_s,
        plan_s=incident.plan_s,
        form_s=after.form_s if after else None,
        restore_s=after.restore_s if after else None,
        first_step_s=incident.first_step_s(closed_at),
        recovery_s=incident.recovery_s(closed_at),
        state_source=after.state_source if after else None,
        bytes_moved=after.bytes_moved if after else None,
        steps_lost=incident.steps_lost,
        from_layout=before.layout,
        to_layout=after.layout if after else None,
        action=incident.action,
        closed=closed_at is not None,
        message=incident.message,
        node_loss=incident.node_loss,
    )


def _make_worker_view(state: Attempt, readings: Readings, worker: Worker) -> WorkerView:
    progress = readings.progress.get(worker.index)
    info = worker.info
    return WorkerView(
        worker_id=worker.worker_id,
        rank=state.group.rank_of(worker.index) if state.group_active else None,
        state=_find_worker_state(state, worker),
        node_id=worker.node_id,
        node_ip=info.node_ip if info else "",
        pid=info.pid if info else 0,
        generation=state.group.generation if worker.in_run else 0,
        phase=progress.phase if progress else Phase.IDLE,
        step=progress.step if progress else 0,
        use=readings.use.get(worker.index),
    )


def _find_worker_state(state: Attempt, worker: Worker) -> WorkerState:
    if worker.in_run:
        return WorkerState.TRAINING
    if not worker.warm:
        return WorkerState.STARTING
    return WorkerState.WARM if placement.find_leave(state, worker) is None else WorkerState.STOPPING


def _choose_reason(state: Attempt) -> str:
    match state.stage:
        case Stage.WAITING if waiting_until(state) is None:
            return "min_workers_unreachable" if state.num_usable < state.target.min_workers else "backing_off"
        case _:
            if state.target.server_stops:
                return str(EndReason.SERVER_STOPPED)
            if state.target.is_preempted:
                return str(EndReason.MOVED if state.target.moves_to else EndReason.PREEMPTED)
            return str(state.incident.cause) if state.incident else ""


def _describe_obstacle(state: Attempt, now: float) -> str:
    """Return the reason of the decision that forms the group, else what went wrong."""
    if state.target.server_stops:
        return "The server stops: the job saves its state and returns to the queue."
    if state.target.moves_to:
        return f"The job moves to the cluster {state.target.moves_to}: it saves its state and goes on there."
    if state.target.is_preempted:
        return "The job gives its workers back: it saves its state and returns to the queue."
    if state.stage in (Stage.OPENING, Stage.FALLING_BACK):
        return checkpoints.describe_search(state)
    if isinstance(state.current, Waiting) and state.current.refused:
        return state.current.refused
    if state.stage in (Stage.STARTING, Stage.WAITING):
        return readiness(state, len(next_workers(state, now)), now).reason
    return state.incident.message if state.incident else ""


def _describe_progress(state: Attempt, readings: Readings, wait: Wait | None, now: float) -> str:
    """Describe what the attempt waits for, with the progress that those workers report.

    While a group trains, describe what it saves or validates, that it stands still, or why it is small.
    """
    if wait is None:
        still, short = hangs.find_standstill(state, now), find_shortage(state, now)
        ranks = state.group.ranks
        group = [p for i, p in readings.progress.items() if i in ranks]
        busy_with = next((p.note for p in group if p.phase in _REPORTED_PHASES and p.note), "")
        if state.stage is not Stage.RUNNING:
            return ""
        if still:
            return "; ".join(filter(None, (still.reason, readings.standstill)))
        return busy_with or (short.message if short is not None else "")
    forms = state.stage is Stage.FORMING
    busy = state.group.ranks.keys() if forms else {w.index for w in state.pool.workers if not w.warm}
    notes = [p.note for i, p in readings.progress.items() if i in busy and p.note]
    return f"{notes[0]}; waits for {wait.message}" if notes else f"waits for {wait.message}"


def _make_conditions(state: Attempt, readings: Readings, now: float) -> tuple[Condition, ...]:
    num_workers = len(state.group.workers) if state.group_active else 0
    short, still = find_shortage(state, now), hangs.find_standstill(state, now)
    why = f": {short.message}" if short is not None and short.message else ""
    conditions = (
        Condition(
            type=ConditionType.WORKERS_READY,
            status=short is None,
            reason="AllWorkers" if short is None else short.reason,
            message=f"{num_workers} of {count_text(state.target.granted, 'granted worker')} in the group{why}",
            since=state.current.since,
        ),
        Condition(
            type=ConditionType.PROGRESSING,
            status=not still,
            reason="Standstill" if still else "Progress",
            message=still.reason if still else "",
            since=state.progress.advanced_at if still else state.current.since,
        ),
    )
    if state.target.is_script:  # its checkpoints are its own
        return conditions
    return (
        *conditions,
        _make_snapshots_condition(state),
        Condition(
            type=ConditionType.CHECKPOINT_HEALTHY,
            status=readings.checkpoint_error is None,
            reason=_choose_checkpoint_reason(readings),
            message=readings.checkpoint_error or "",
            since=readings.checkpoint_error_since,
        ),
    )


def keep_since(conditions: tuple[Condition, ...], before: tuple[Condition, ...], now: float) -> tuple[Condition, ...]:
    """Add the time at which each status last changed. `before`: the conditions that were reported last."""
    known = {condition.type: condition for condition in before}
    return tuple(
        condition.model_copy(update={"since": _date_change(condition, known.get(condition.type), now)})
        for condition in conditions
    )


def _date_change(condition: Condition, before: Condition | None, now: float) -> float:
    if before is None:
        return condition.since or now
    if before.status == condition.status:
        return before.since
    # what went wrong is dated by what showed it; that it is over shows now
    return now if condition.status or condition.since <= before.since else condition.since


def _make_snapshots_condition(state: Attempt) -> Condition:
    stopped = sorted(state.progress.stopped.values(), key=lambda item: item.rank)
    if not stopped:
        reason = "Keeping" if state.target.keeps_snapshots else "TurnedOff"
        return Condition(
            type=ConditionType.SNAPSHOTS_HEALTHY, status=True, reason=reason, message="", since=state.current.since
        )
    return Condition(
        type=ConditionType.SNAPSHOTS_HEALTHY,
        status=False,
        reason="NoCopies" if all(item.only_copies for item in stopped) else "MemoryFull",
        message="; ".join(f"rank {item.rank}: {item.message}" for item in stopped),
        since=min(item.at for item in stopped),
    )


def _choose_checkpoint_reason(readings: Readings) -> str:
    if readings.checkpoint_error is None:
        return "Saving"
    return "StorageStalled" if readings.is_storage_stalled else "SaveFailed"


@dataclass(frozen=True, slots=True)
class Shortage:
    reason: str
    """The reason of the condition WorkersReady, for programs."""
    message: str


def find_shortage(state: Attempt, now: float) -> Shortage | None:
    """Return why the group has fewer workers than were granted; None if it has all.

    The message names all reasons that apply, and the first one is the code.
    """
    num_workers = len(state.group.workers) if state.group_active else 0
    if num_workers >= state.target.granted:
        return None
    outside = [worker for worker in state.pool.workers if worker.index not in state.group.ranks or not num_workers]
    shortages = list(_list_shortages(state, outside, num_workers, now))
    num_missing = state.target.granted - num_workers - len(outside)
    if num_missing > 0 and not shortages:
        shortages.append(Shortage("NotStarted", f"{count_text(num_missing, 'worker')} not started yet"))
    if not shortages:
        return Shortage("FewerThanGranted", "")
    return Shortage(shortages[0].reason, "; ".join(shortage.message for shortage in shortages))


def _list_shortages(state: Attempt, outside: Sequence[Worker], num_workers: int, now: float) -> Iterator[Shortage]:
    """Yield why each of the workers `outside` the group is not in it."""
    # also those whose node answers again: they have still to leave the generation that went on without them
    left_out = Counter(worker.node_id for worker in outside if worker.left_out is not None)
    for node_id, number in left_out.items():
        yield Shortage("NodeSilent", f"{count_text(number, 'worker')} left out until node {node_id[:12]} answers")
    if leaves := [leave for worker in outside if (leave := placement.find_leave(state, worker)) is not None]:
        yield Shortage("Leaving", f"{count_text(len(leaves), 'worker')} about to leave ({leaves[0].reason})")
    if num_starting := sum(not worker.warm for worker in outside):
        yield Shortage("Starting", f"{count_text(num_starting, 'worker')} starting, or waiting for room on a node")
    idle = [w for w in outside if w.is_usable and placement.find_leave(state, w) is None]
    if idle and isinstance(state.current, Running):
        yield _explain_idle(state, state.current, len(idle), num_workers, now)


def _explain_idle(state: Attempt, running: Running, num_idle: int, num_workers: int, now: float) -> Shortage:
    """Return why warm workers are not used."""
    number = count_text(num_idle, "worker")
    kept = running.kept_layout_for
    layout = state.group.layout.describe() if state.group.layout is not None else ""
    if kept is not None and kept.num_workers > num_workers:
        return Shortage(
            "LayoutUsesFewer",
            f"{number} idle: for {count_text(kept.num_workers, 'worker')} the planner's layout is {layout}, which uses "
            f"{num_workers} of them; `shoal plan` shows why, and `parallelism` of the spec overrides it",
        )
    if now < state.budgets.grow_not_before:
        return Shortage(
            "GrowsLater", f"{number} idle: the group does not grow for a while after a failed save or start"
        )
    num_next = len(next_workers(state, now))
    if num_next > num_workers and not switching.is_worth_growing(state, num_next, now):
        return Shortage(
            "GrowsWithNextIncident",
            f"{number} idle: after {state.history.num_incidents} incidents the next one is expected before growing "
            f"pays, and its re-formation takes them in. Raise elasticity.min_workers to {num_next} to grow now",
        )
    return Shortage("GrowsSoon", f"{number} warm: the group grows at the next step boundary")
