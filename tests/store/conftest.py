"""Stores for the contract suite: every test runs on SQLite and on a real PostgreSQL that this session starts."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from shoal_service.reports import SupervisorReports
from shoal_service.store import Lease, Store
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState
from shoal_workers.contract.spec import JobSpec


@dataclass(frozen=True)
class PostgresServer:
    """A cluster of its own in a temporary directory, on a free port of loopback."""

    programs: Path
    user: str | None
    port: int

    def run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self.programs / program), *arguments], check=True, user=self.user, cwd="/", capture_output=True
        )

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(f"postgresql://shoal@127.0.0.1:{self.port}/postgres", autocommit=True)

    def schema_url(self, name: str) -> str:
        """A schema looks like a database of its own, and costs a hundredth of one to make."""
        return f"postgresql://shoal@127.0.0.1:{self.port}/postgres?options=-csearch_path%3D{name}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    programs = _postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server programs (initdb, pg_ctl) are not installed")
    user = _unprivileged_user()
    # Not pytest's tmp_path: other users may not read it, and its path may be too long for a Unix socket.
    home = Path(tempfile.mkdtemp(prefix="shoal-pg-"))
    try:
        home.chmod(0o700)
        if user is not None:
            account = pwd.getpwnam(user)
            os.chown(home, account.pw_uid, account.pw_gid)
        server = PostgresServer(programs, user, _free_port())
        data = str(home / "data")
        server.run("initdb", "-D", data, "-U", "shoal", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        settings = f"-c listen_addresses=127.0.0.1 -c port={server.port} -c unix_socket_directories={home} "
        settings += "-c fsync=off -c synchronous_commit=off -c full_page_writes=off -c max_connections=100"
        server.run("pg_ctl", "-D", data, "-w", "-l", str(home / "log"), "-o", settings, "start")
        try:
            yield server
        finally:
            server.run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'shoal.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = f"shoal_{uuid.uuid4().hex[:12]}"
    with server.connect() as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
        yield server.schema_url(name)
        connection.execute(f"DROP SCHEMA {name} CASCADE".encode())


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
        self.store.apply(self.job_id, reported, epoch=self.epoch, now=now)


@pytest.fixture
def submit(store: Store) -> Callable[..., str]:
    """Submits a job with changed keys; its id."""

    def _submit(now: float = 1.0, **changes: Any) -> str:
        return store.create_job(make_spec(**changes), idempotency_key=None, now=now)[0].id

    return _submit


@pytest.fixture
def begin(store: Store, lease: Lease) -> Callable[..., Attempt]:
    """Begins an attempt of a job that waits in the queue."""

    def _begin(job_id: str, workers: int = 1) -> Attempt:
        number = store.begin_attempt(job_id, workers=workers, epoch=lease.epoch, now=5.0)
        return Attempt(store, job_id, number, lease.epoch)

    return _begin


def _postgres_programs() -> Path | None:
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    candidates = [*installed, *([Path(on_path).resolve().parent] if on_path else [])]
    desired = ("initdb", "pg_ctl")
    return next((path for path in candidates if all((path / name).exists() for name in desired)), None)


def _unprivileged_user() -> str | None:
    """initdb refuses to run as root."""
    if os.geteuid() != 0:
        return None
    names = {account.pw_name for account in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
