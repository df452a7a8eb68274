"""HookProcess: the process of a metrics hook beside a worker, and the thread that talks to it.

The worker's control thread calls `forward`, which returns immediately. The thread starts the process with the first
point, passes batches on one after the other, and starts it again, later and later, when it fails or hangs. A new
process asks its tracker what it has, so a repeated batch is logged once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Pipe
from typing import Any

from shoal_workers.contract import HookJob, JobSpec, MetricPoint, MetricsBatch, MetricsProgress, backoff_s

_log = logging.getLogger(__name__)
_MOST_AT_ONCE = 500
"""Points of one request to the process."""
_ANSWER_S = 120.0
"""A process that takes longer for its start or for one request is ended."""
_LONGEST_WAIT_S = 60.0
_LAST_WORDS_S = 1.0
_PROGRAM = "shoal_workers.metrics_hook.program"


def job_of(job_id: str, spec: JobSpec) -> HookJob:
    """Return the job, as its hook gets it."""
    settings = spec.model_dump(mode="json", exclude={"secrets", "webhooks"})
    return HookJob(
        id=job_id, name=spec.name, project=spec.project, user=spec.user, labels=dict(spec.labels), settings=settings
    )


class HookFailed(Exception):
    """The hook raised, ended or did not answer; the message is one line."""


class HookProcess:
    """`forward` and `close` may be called on any thread, and return immediately."""

    def __init__(
        self,
        path: str,
        job: HookJob,
        say: Callable[[str], None],
        mask: Callable[[str], str] = lambda text: text,
        *,
        answer_s: float = _ANSWER_S,
    ) -> None:
        """
        Args:
            path: `metrics.hook` of the spec.
            say: called with each line that the hook prints, on a thread of its own.
            mask: replaces what must not be seen in lines and errors.
        """
        self._path = path
        self._job = job
        self._say = lambda line: say(mask(line))
        self._mask = mask
        self._answer_s = answer_s
        self._changed = threading.Condition()
        self._life = 0
        self._points: deque[MetricPoint] = deque()
        self._received = 0
        self._end = ""
        self._progress = MetricsProgress()
        self._is_closed = False
        self._child: _Child | None = None
        self._thread: threading.Thread | None = None

    def forward(self, batch: MetricsBatch, life: int) -> MetricsProgress:
        """Add points, and say how far the hook is. Each incarnation of a supervisor counts its points anew."""
        with self._changed:
            if life != self._life:
                self._life, self._received = life, 0
                self._points.clear()
                self._progress = MetricsProgress(error=self._progress.error)
            new = [point for point in batch.points if point.seq > self._received]
            self._points.extend(new)
            self._received = new[-1].seq if new else self._received
            self._end = batch.end
            if self._thread is None and (new or batch.end):
                self._thread = threading.Thread(target=self._run, name="metrics-hook", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return self._progress

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            child = self._child
        if child is not None:
            child.kill()

    def _run(self) -> None:
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._has_work())
                if self._is_closed:
                    break
                life, points = self._life, [self._points[i] for i in range(min(len(self._points), _MOST_AT_ONCE))]
            try:
                self._pass_on(points)
            except (HookFailed, OSError) as error:
                failures += 1
                self._fail(str(error), backoff_s(failures, first_s=1.0, longest_s=_LONGEST_WAIT_S))
                continue
            failures = 0
            with self._changed:
                if life == self._life:
                    self._done(points)
        self._end_child()

    def _has_work(self) -> bool:
        return bool(self._points) or (bool(self._end) and not self._progress.has_ended)

    def _pass_on(self, points: list[MetricPoint]) -> None:
        if self._child is None:
            self._child = _Child(self._path, self._say, self._answer_s)
            self._child.ask({"job": self._job.model_dump(mode="json")})
        if points:
            self._child.ask({"points": [point.model_dump() for point in points]})
        else:
            self._child.ask({"end": self._end})
            self._end_child()

    def _done(self, points: list[MetricPoint]) -> None:
        if points:
            while self._points and self._points[0].seq <= points[-1].seq:
                self._points.popleft()
            self._progress = MetricsProgress(logged=points[-1].seq)
        else:
            self._progress = self._progress.model_copy(update={"has_ended": True, "error": ""})

    def _fail(self, error: str, wait_s: float) -> None:
        error = self._mask(error)
        _log.warning("metrics_hook.failed", extra={"hook": self._path, "error": error, "again_in_s": wait_s})
        self._end_child()
        with self._changed:
            self._progress = self._progress.model_copy(update={"error": error})
            self._changed.wait_for(lambda: self._is_closed, timeout=wait_s)

    def _end_child(self) -> None:
        with self._changed:
            child, self._child = self._child, None
        if child is not None:
            child.end()


class _Child:
    """The process. All calls but `end` on one thread."""

    def __init__(self, path: str, say: Callable[[str], None], answer_s: float) -> None:
        self._answer_s = answer_s
        self._pipe, child_end = Pipe()
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, path, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_end.fileno(),),
                env=_environment(),
            )
        self._printing = threading.Thread(target=self._say_all, args=(say,), name="metrics-hook-log", daemon=True)
        self._printing.start()

    def kill(self) -> None:
        """Called from any thread."""
        self._process.kill()

    def ask(self, request: dict[str, Any]) -> None:
        """Return when it is done. Raises HookFailed."""
        with contextlib.suppress(ConnectionError):  # its answer says why it has ended
            self._pipe.send_bytes(json.dumps(request).encode())
        if not self._pipe.poll(self._answer_s):
            raise HookFailed(f"it did not answer within {self._answer_s:.0f} s")
        try:
            answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            raise HookFailed(f"its process ended with status {self._process.wait()}") from None
        if "error" in answer:
            raise HookFailed(str(answer["error"]))

    def end(self) -> None:
        """Return when the process has ended; what it has printed is said by then, unless a child of it prints on."""
        self._process.kill()
        self._process.wait()
        self._printing.join(_LAST_WORDS_S)
        self._pipe.close()

    def _say_all(self, say: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as printed:
            for line in printed:
                say(line.decode(errors="replace").rstrip("\n"))


def _environment() -> dict[str, str]:
    """Environment of the worker, with its secrets; the same modules are found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
