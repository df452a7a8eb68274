"""What a signal means to `shoal serve`, what it logs of jobs, and the address that it listens on."""

import asyncio
import logging
import socket
import subprocess
import sys

import pytest

from shoal_api.home_address import format_netloc
from shoal_api.serve import _listen
from shoal_api.stopping import SavingProgress, StopRequest
from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.training import CheckpointCommitted
from shoal_service.core.events.workers import IncidentOpened
from shoal_service.reports import PendingEvent, SupervisorReports
from shoal_service.store import driving, reporting, submissions
from shoal_service.store.driving import DriveRow
from shoal_service.store.store import Store
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import EndReason, IncidentCause, JobState


class Training:
    """A job with an attempt, in a store whose lease is held."""

    def __init__(self, store: Store) -> None:
        self.store = store
        lease = store.acquire_lease("me", ttl_s=100.0, now=0.0)
        assert lease is not None
        self.epoch = lease.epoch
        spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 30}})
        self.id = store.writing(submissions.create)(spec, idempotency_key=None, now=0.0)[0].id
        store.writing(driving.begin_attempt, self.epoch)(self.id, workers=1, now=0.0)
        self.seq = 0

    def report(self, step: int, *, checkpoint: int, end: AttemptEnd | None = None) -> None:
        self.seq += 1
        status = JobStatus(
            state=JobState.RUNNING, attempt=1, step=step, total_steps=30, checkpoint_step=checkpoint, workers=1
        )
        reports = SupervisorReports(attempt=1, seq=self.seq, status=status, workers=(), end=end)
        self.store.writing(reporting.apply, self.epoch)(self.id, reports, now=1.0)

    def rows(self) -> list[DriveRow]:
        return self.store.reading(driving.to_drive)(max_queued=0)


def test_the_first_signal_saves_and_the_second_hurries() -> None:
    async def main() -> None:
        begun: list[int] = []
        stop = StopRequest(saves=True, begin=lambda: begun.append(1))
        stop.signal()
        assert begun == [1] and (stop.requested.is_set(), stop.now.is_set()) == (True, False)
        stop.signal()
        assert stop.now.is_set() and begun == [1]

    asyncio.run(main())


def test_a_server_that_has_nothing_to_save_stops_at_the_first_signal() -> None:
    async def main() -> None:
        stop = StopRequest(saves=False)
        stop.signal()
        assert stop.requested.is_set() and stop.now.is_set()

    asyncio.run(main())


def test_the_terminal_says_what_is_saved_and_repeats_it_while_nothing_changes(store: Store) -> None:
    job, said, clock = Training(store), [], [100.0]
    job.report(19, checkpoint=8)
    progress = SavingProgress(store, said.append, lambda: clock[0])
    progress.show(job.rows())
    progress.show(job.rows())
    assert said[0].startswith("Saving 1 job before the Ray cluster stops. Ctrl-C again: stop at once")
    doing = f"  {job.id}: step 19 of 30 is complete; saves after the one under way"
    assert said[1:] == [doing]
    clock[0] = 111.0
    progress.show(job.rows())
    assert said[2:] == [f"{doing} (for 11 s)"]
    job.report(20, checkpoint=20, end=AttemptEnd(reason=EndReason.SERVER_STOPPED, message="saved.", step=20))
    progress.show(job.rows())
    progress.close(())
    assert said[3:] == [
        f"  {job.id}: saved at step 20, continues there under the next server",
        "Stopping the Ray cluster.",
    ]


def test_what_is_not_saved_is_named_with_its_newest_checkpoint(store: Store) -> None:
    job, said = Training(store), []
    job.report(19, checkpoint=8)
    progress = SavingProgress(store, said.append, lambda: 0.0)
    progress.show(job.rows())
    store.writing(driving.requeue, job.epoch)(job.id, reason=EndReason.CLUSTER_LOST, message="hurried", now=2.0)
    progress.close((job.id,))
    assert said[2:] == [
        f"  {job.id}: not saved; step 19 was reached, the newest checkpoint is of step 8",
        "Stopping the Ray cluster.",
    ]


def test_an_orderly_end_that_could_not_save_the_newest_step_is_not_called_saved(store: Store) -> None:
    job, said = Training(store), []
    progress = SavingProgress(store, said.append, lambda: 0.0)
    progress.show(job.rows())
    job.report(19, checkpoint=8, end=AttemptEnd(reason=EndReason.SERVER_STOPPED, message="", step=19))
    progress.close(())
    assert "not saved; step 19 was reached" in said[2]


