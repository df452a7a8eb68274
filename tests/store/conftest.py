"""Stores for the contract suite: every test runs on SQLite and on a real PostgreSQL that this session starts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kit.databases import MigratedDatabases
from kit.postgres import PostgresServer
from shoal_service.reports import SupervisorReports
from shoal_service.store import Lease, Store, driving, reporting, submissions
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState
from shoal_workers.contract.spec import JobSpec

_KINDS = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=_KINDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path, migrated: MigratedDatabases) -> Iterator[str]:
    """A database without rows."""
    if request.param == "sqlite":
        yield migrated.sqlite(tmp_path / "shoal.db")
        return
    with migrated.postgres() as url:
        yield url


@pytest.fixture(params=_KINDS)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'shoal.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.schema() as url:
        yield url


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = Store.open(store_url)
    yield opened
    opened.close()


@pytest.fixture
def lease(store: Store) -> Lease:
    taken = store.acquire_lease("owner-1", ttl_s=1e9, now=0.0)
    assert taken is not None
    return taken


@pytest.fixture
def spec() -> JobSpec:
    return make_spec()


def make_spec(**changes: Any) -> JobSpec:
    return parse_spec({"name": "fish", "stop": {"steps": 100}, "data": {"corpus": "python-stdlib"}, **changes})


@dataclass
class Attempt:
    """Plays the supervisor of one attempt and numbers its reports like a supervisor."""

    store: Store
    job_id: str
    number: int
    epoch: int
    seq: int = 0

    def report(self, state: JobState = JobState.RUNNING, *, now: float = 10.0, **parts: Any) -> None:
        """Something new, with the next number; `status_...` fields go into the status."""
        self.seq += 1
        self.repeat(state, now=now, **parts)

    def repeat(self, state: JobState = JobState.RUNNING, *, now: float = 10.0, **parts: Any) -> None:
        fields = {key.removeprefix("status_"): parts.pop(key) for key in list(parts) if key.startswith("status_")}
        status = JobStatus(state=state, attempt=self.number, **fields)
        reported = SupervisorReports(attempt=self.number, seq=self.seq, status=status, **parts)
        self.store.writing(reporting.apply, self.epoch)(self.job_id, reported, now=now)


@pytest.fixture
def submit(store: Store) -> Callable[..., str]:
    """Submits a job with changed keys; its id."""

    def _submit(now: float = 1.0, **changes: Any) -> str:
        return store.writing(submissions.create)(make_spec(**changes), idempotency_key=None, now=now)[0].id

    return _submit


@pytest.fixture
def begin(store: Store, lease: Lease) -> Callable[..., Attempt]:
    """Begins an attempt of a job that waits in the queue."""

    def _begin(job_id: str, workers: int = 1) -> Attempt:
        number = store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=workers, now=5.0)
        return Attempt(store, job_id, number, lease.epoch)

    return _begin


@pytest.fixture
def job_id(submit: Callable[..., str]) -> str:
    """A job that waits in the queue."""
    return submit()


@pytest.fixture
def attempt(begin: Callable[..., Attempt], job_id: str) -> Attempt:
    """Its first attempt."""
    return begin(job_id)
