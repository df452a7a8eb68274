"""Reporter: turns what an executor receives into the reports that the control plane stores and users read.

Called by the executor, its worker clients and the checkpoint coordinator; writes to the outbox only.

The copies of a job's series beside the control plane's: TensorBoard event files, and points for its metrics hook.

    EventFiles      <checkpoint.url>/<job id>/tensorboard/events.out.tfevents.*      (`checkpoint.tensorboard`)
                    one file per life of a supervisor
    MetricBacklog   the points that the hook has not logged yet (`metrics.hook`); `MetricsForwarder` takes them out

`Reporter` adds the points to both. Hidden here: which numbers of a point are named how, and that a file system may
hang: a thread of its own writes the files. It never delays and never ends an attempt: if the files cannot be written,
it says so once and stops. Steps that are computed again replace the ones before: TensorBoard drops what follows a start
of session. Worker clients keep the reports on their workers until they are settled in the backlog, so that a restarted
supervisor gets them again.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, assert_never

from shoal_service.clock import Clock
from shoal_service.core.attempt.messages import Emit, End, ShowIncident, SuspectNode
from shoal_service.core.attempt.state import Attempt, Incident
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events import (
    CheckpointCommitted,
    CheckpointFailed,
    GenerationForming,
    IncidentSuspected,
    JobEvent,
    NodeSuspected,
    Validated,
)
from shoal_service.core.system_metrics import SystemSample, pace_s, sample_of
from shoal_service.reports import PendingEvent, PendingLog, SuspectedNode
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.reporting.outbox import Outbox
from shoal_service.supervisor.reporting.status import Readings, incident_view, status_of, with_since, workers_of
from shoal_service.views import CheckpointView, Condition
from shoal_workers.checkpoint.local import LocalDirectory
from shoal_workers.checkpoint.storage import open_job_directory
from shoal_workers.contract import (
    EndReason,
    GroupFormed,
    LogStream,
    MetricPoint,
    Profiled,
    SnapshotCost,
    Stacks,
    StepReport,
    Suspect,
    ValidationReport,
    WorkerPoll,
    WorkerReport,
    WorkerUse,
)

_MOST_PER_SAMPLE = 64
"""Measurements of a rank that one sample is the mean of; further ones are dropped."""
_EVENT_FILES_S = 10.0
"""How long the end of an attempt waits for the last event file."""


class Reporter:
    """What one attempt reports. Called on the executor's loop only."""

    def __init__(self, outbox: Outbox, config: SupervisorConfig, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock
        self.spec_version = config.spec_version
        self._readings = Readings()
        self._shown: tuple[Incident, float | None] | None = None
        """The incident that was shown last, and when it was closed."""
        self._conditions: tuple[Condition, ...] = ()
        """The conditions that were shown last."""
        self._sampler = SystemSampler()
        self._stacks: dict[int, Stacks] = {}
        self._suspects: dict[int, Suspect] = {}
        """Suspects by incident."""
        self._checkpoint_root = config.checkpoint_root
        self._writes_event_files = config.spec.checkpoint.tensorboard
        self._event_files: EventFiles | None = None
        self.backlog = MetricBacklog(is_used=config.spec.metrics.hook is not None)
        """Metrics that wait for the metrics hook."""

    def record_report(self, item: WorkerReport, state: Attempt) -> None:
        """Records a report of the current generation, before the machine handles it."""
        if item.generation != state.group.generation:
            if state.target.is_script and isinstance(item, StepReport):
                self._add_point(_point(item, None))  # its last one may come after its end; no later group repeats it
            return
        if isinstance(item, StepReport):
            self._readings.add(item)
            self._add_point(_point(item, None))
        elif isinstance(item, ValidationReport):
            known = self._readings.validation
            if known is not None and (known.step, known.loss) == (item.step, item.loss):
                return  # computed a second time, since it was not known whether the first was reported
            self._readings.validation = item
            event = Validated(step=item.step, loss=item.loss, bits_per_byte=item.bits_per_byte)
            if item.metrics:
                event = event.model_copy(update={"metrics": item.metrics})
            last = self._readings.step
            self._outbox.add(PendingEvent.of(event, item.at))
            if last is not None and last.step == item.step:
                self._add_point(_point(last, item))
        elif isinstance(item, GroupFormed):
            if item.start_step is None:
                return  # of a script, which reports its steps itself
            self._readings.num_parameters = item.num_parameters
            known_step = self._readings.step.step if self._readings.step is not None else 0
            for report in item.past:  # steps of a rank 0 that died before it reported them
                if known_step < report.step <= item.start_step:
                    self._add_point(_point(report, None))
        elif isinstance(item, SnapshotCost):
            self._readings.snapshots = item

    def record_poll(self, index: int, poll: WorkerPoll, state: Attempt) -> None:
        """Records the logs and the progress of one worker."""
        worker, rank = state.pool.worker(index), state.group.rank_of(index)
        self._readings.add_progress(index, poll.progress)
        self._readings.refused_calls[index] = poll.num_refused
        if poll.use is not None:
            self._readings.use[index] = poll.use
            self._sampler.add(index, rank, poll.use, state.group.generation)
        worker_id = worker.worker_id if worker else poll.worker_id
        self._outbox.add(
            *(
                PendingLog(at=line.at, rank=rank, worker_id=worker_id, stream=line.stream, text=line.text)
                for line in poll.logs
            )
        )

    def report(self, items: Sequence[Emit | ShowIncident | End], state: Attempt) -> None:
        for item in items:
            match item:
                case Emit(event):
                    if isinstance(event, GenerationForming):
                        self._readings.layout, self._readings.layout_reason = event.layout, event.reason
                    if isinstance(event, CheckpointFailed):
                        self._readings.checkpoint_error = event.message
                        self._readings.is_storage_stalled = event.stalled
                        self._readings.checkpoint_error_since = self._clock.time()
                    elif isinstance(event, CheckpointCommitted) and self._readings.checkpoint_error is not None:
                        self._readings.checkpoint_error = None
                        self._readings.checkpoint_error_since = self._clock.time()
                    self.event(event)
                case ShowIncident(incident, closed_at):
                    self._show_incident(incident, closed_at)
                case End(end):
                    self.show(state)
                    stacks = self._stacks.get(self._shown[0].id) if self._shown is not None else None
                    if stacks is not None and end.reason is EndReason.RECOVERY_BUDGET:
                        end = end.model_copy(update={"message": f"{end.message}; before, {stacks.summary}"})
                    if self._event_files is not None:  # the process may be gone as soon as its end is stored
                        self._event_files.close()
                        self._event_files.wait(_EVENT_FILES_S)
                    self._outbox.add_end(end)
                case _:
                    assert_never(item)

    def show_standstill(self, summary: str) -> None:
        """Where the ranks of a group stand that stands still; empty when it makes progress."""
        self._readings.standstill = summary

    def _add_point(self, point: SeriesPoint) -> None:
        self._outbox.add(point)
        self.backlog.add(point)
        if self._writes_event_files:
            self._event_files = self._event_files or EventFiles(self._checkpoint_root, self._say)
            self._event_files.add(point)

    def _say(self, text: str) -> None:
        """Adds a line to the job's own log. From any thread."""
        line = PendingLog(at=self._clock.time(), rank=None, worker_id="", stream=LogStream.SHOAL, text=text)
        self._outbox.add(line)

    def keep_stacks(self, incident_id: int, stacks: Stacks) -> None:
        """Adds the stacks to this incident, now and whenever it is shown again."""
        self._stacks = {incident_id: stacks}
        self._show_again(incident_id)

    def keep_suspect(self, incident_id: int, suspect: Suspect) -> None:
        """Adds the suspect to this incident, now and whenever it is shown again, and emits an event."""
        self._suspects = {incident_id: suspect}
        self.event(IncidentSuspected(id=incident_id, suspect=suspect))
        self._show_again(incident_id)

    def _show_again(self, incident_id: int) -> None:
        if self._shown is not None and self._shown[0].id == incident_id:
            self._show_incident(*self._shown)

    def _show_incident(self, incident: Incident, closed_at: float | None) -> None:
        self._shown = incident, closed_at
        view = incident_view(incident, closed_at=closed_at)
        kept = {"stacks": self._stacks.get(incident.id), "suspect": self._suspects.get(incident.id)}
        self._outbox.add(view.model_copy(update=kept))

    def suspect(self, command: SuspectNode) -> None:
        """Reports a node for probation, with an event for the job's history."""
        now = self._clock.time()
        self._outbox.add(
            SuspectedNode(at=now, node_id=command.node_id, reason=command.reason),
            PendingEvent.of(NodeSuspected(node_id=command.node_id, reason=command.reason), now),
        )

    def event(self, event: JobEvent) -> None:
        self._outbox.add(PendingEvent.of(event, self._clock.time()))

    def add(self, item: CheckpointView | Profiled) -> None:
        """Reports a checkpoint, or how a request for a profile has ended."""
        self._outbox.add(item)

    def show(self, state: Attempt) -> None:
        now = self._clock.time()
        status = status_of(state, self._readings, spec_version=self.spec_version, now=now)
        self._conditions = with_since(status.conditions, self._conditions, now)
        num_ranks = len(state.group.workers) if state.group_active else 0
        if (sample := self._sampler.take(num_ranks, now=now, now_mono=self._clock.monotonic())) is not None:
            self._outbox.add(sample)
        self._outbox.set_status(
            status.model_copy(update={"conditions": self._conditions}), workers_of(state, self._readings)
        )


def _point(report: StepReport, validation: ValidationReport | None) -> SeriesPoint:
    return SeriesPoint(
        step=report.step,
        at=report.at,
        loss=_number(report.loss),
        grad_norm=_number(report.grad_norm),
        lr=_number(report.lr),
        tokens_per_s=_number(report.tokens) / max(report.step_s, 1e-9),
        step_s=report.step_s,
        world_size=report.world_size,
        generation=report.generation,
        val_loss=validation.loss if validation else None,
        metrics=report.metrics,
        val_metrics=validation.metrics if validation else {},
    )


def _number(reported: float | None) -> float:
    return math.nan if reported is None else reported


class SystemSampler:
    """Collects measurements of workers, and makes the mean of each rank every ten seconds; on the executor's loop only.

    The reporter adds each poll's measurement once. A new generation begins with nothing, because its ranks may be other
    workers.
    """

    def __init__(self) -> None:
        self._uses: dict[int, list[WorkerUse]] = {}
        self._newest: dict[int, float] = {}
        """Time of the newest measurement of each worker, by worker index: polls repeat it."""
        self._generation = 0
        self._due_mono = 0.0

    def add(self, index: int, rank: int | None, use: WorkerUse, generation: int) -> None:
        """Adds a measurement of the worker `index`, which has this rank in this generation; None if it has none."""
        if generation != self._generation:
            self._generation, self._uses = generation, {}
        if self._newest.get(index) == use.at:
            return
        self._newest[index] = use.at
        if rank is not None:
            uses = self._uses.setdefault(rank, [])
            if len(uses) < _MOST_PER_SAMPLE:
                uses.append(use)

    def take(self, num_ranks: int, *, now: float, now_mono: float) -> SystemSample | None:
        """The sample of the interval that has ended; None if it has not ended, or nothing was measured."""
        if now_mono < self._due_mono or not self._uses or not num_ranks:
            return None
        self._due_mono = now_mono + pace_s(num_ranks)
        sample = sample_of(self._uses, num_ranks=num_ranks, generation=self._generation, at=now)
        self._uses = {}
        return sample if sample.values else None


_MAX_WAITING = 10_000
"""Most points that wait. If a file system is away for longer, the newest points are lost."""


class EventFiles:
    """Writes event files on a thread of its own. `add` and `close` are called on one thread, and neither waits for the
    file system.

    Args:
        root: the job's checkpoint directory.
        say: called at most once, on any thread, with the reason why nothing is written.
    """

    def __init__(self, root: str, say: Callable[[str], None]) -> None:
        self._root = root
        self._say = say
        self._waiting: queue.Queue[SeriesPoint | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
        if "://" in root.removeprefix("file://"):
            say(f"no TensorBoard event files: {root} is not a directory")
        else:
            self._thread.start()

    def add(self, point: SeriesPoint) -> None:
        """Adds the newest completed step, or the same step again with its validation."""
        self._put(point)

    def close(self) -> None:
        """Notes that no point comes any more."""
        self._put(None)

    def wait(self, timeout_s: float) -> bool:
        """Waits after `close`; returns whether everything is written within that time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, item: SeriesPoint | None) -> None:
        if self._thread.is_alive():
            try:
                self._waiting.put_nowait(item)
            except queue.Full:
                pass

    def _run(self) -> None:
        try:
            self._write()
        except (OSError, ImportError) as error:
            self._say(f"no TensorBoard event files any more: {error}")

    def _write(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        place = open_job_directory(self._root).child("tensorboard")
        assert isinstance(place, LocalDirectory)
        place.create()
        with place.opened() as directory:  # by the descriptor: the path may meanwhile be a link that the job has made
            self._write_with(EventsWriter(f"/proc/self/fd/{directory}/events"))

    def _write_with(self, writer: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        newest: SeriesPoint | None = None
        while (point := self._waiting.get()) is not None:
            if newest is None or point.step < newest.step or point.generation < newest.generation:
                start = SessionLog(status=SessionLog.START)
                writer.write_event(Event(wall_time=point.at, step=point.step, session_log=start))
            is_same = newest is not None and newest.step == point.step
            writer.write_event(_event(point, without=newest if is_same else None))
            newest = point
            if self._waiting.empty():
                writer.flush()
        writer.close()


def _event(point: SeriesPoint, *, without: SeriesPoint | None) -> Any:
    """Makes an event of the point. `without`: the same step as it was written before; only what is new is written."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    known = dict(scalars(without)) if without is not None else {}
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(point) if known.get(tag) != value]
    return Event(wall_time=point.at, step=point.step, summary=Summary(value=values))


_MOST = 10_000
"""Most points that wait. If the hook fails for longer, the oldest points are dropped."""


class MetricBacklog:
    """The points that the metrics hook has not logged yet. Pure data."""

    def __init__(self, *, is_used: bool, most: int = _MOST) -> None:
        """`is_used`: whether the job has a hook. If not, nothing is kept."""
        self._is_used = is_used
        self._most = most
        self._points: deque[MetricPoint] = deque()
        self.added = 0
        """Number of the last point."""
        self.num_dropped = 0

    @property
    def settled(self) -> int:
        """Number of the last point that is logged or dropped, with all before it."""
        return self._points[0].seq - 1 if self._points else self.added

    @property
    def num_waiting(self) -> int:
        return len(self._points)

    def add(self, point: SeriesPoint) -> None:
        if not self._is_used:
            return
        self.added += 1
        self._points.append(MetricPoint(seq=self.added, step=point.step, at=point.at, values=dict(scalars(point))))
        if len(self._points) > self._most:
            self._points.popleft()
            self.num_dropped += 1

    def first(self, num: int) -> tuple[MetricPoint, ...]:
        """The oldest points."""
        return tuple(self._points[i] for i in range(min(num, len(self._points))))

    def logged(self, seq: int) -> None:
        """Notes that all points up to this number are logged."""
        while self._points and self._points[0].seq <= seq:
            self._points.popleft()


_FIELDS = ("loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "step_s", "world_size")


def scalars(point: SeriesPoint) -> Iterator[tuple[str, float]]:
    """The named numbers of a point, without those that are not finite."""
    for name in _FIELDS:
        value = getattr(point, name)
        if value is not None and math.isfinite(value):
            yield name, float(value)
    for nested in ("metrics", "val_metrics"):
        yield from ((f"{nested}/{name}", value) for name, value in getattr(point, nested).items())
