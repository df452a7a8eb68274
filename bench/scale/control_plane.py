"""The control plane's side of one attempt: it pulls the supervisor's reports and stores them, as the driver does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from shoal_service.reports import SupervisorReports
from shoal_service.store import Store, driving, reporting, submissions
from shoal_workers.contract.spec import JobSpec

_PULL_S = 10.0
_PAUSE_S = 0.05
_LEASE_S = 3600.0


class ControlPlane:
    """The shipped store on SQLite, and a thread of its own that pulls and stores the reports of one attempt."""

    def __init__(self, folder: Path, spec: JobSpec, num_workers: int) -> None:
        self._store = Store.open(f"sqlite:///{folder / 'shoal.db'}")
        now = time.time()
        lease = self._store.acquire_lease("bench", ttl_s=_LEASE_S, now=now)
        assert lease is not None
        self.epoch = lease.epoch
        view, _ = self._store.writing(submissions.create)(spec, idempotency_key=None, now=now)
        self.job_id = view.id
        self._store.writing(driving.begin_attempt, self.epoch)(view.id, workers=num_workers, now=now)
        self.seconds: list[float] = []
        """Duration of each transaction that stores reports."""
        self.cpu_s = 0.0
        self._is_ended = False
        self._thread: threading.Thread | None = None

    def follow(
        self,
        pull: Callable[[int, float], SupervisorReports],
        seen: Callable[[SupervisorReports], None] = lambda reports: None,
    ) -> None:
        """`pull(after, wait_s)` returns the reports after that number; `seen` is called with each on the thread."""
        self._thread = threading.Thread(target=self._follow, args=(pull, seen), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_ended = True
        if self._thread is not None:
            self._thread.join(_PULL_S + 5.0)
        self._store.close()

    def _follow(
        self, pull: Callable[[int, float], SupervisorReports], seen: Callable[[SupervisorReports], None]
    ) -> None:
        after = 0
        while not self._is_ended:
            reports = pull(after, 0.5)
            if reports.seq == after:
                continue
            after = reports.seq
            began, cpu = time.perf_counter(), time.thread_time()
            # Over the wire it is a document, so it is one here.
            received = type(reports).model_validate_json(reports.model_dump_json())
            self._store.writing(reporting.apply, self.epoch)(self.job_id, received, now=time.time())
            self.seconds.append(time.perf_counter() - began)
            self.cpu_s += time.thread_time() - cpu
            seen(received)
            time.sleep(_PAUSE_S)