def test_a_job_that_had_not_trained_yet_has_nothing_to_save(store: Store) -> None:
    job, said = Training(store), []
    progress = SavingProgress(store, said.append, lambda: 0.0)
    progress.show(job.rows())
    job.report(0, checkpoint=0, end=AttemptEnd(reason=EndReason.SERVER_STOPPED, message="", step=0))
    progress.close(())
    assert said[2] == f"  {job.id}: had completed no step, begins under the next server"


def test_without_a_job_only_the_cluster_is_named(store: Store) -> None:
    said: list[str] = []
    progress = SavingProgress(store, said.append, lambda: 0.0)
    progress.show([])
    progress.close(())
    assert said == ["Stopping the Ray cluster."]


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here"))]
)
def test_a_server_listens_on_addresses_of_both_kinds(host: str) -> None:
    with _listen(host, 0) as listener, socket.create_connection(listener.getsockname()[:2]) as connection:
        assert connection.getpeername()[0] == host


def test_the_words_name_what_is_wrong() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*Choose another with --port"):
            _listen("127.0.0.1", port)
    with pytest.raises(SystemExit, match=r"cannot listen on 192\.0\.2\.1:0: .*Is --host an address of this machine\?"):
        _listen("192.0.2.1", 0)


def test_an_address_with_colons_has_brackets_in_a_url() -> None:
    assert (format_netloc("::1", 8265), format_netloc("127.0.0.1", 80)) == ("[::1]:8265", "127.0.0.1:80")


SPEC = parse_spec({"name": "byte-lm", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 30}})
OPENED = IncidentOpened(
    id=1, cause=IncidentCause.WORKER_DIED, witness="port", ranks=(2,), message="killed", generation=1, workers=4, step=9
)


def _logged(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str, str]]:
    """Events of jobs since the last call: level, name, and job with message."""
    lines = [
        (record.levelno, record.message, f"{record.job_name}: {record.text}")  # type: ignore[attr-defined]
        for record in caplog.records
        if hasattr(record, "job_name")
    ]
    caplog.clear()
    return lines


def test_jobs_incidents_and_ends_are_logged_once_each(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lease = store.acquire_lease("me", ttl_s=100.0, now=0.0)
    assert lease is not None
    job_id = store.writing(submissions.create)(SPEC, idempotency_key=None, now=1.0)[0].id
    assert _logged(caplog) == [(logging.INFO, "job.created", "byte-lm: job created as byte-lm")]
    store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=4, now=2.0)
    assert _logged(caplog) == []

    def report(seq: int, *events: PendingEvent, end: AttemptEnd | None = None) -> None:
        running = JobStatus(state=JobState.RUNNING, attempt=1, step=9)
        reports = SupervisorReports(attempt=1, seq=seq, status=running, events=events, end=end)
        store.writing(reporting.apply, lease.epoch)(job_id, reports, now=3.0)

    report(1)
    assert _logged(caplog) == [(logging.INFO, "job.state", "byte-lm: job STARTING -> RUNNING")]
    report(2, PendingEvent.of(CheckpointCommitted(name="s", step=9, generation=1), 3.0), PendingEvent.of(OPENED, 3.0))
    assert _logged(caplog) == [(logging.ERROR, "incident.opened", "byte-lm: incident worker_died of rank 2: killed")]
    report(3, end=AttemptEnd(reason=EndReason.FINISHED, message="done", step=30))
    assert _logged(caplog) == [(logging.INFO, "job.state", "byte-lm: job RUNNING -> SUCCEEDED (finished): done")]
    assert _logged(caplog) == []


def test_an_event_that_is_not_stored_is_not_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store.trying(submissions.create)(SPEC, idempotency_key=None, now=1.0)
    assert _logged(caplog) == []
    job_id = store.writing(submissions.create)(SPEC, idempotency_key=None, now=1.0)[0].id
    store.writing(submissions.request)(job_id, Desired.PAUSE, now=6.0)
    assert [event for _, event, _ in _logged(caplog)] == ["job.created", "job.state"]


_HIDDEN = """
import ctypes
from shoal_service.process_memory import hide_process
print(ctypes.CDLL(None).prctl(3), hide_process(), ctypes.CDLL(None).prctl(3))  # 3: PR_GET_DUMPABLE
"""


def test_the_kernel_lets_only_root_read_a_hidden_process() -> None:
    shown = subprocess.run([sys.executable, "-c", _HIDDEN], check=True, capture_output=True, text=True)
    assert shown.stdout == "1 True 0\n"
