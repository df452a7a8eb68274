import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.event import listen

from kit.databases import MigratedDatabases
from kit.views import series_point
from shoal_service.core.desired import Desired
from shoal_service.core.events.service import SupervisorRestarted
from shoal_service.reports import PendingEvent
from shoal_service.store import (
    IdempotencyConflict,
    Lease,
    LeaseLost,
    RequestConflict,
    Store,
    driving,
    histories,
    job_lists,
    submissions,
)
from shoal_service.store.job_lists import FleetQuery
from shoal_workers.contract.job import JobState
from shoal_workers.contract.spec import JobSpec

Submit = Callable[..., str]


def test_connections_of_many_readers_at_once_are_kept(migrated: MigratedDatabases, tmp_path: Path) -> None:
    """To open one costs more than most transactions."""
    store, num_opened, all_read = Store.open(migrated.sqlite(tmp_path / "shoal.db")), [], threading.Barrier(40)
    listen(store._database._engine, "connect", lambda *_: num_opened.append(1))

    def read(_: int) -> None:
        with store.read():
            all_read.wait(60)

    with ThreadPoolExecutor(40) as threads:
        for _ in range(3):
            [*threads.map(read, range(40))]
    store.close()
    assert len(num_opened) <= 40


def test_events_written_by_many_threads_are_gap_free_and_in_order(
    store: Store, lease: Lease, submit: Submit, spec: JobSpec
) -> None:
    jobs = [submit() for _ in range(2)]
    done = threading.Event()
    broken: list[str] = []

    def create(number: int) -> None:
        for _ in range(10):
            store.writing(submissions.create)(spec, idempotency_key=None, now=1.0)

    def append(number: int) -> None:
        for i in range(25):
            event = SupervisorRestarted(found=number, of=i)
            store.writing(driving.record_event, lease.epoch)(jobs[i % 2], event, now=2.0)

    def follow() -> None:
        """A reader that continues after the last number it saw must see every number."""
        seen = 0
        while not done.is_set() or store.reading(histories.read_events)(jobs[0], after=seen):
            for event in store.reading(histories.read_events)(jobs[0], after=seen):
                if event.seq != seen + 1:
                    broken.append(f"{seen} -> {event.seq}")
                seen = event.seq

    with ThreadPoolExecutor(13) as pool:
        reader = pool.submit(follow)
        for work in [*(pool.submit(create, n) for n in range(8)), *(pool.submit(append, n) for n in range(4))]:
            work.result()
        done.set()
        reader.result()
    assert broken == []
    for number, count in zip(jobs, (52, 48), strict=True):
        assert [event.seq for event in store.reading(histories.read_events)(number)] == list(range(1, count + 2))
    assert len(store.reading(job_lists.page)(FleetQuery(limit=100)).items) == 82


def test_one_of_many_owners_gets_the_lease_and_epochs_only_rise(store: Store) -> None:
    clock = iter(range(10_000))
    lock = threading.Lock()
    won: list[tuple[int, str]] = []

    def fight(owner: str) -> None:
        for _ in range(40):
            with lock:
                now = float(next(clock))
            taken = store.acquire_lease(owner, ttl_s=1.5, now=now)
            if taken is not None:
                won.append((taken.epoch, owner))

    with ThreadPoolExecutor(4) as pool:
        for work in [pool.submit(fight, f"owner-{n}") for n in range(4)]:
            work.result()
    owners_by_epoch: dict[int, set[str]] = {}
    for epoch, owner in won:
        owners_by_epoch.setdefault(epoch, set()).add(owner)
    assert all(len(owners) == 1 for owners in owners_by_epoch.values())
    assert sorted(owners_by_epoch) == list(range(1, len(owners_by_epoch) + 1))


def test_after_a_change_of_owner_the_previous_owner_writes_nothing(store: Store, job_id: str) -> None:
    lock = threading.Lock()
    now = 0.0
    written: list[int] = []
    lost = 0

    def drive(owner: str, rounds: random.Random) -> int:
        nonlocal now
        misses = 0
        for _ in range(15):
            with lock:
                now += 1.0
                mine = store.acquire_lease(owner, ttl_s=0.5, now=now)
            assert mine is not None
            for _ in range(rounds.randrange(1, 4)):
                try:
                    event = SupervisorRestarted(found=mine.epoch, of=mine.epoch)
                    store.writing(driving.record_event, mine.epoch)(job_id, event, now=now)
                except LeaseLost as error:
                    assert error.current_epoch > mine.epoch
                    misses += 1
                    break
        return misses

    with ThreadPoolExecutor(2) as pool:
        for work in [pool.submit(drive, f"owner-{n}", random.Random(n)) for n in range(2)]:
            lost += work.result()
    written = [
        event.data["found"]
        for event in store.reading(histories.read_events)(job_id)
        if event.type == SupervisorRestarted.type
    ]
    assert written == sorted(written)


def test_of_two_specs_with_one_key_one_wins(store: Store, spec: JobSpec) -> None:
    start = threading.Barrier(6)

    def post(number: int) -> str:
        start.wait()
        try:
            changed = spec.model_copy(update={"seed": number % 2})
            return store.writing(submissions.create)(changed, idempotency_key="one", now=1.0)[0].id
        except IdempotencyConflict as error:
            return f"conflict with {error.job_id}"

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(post, range(6)))
    (winner,) = {answer for answer in answers if not answer.startswith("conflict")}
    assert sorted(answers) == sorted([f"conflict with {winner}"] * 3 + [winner] * 3)


def test_a_job_is_started_or_cancelled_never_both(store: Store, lease: Lease, submit: Submit) -> None:
    for _ in range(10):
        job_id = submit()
        start = threading.Barrier(2)

        def begin(job_id: str = job_id, start: threading.Barrier = start) -> bool:
            start.wait()
            try:
                store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=1, now=2.0)
            except RequestConflict:
                return False
            return True

        def cancel(job_id: str = job_id, start: threading.Barrier = start) -> None:
            start.wait()
            store.writing(submissions.request)(job_id, Desired.CANCEL, now=2.0)

        with ThreadPoolExecutor(2) as pool:
            began, cancelled = pool.submit(begin), pool.submit(cancel)
            cancelled.result()
            expected = JobState.CANCELLING if began.result() else JobState.CANCELLED
        assert store.get_job(job_id).status.state is expected


def test_readers_see_only_complete_transactions(store: Store, job_id: str, attempt: Any) -> None:
    done = threading.Event()

    def write() -> None:
        for step in range(1, 60):
            point = series_point(step, at=1.0, lr=1.0, world_size=1)
            attempt.report(status_step=step, series=(point,), events=(PendingEvent(at=1.0, type="step"),))
        done.set()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write)
        while not done.is_set() and not writer.done():
            step = store.get_job(job_id).status.step
            assert len(store.reading(histories.read_series)(job_id)) >= step
            assert sum(event.type == "step" for event in store.reading(histories.read_events)(job_id)) >= step
        writer.result()


@pytest.mark.slow
def test_two_processes_can_open_an_empty_database_at_the_same_time(empty_url: str) -> None:
    program = (
        "import sys; from shoal_service.store import Store, job_lists; sys.stdin.readline(); "
        "s = Store.open(sys.argv[1]); print(s.read_lease(), len(s.reading(job_lists.page)().items)); s.close()"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program, empty_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60) for process in processes]
    assert [(out.strip(), err) for out, err in answers] == [("None 0", "")] * 2
