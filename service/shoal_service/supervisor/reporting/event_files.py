"""EventFiles: the series of a job as TensorBoard event files, beside its checkpoints (`checkpoint.tensorboard`).

    <checkpoint.url>/<job id>/tensorboard/events.out.tfevents.*      one file per life of a supervisor

The reporter adds the points; a thread of its own writes them, because a file system may hang. It never delays and never
ends an attempt: if the files cannot be written, it says so once and stops. Steps that are computed again replace the
ones before: TensorBoard drops what follows a start of session.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from shoal_service.supervisor.reporting.scalars import scalars
from shoal_service.views import SeriesPoint
from shoal_workers.checkpoint.local import LocalDirectory
from shoal_workers.checkpoint.storage import open_job_directory

_MAX_WAITING = 10_000
"""Points; a file system that is away for longer loses the newest."""


class EventFiles:
    """`add` and `close` are called on one thread; neither waits for the file system.

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
        """The newest completed step, or the same again with its validation."""
        self._put(point)

    def close(self) -> None:
        """No point comes any more."""
        self._put(None)

    def wait(self, timeout_s: float) -> bool:
        """After `close`: whether everything is written within that time."""
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
    """`without`: the same step as it was written before; only what is new is written."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    known = dict(scalars(without)) if without is not None else {}
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(point) if known.get(tag) != value]
    return Event(wall_time=point.at, step=point.step, summary=Summary(value=values))
