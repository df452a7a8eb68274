"""Reporter: turns what an executor receives into the reports that the control plane stores and users read.

The executor, its worker clients and the checkpoint coordinator call it; it writes to the outbox only.

The series of a job is also copied to TensorBoard event files, and to its metrics hook:

    EventFiles      <checkpoint.url>/<job id>/tensorboard/events.out.tfevents.*      (`checkpoint.tensorboard`)
                    one file per incarnation of a supervisor
    MetricBacklog   the points that the hook has not logged yet (`metrics.hook`); `MetricsForwarder` takes them out

`Reporter` adds the points to both. Hidden here: the names of a point's numbers, and that a file system may hang, so a
separate thread writes the files. It never delays and never ends an attempt: if the files cannot be written, it logs
that once and stops. Steps that are computed again replace the ones before: TensorBoard drops what follows a start of
session. Workers keep their reports until the backlog has settled them, so that a restarted supervisor gets them again.

The outbox has all reports, numbered, until the control plane has acknowledged that they are stored. Events, incidents,
checkpoints and profiles are never dropped. Of series, logs and system metrics the oldest items are dropped when the
service is away for a long time. The executor's loop adds, the thread that reports pulls.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, assert_never

from shoal_service.clock import Clock
from shoal_service.core.attempt.messages import Emit, End, ShowIncident, SuspectNode
from shoal_service.core.attempt.state import Attempt, Incident
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events import (
    CheckpointCommitted,
    CheckpointFailed,
    GenerationForming,
    IncidentSuspected,
    JobEvent,
    NodeSuspected,
    Validated,
)
from shoal_service.core.system_metrics import SystemSample, make_sample, pace_s
from shoal_service.reports import PendingEvent, PendingLog, StacksAnswer, SupervisorReports, SuspectedNode
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.journal import Unacknowledged
from shoal_service.supervisor.reporting.status import (
    Readings,
    keep_since,
    make_incident_view,
    make_status,
    make_worker_views,
)
from shoal_service.views import CheckpointView, Condition, IncidentView, JobStatus, WorkerView
from shoal_workers.checkpoint.local import LocalDirectory
from shoal_workers.checkpoint.storage import open_job_directory
from shoal_workers.contract import (
    WIRE_VERSION,
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
"""Most measurements of a rank in one sample, which is their mean; further ones are dropped."""
_EVENT_FILES_S = 10.0
"""How long the end of an attempt waits for the last event file."""


class Reporter:
    """Makes the reports of one attempt. Called on the executor's loop only."""

    def __init__(self, outbox: Outbox, config: SupervisorConfig, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock
        self.spec_version = config.spec_version
        self._readings = Readings()
        self._incident: tuple[Incident, float | None] | None = None
        """The incident that was reported last, and when it was closed."""
        self._conditions: tuple[Condition, ...] = ()
        """The conditions that were reported last."""
        self._sampler = SystemSampler()
        self._stacks: dict[int, Stacks] = {}
        """Stacks by id of their incident."""
        self._suspects: dict[int, Suspect] = {}
        """Suspects by id of their incident."""
        self._checkpoint_root = config.checkpoint_root
        self._writes_event_files = config.spec.checkpoint.tensorboard
        self._event_files: EventFiles | None = None
        self.backlog = MetricBacklog(has_hook=config.spec.metrics.hook is not None)
        """Metrics that wait for the metrics hook."""

    def record_report(self, item: WorkerReport, state: Attempt) -> None:
        """Record a report of the current generation, before the machine handles it."""
        if item.generation != state.group.generation:
            if state.target.is_script and isinstance(item, StepReport):
                self._add_point(_make_point(item))  # its last one may come after its end; no later group repeats it
            return
        match item:
            case StepReport():
                self._readings.add(item)
                self._add_point(_make_point(item))
            case ValidationReport():
                self._record_validation(item)
            case GroupFormed(start_step=int(start_step)):  # a script has no start step, and reports its steps itself
                self._readings.num_parameters = item.num_parameters
                last_step = self._readings.step.step if self._readings.step is not None else 0
                for report in item.past:  # steps of a rank 0 that died before it reported them
                    if last_step < report.step <= start_step:
                        self._add_point(_make_point(report))
            case SnapshotCost():
                self._readings.snapshots = item

    def _record_validation(self, report: ValidationReport) -> None:
        previous, last = self._readings.validation, self._readings.step
        if previous is not None and (previous.step, previous.loss) == (report.step, report.loss):
            return  # a new group has repeated it, since the first report might have been lost
        self._readings.validation = report
        event = Validated(step=report.step, loss=report.loss, bits_per_byte=report.bits_per_byte)
        if report.metrics:
            event = event.model_copy(update={"metrics": report.metrics})
        self._outbox.add(PendingEvent.of(event, report.at))
        if last is not None and last.step == report.step:
            self._add_point(_make_point(last, report))

    def record_poll(self, index: int, poll: WorkerPoll, state: Attempt) -> None:
        """Record the logs and the progress of one worker."""
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

    def carry_out(self, commands: Sequence[Emit | ShowIncident | End], state: Attempt) -> None:
        """Report what the machine has decided."""
        for command in commands:
            match command:
                case Emit(event):
                    self._record_event(event)
                    self.emit(event)
                case ShowIncident(incident, closed_at):
                    self._report_incident(incident, closed_at)
                case End(end):
                    self.update_status(state)
                    stacks = self._stacks.get(self._incident[0].id) if self._incident is not None else None
                    if stacks is not None and end.reason is EndReason.RECOVERY_BUDGET:
                        end = end.model_copy(update={"message": f"{end.message}; before, {stacks.summary}"})
                    if self._event_files is not None:  # the process may be gone as soon as its end is stored
                        self._event_files.close()
                        self._event_files.wait(_EVENT_FILES_S)
                    self._outbox.add_end(end)
                case _:
                    assert_never(command)

    def _record_event(self, event: JobEvent) -> None:
        readings = self._readings
        match event:
            case GenerationForming():
                readings.layout, readings.layout_reason = event.layout, event.reason
            case CheckpointFailed():
                readings.checkpoint_error, readings.is_storage_stalled = event.message, event.stalled
                readings.checkpoint_error_since = self._clock.time()
            case CheckpointCommitted() if readings.checkpoint_error is not None:
                readings.checkpoint_error, readings.checkpoint_error_since = None, self._clock.time()

    def set_standstill(self, summary: str) -> None:
        """Report where the ranks of a group without progress are; empty once it makes progress."""
        self._readings.standstill = summary

    def _add_point(self, point: SeriesPoint) -> None:
        self._outbox.add(point)
        self.backlog.add(point)
        if self._writes_event_files:
            self._event_files = self._event_files or EventFiles(self._checkpoint_root, self._say)
            self._event_files.add(point)

    def _say(self, text: str) -> None:
        """Add a line of Shoal to the job's log. From any thread."""
        line = PendingLog(at=self._clock.time(), rank=None, worker_id="", stream=LogStream.SHOAL, text=text)
        self._outbox.add(line)

    def keep_stacks(self, incident_id: int, stacks: Stacks) -> None:
        """Add the stacks to each report of this incident."""
        self._stacks = {incident_id: stacks}
        self._report_again(incident_id)

    def keep_suspect(self, incident_id: int, suspect: Suspect) -> None:
        """Add the suspect to each report of the incident; emit an event."""
        self._suspects = {incident_id: suspect}
        self.emit(IncidentSuspected(id=incident_id, suspect=suspect))
        self._report_again(incident_id)

    def _report_again(self, incident_id: int) -> None:
        if self._incident is not None and self._incident[0].id == incident_id:
            self._report_incident(*self._incident)

    def _report_incident(self, incident: Incident, closed_at: float | None) -> None:
        self._incident = incident, closed_at
        view = make_incident_view(incident, closed_at=closed_at)
        evidence = {"stacks": self._stacks.get(incident.id), "suspect": self._suspects.get(incident.id)}
        self._outbox.add(view.model_copy(update=evidence))

    def suspect_node(self, command: SuspectNode) -> None:
        """Report a node for probation, with an event for the job's history."""
        now = self._clock.time()
        self._outbox.add(
            SuspectedNode(at=now, node_id=command.node_id, reason=command.reason),
            PendingEvent.of(NodeSuspected(node_id=command.node_id, reason=command.reason), now),
        )

    def emit(self, event: JobEvent) -> None:
        self._outbox.add(PendingEvent.of(event, self._clock.time()))

    def add(self, item: CheckpointView | Profiled) -> None:
        """Report a checkpoint, or how a request for a profile has ended."""
        self._outbox.add(item)

    def update_status(self, state: Attempt) -> None:
        """Report status, workers, and a sample of resources if one is due."""
        now = self._clock.time()
        status = make_status(state, self._readings, spec_version=self.spec_version, now=now)
        self._conditions = keep_since(status.conditions, self._conditions, now)
        num_ranks = len(state.group.workers) if state.group_active else 0
        if (sample := self._sampler.take(num_ranks, now=now, now_mono=self._clock.monotonic())) is not None:
            self._outbox.add(sample)
        self._outbox.set_status(
            status.model_copy(update={"conditions": self._conditions}), make_worker_views(state, self._readings)
        )


def _make_point(report: StepReport, validation: ValidationReport | None = None) -> SeriesPoint:
    return SeriesPoint(
        step=report.step,
        at=report.at,
        loss=_or_nan(report.loss),
        grad_norm=_or_nan(report.grad_norm),
        lr=_or_nan(report.lr),
        tokens_per_s=_or_nan(report.tokens) / max(report.step_s, 1e-9),
        step_s=report.step_s,
        world_size=report.world_size,
        generation=report.generation,
        val_loss=validation.loss if validation else None,
        metrics=report.metrics,
        val_metrics=validation.metrics if validation else {},
    )


def _or_nan(number: float | None) -> float:
    return math.nan if number is None else number


class SystemSampler:
    """Collects measurements of workers, and averages them by rank every ten seconds.

    On the executor's loop only. A new generation begins without measurements, because its ranks may be other workers.
    """

    def __init__(self) -> None:
        self._uses: dict[int, list[WorkerUse]] = {}
        self._newest: dict[int, float] = {}
        """Time of the newest measurement by worker index; polls repeat measurements."""
        self._generation = 0
        self._due_mono = 0.0

    def add(self, index: int, rank: int | None, use: WorkerUse, generation: int) -> None:
        """Add a measurement of the worker `index`. `rank`: its rank in this generation; None if it has none."""
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
        """Take the sample of the last interval; None if it has not ended, or has no measurement."""
        if now_mono < self._due_mono or not self._uses or not num_ranks:
            return None
        self._due_mono = now_mono + pace_s(num_ranks)
        sample = make_sample(self._uses, num_ranks=num_ranks, generation=self._generation, at=now)
        self._uses = {}
        return sample if sample.values else None


_MAX_WAITING = 10_000
"""Most points that wait. If a file system is away for longer, the newest points are lost."""


class EventFiles:
    """Writes event files on a separate thread. `add` and `close` are for one thread; they never wait for storage.

    Args:
        root: the job's checkpoint directory.
        say: called at most once, on any thread, with the reason why nothing is written.
    """

    def __init__(self, root: str, say: Callable[[str], None]) -> None:
        self._root = root
        self._say = say
        self._waiting: queue.Queue[SeriesPoint | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._write_or_say, name="tensorboard", daemon=True)
        if "://" in root.removeprefix("file://"):
            say(f"no TensorBoard event files: {root} is not a directory")
        else:
            self._thread.start()

    def add(self, point: SeriesPoint) -> None:
        """Add the newest step; the same step again if it has a validation."""
        self._put(point)

    def close(self) -> None:
        """End the thread after the points that wait."""
        self._put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait after `close`; True if everything was written within that time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, item: SeriesPoint | None) -> None:
        if self._thread.is_alive():
            try:
                self._waiting.put_nowait(item)
            except queue.Full:
                pass

    def _write_or_say(self) -> None:
        try:
            self._write()
        except (OSError, ImportError) as error:
            self._say(f"no TensorBoard event files any more: {error}")

    def _write(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        directory = open_job_directory(self._root).child("tensorboard")
        assert isinstance(directory, LocalDirectory)
        directory.create()
        with directory.open_descriptor() as descriptor:  # not by the path, which the job may replace by a link
            self._write_points(EventsWriter(f"/proc/self/fd/{descriptor}/events"))

    def _write_points(self, writer: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        last: SeriesPoint | None = None
        while (point := self._waiting.get()) is not None:
            if last is None or point.step < last.step or point.generation < last.generation:
                start = SessionLog(status=SessionLog.START)
                writer.write_event(Event(wall_time=point.at, step=point.step, session_log=start))
            is_same = last is not None and last.step == point.step
            writer.write_event(_make_event(point, written=last if is_same else None))
            last = point
            if self._waiting.empty():
                writer.flush()
        writer.close()


def _make_event(point: SeriesPoint, *, written: SeriesPoint | None) -> Any:
    """Make an event of the numbers of a point that are new. `written`: the same step as it was written before."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    before = dict(read_scalars(written)) if written is not None else {}
    new = {tag: value for tag, value in read_scalars(point) if before.get(tag) != value}
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in new.items()]
    return Event(wall_time=point.at, step=point.step, summary=Summary(value=values))


_MAX_BACKLOG = 10_000
"""Most points that wait. If the hook fails for longer, the oldest points are dropped."""


class MetricBacklog:
    """The points that the metrics hook has not logged yet. Pure data."""

    def __init__(self, *, has_hook: bool, max_points: int = _MAX_BACKLOG) -> None:
        """Keep points only if the job has a hook (`has_hook`)."""
        self._has_hook = has_hook
        self._max_points = max_points
        self._points: deque[MetricPoint] = deque()
        self.added = 0
        """Number of the last point."""
        self.num_dropped = 0

    @property
    def settled(self) -> int:
        """Number up to which all points are logged or dropped."""
        return self._points[0].seq - 1 if self._points else self.added

    @property
    def num_waiting(self) -> int:
        return len(self._points)

    def add(self, point: SeriesPoint) -> None:
        if not self._has_hook:
            return
        self.added += 1
        self._points.append(MetricPoint(seq=self.added, step=point.step, at=point.at, values=dict(read_scalars(point))))
        if len(self._points) > self._max_points:
            self._points.popleft()
            self.num_dropped += 1

    def read_oldest(self, num: int) -> tuple[MetricPoint, ...]:
        """Return up to `num` of the oldest points."""
        return tuple(islice(self._points, num))

    def drop_logged(self, seq: int) -> None:
        """Drop the points up to this number, which are logged."""
        while self._points and self._points[0].seq <= seq:
            self._points.popleft()


_FIELDS = ("loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "step_s", "world_size")


def read_scalars(point: SeriesPoint) -> Iterator[tuple[str, float]]:
    """Yield the named numbers of a point that are finite."""
    for name in _FIELDS:
        value = getattr(point, name)
        if value is not None and math.isfinite(value):
            yield name, float(value)
    for nested in ("metrics", "val_metrics"):
        yield from ((f"{nested}/{name}", value) for name, value in getattr(point, nested).items())


_MOST: dict[type, int] = {SeriesPoint: 200_000, PendingLog: 20_000, SystemSample: 360}
"""Most items of a kind that are kept."""
_MAX_PER_PULL = 5_000

Durable = PendingEvent | IncidentView | CheckpointView | SuspectedNode | Profiled


class Outbox:
    """Keeps the reports of a supervisor. Sequence numbers count every item that was added; `pull(after)` acknowledges
    everything up to `after`."""

    def __init__(
        self,
        attempt: int,
        *,
        seq: int = 0,
        unacknowledged: tuple[Unacknowledged, ...] = (),
        end: AttemptEnd | None = None,
    ):
        self._attempt = attempt
        self.seq = seq
        """Number of the last item added. Read only."""
        self.acknowledged = 0
        """Number of the last item that the service has stored. Read only."""
        self._durable: deque[tuple[int, Unacknowledged]] = deque((item.seq, item) for item in unacknowledged)
        """The objects stay the same as long as they are here, so the journal writes each of them once."""
        self._bounded: dict[type, deque[tuple[int, Any]]] = {kind: deque(maxlen=most) for kind, most in _MOST.items()}
        self._end = end
        self._stacks: tuple[int, StacksAnswer] | None = None
        self._status: JobStatus | None = None
        self._workers: tuple[WorkerView, ...] = ()
        self._changed = threading.Condition()

    def add(self, *items: Durable | SeriesPoint | PendingLog | SystemSample) -> None:
        with self._changed:
            for item in items:
                self.seq += 1
                if isinstance(item, Durable):
                    self._durable.append((self.seq, Unacknowledged(seq=self.seq, item=item)))
                else:
                    self._bounded[type(item)].append((self.seq, item))
            self._changed.notify_all()

    def set_status(self, status: JobStatus, workers: tuple[WorkerView, ...]) -> None:
        """Keep the newest status. It is sent with the next report; a change of the job's state is a report of its
        own."""
        with self._changed:
            if self._status is None or status.state != self._status.state:
                self.seq += 1
                self._changed.notify_all()
            self._status, self._workers = status, workers

    def add_end(self, end: AttemptEnd) -> None:
        with self._changed:
            self.seq += 1
            self._end = end
            self._changed.notify_all()

    def answer(self, stacks: StacksAnswer) -> None:
        """Keep the answer, in the place of the last one."""
        with self._changed:
            self.seq += 1
            self._stacks = self.seq, stacks
            self._changed.notify_all()

    @property
    def has_status(self) -> bool:
        """True if there is something to report: the first status, or the end."""
        return self._status is not None or self._end is not None

    def pull(self, after: int, wait_s: float) -> SupervisorReports:
        """Wait up to `wait_s` seconds for something newer than `after`, and for the first status; then return what
        there is."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_reports(after), timeout=wait_s)
            self._drop(after)
            return self._reports()

    def unacknowledged(self) -> tuple[int, tuple[Unacknowledged, ...], AttemptEnd | None]:
        """What the journal stores of the outbox."""
        with self._changed:
            return self.seq, tuple(item for _, item in self._durable), self._end

    def _has_reports(self, after: int) -> bool:
        """Return whether there is something newer. There is nothing before the first status: an empty status would
        reset the job's step and loss for a moment."""
        return self._end is not None or (self._status is not None and self.seq > after)

    def _drop(self, after: int) -> None:
        self.acknowledged = max(self.acknowledged, after)
        for queued in (self._durable, *self._bounded.values()):
            while queued and queued[0][0] <= after:
                queued.popleft()
        if self._stacks is not None and self._stacks[0] <= after:
            self._stacks = None

    def _reports(self) -> SupervisorReports:
        seq = self.seq
        for queued in (self._durable, *self._bounded.values()):
            if len(queued) > _MAX_PER_PULL:
                seq = min(seq, queued[_MAX_PER_PULL - 1][0])
        durable = [item.item for number, item in self._durable if number <= seq]
        bounded = {kind: [i for number, i in queued if number <= seq] for kind, queued in self._bounded.items()}
        return SupervisorReports(
            attempt=self._attempt,
            version=WIRE_VERSION,
            seq=seq,
            events=tuple(i for i in durable if isinstance(i, PendingEvent)),
            incidents=tuple({i.id: i for i in durable if isinstance(i, IncidentView)}.values()),
            checkpoints=tuple(
                {(i.step, i.attempt, i.generation): i for i in durable if isinstance(i, CheckpointView)}.values()
            ),
            series=tuple(bounded[SeriesPoint]),
            logs=tuple(bounded[PendingLog]),
            system=tuple(bounded[SystemSample]),
            suspects=tuple(i for i in durable if isinstance(i, SuspectedNode)),
            profiles=tuple(i for i in durable if isinstance(i, Profiled)),
            stacks=self._stacks[1] if self._stacks is not None and self._stacks[0] <= seq else None,
            status=self._status or JobStatus(),
            workers=self._workers,
            end=self._end if seq == self.seq else None,
        )
