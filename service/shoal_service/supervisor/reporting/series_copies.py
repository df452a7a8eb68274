"""The copies of a job's series beside the control plane's: TensorBoard event files, and points for its metrics hook.

    EventFiles      <checkpoint.url>/<job id>/tensorboard/events.out.tfevents.*      (`checkpoint.tensorboard`)
                    one file per life of a supervisor
    MetricBacklog   the points that the hook has not logged yet (`metrics.hook`); `metrics_forwarder` takes them out

The reporter adds the points to both. Hidden here: which numbers of a point are named how, and that a file system may
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
from collections.abc import Callable, Iterator
from typing import Any

from shoal_service.core.downsampling import SeriesPoint
from shoal_workers.checkpoint.local import LocalDirectory
from shoal_workers.checkpoint.storage import open_job_directory
from shoal_workers.contract.messages import MetricPoint

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
