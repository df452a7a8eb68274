"""A real server on a free port with a real SQLite store, and the Python client that drives it."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from doubles.fake_cluster_source import FakeClusterSource
from kit.databases import MigratedDatabases
from kit.served_app import bare_app, served
from shoal_api.client import Client
from shoal_api.client.credentials import find_token
from shoal_api.http.app import create_app
from shoal_api.http.changes import Changes
from shoal_api.http.serving import HttpConfig
from shoal_api.http.streams import Pace
from shoal_service.control.planning import planning_profile
from shoal_service.control.token_files import ensure_admin_token
from shoal_service.core.events.service import SupervisorRestarted
from shoal_service.core.webhooks import UNRESTRICTED, WebhookRules
from shoal_service.reports import SupervisorReports
from shoal_service.store import Store, driving, reporting
from shoal_service.telemetry.exposition import Exposition, Sources
from shoal_service.telemetry.tallies import PassTimes, RequestMetrics
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.places import EVERYWHERE, AllowedPlaces
from shoal_workers.contract.job import JobState


@dataclass
class Service:
    """A running service, seen from the outside and from the inside."""

    url: str
    store: Store
    cluster: FakeClusterSource
    http: httpx.Client
    client: Client
    requests: RequestMetrics
    epoch: int
    """Epoch of the lease under which the tests write, as the control loop does."""

    changes: Changes
    warnings: list[str]
    """The warnings of the ready service."""
    checkpoint_url: str = ""
    """Directory of the jobs' storage."""
    declarations: Any = None
    """What each route of the application needs."""
    operations: Any = None
    """What `JsonRouter` knows of each route."""

    @property
    def num_watches(self) -> int:
        """Watches of streams (two each) and long polls (one each)."""
        return self.changes.num_watches

    def record(self, job_id: str, number: int) -> None:
        """Append an event to a job's history."""
        event = SupervisorRestarted(found=number, of=number)
        self.store.writing(driving.record_event, self.epoch)(job_id, event, now=time.time())


def own_headers() -> dict[str, str]:
    """What shows the owner's token, for requests without `Client`."""
    return {"Authorization": f"Bearer {find_token('http://127.0.0.1:1')}"}


@pytest.fixture(scope="session", autouse=True)
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Every service of these tests takes the owner's token from here, and every client finds it here."""
    directory = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_STATE_DIR", str(directory))
        patch.setenv("XDG_CONFIG_HOME", str(directory / "config"))
        patch.delenv("SHOAL_TOKEN", raising=False)
        yield directory


@contextmanager
def running(
    store: Store,
    port: int = 0,
    heartbeat_s: float = 0.2,
    grace_s: int = 5,
    checkpoint_url: str = "",
    places: AllowedPlaces = EVERYWHERE,
    webhooks: WebhookRules = UNRESTRICTED,
) -> Iterator[Service]:
    ensure_admin_token(store, Path(os.environ["SHOAL_STATE_DIR"]), now=time.time())
    lease = store.acquire_lease("tests", ttl_s=86_400, now=time.time())  # of a session
    assert lease is not None
    epoch = lease.epoch
    cluster = FakeClusterSource()
    requests = RequestMetrics()
    exposition = Exposition(
        Sources(
            store=store,
            owner="tests",
            requests=requests,
            passes=PassTimes(),
            cluster=cluster.snapshot,
            profile_of=lambda spec: planning_profile(spec, ()),
            state_dir=Path.cwd(),
        )
    )
    warnings: list[str] = []
    app = create_app(
        store=store,
        cluster=cluster,
        scrape=exposition.render,
        version="1.2.3",
        checkpoint_url=checkpoint_url,
        requests=requests,
        pace=Pace(heartbeat_s=heartbeat_s, refresh_s=0.05),
        warnings=lambda: tuple(warnings),
        places=places,
        webhooks=webhooks,
    )
    with socket.create_server(("127.0.0.1", port)) as listener, served(app, address=listener, grace_s=grace_s) as url:
        http = httpx.Client(base_url=url, timeout=30, trust_env=False, headers=own_headers())
        with http, Client(url) as client:
            client.health()
            yield Service(
                url,
                store,
                cluster,
                http,
                client,
                requests,
                epoch,
                app.state.changes,
                warnings,
                checkpoint_url,
                app.state.declarations,
                app.state.operations,
            )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The tests that speak of jobs and their histories run on PostgreSQL too; the others do not depend on the store."""
    if "database" not in metafunc.fixturenames:
        return
    kinds = ["sqlite"]
    if metafunc.module.__name__.rpartition(".")[2] in ON_POSTGRES:
        kinds.append(pytest.param("postgres", marks=pytest.mark.postgres))  # type: ignore[arg-type]
    metafunc.parametrize("database", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an empty database of the kind of the test."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('database')}/shoal.db"
        return
    with request.getfixturevalue("postgres").schema() as url:
        yield url


@pytest.fixture(scope="session")
def service(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all tests that neither stop it nor change its cluster; each test makes its own jobs."""
    directory = tmp_path_factory.mktemp("service")
    store = Store.open(database)
    with running(store, checkpoint_url=str(directory / "checkpoints")) as service:
        yield service
    store.close()


@pytest.fixture
def store(tmp_path: Path, migrated: MigratedDatabases) -> Iterator[Store]:
    store = Store.open(migrated.sqlite(tmp_path / "shoal.db"))
    yield store
    store.close()


@pytest.fixture
def own_service(store: Store) -> Iterator[Service]:
    """A service that the test may break."""
    with running(store) as service:
        yield service


@pytest.fixture
def serve(store: Store, state_dir: Path) -> Iterator[Callable[..., tuple[str, RequestMetrics]]]:
    """`serve(http=..., limits=...)`: URL and metrics of an application over the store that has no cluster."""
    with ExitStack() as applications:

        def run(http: HttpConfig | None = None, **options: Any) -> tuple[str, RequestMetrics]:
            ensure_admin_token(store, state_dir, now=time.time())
            metrics = RequestMetrics()
            app = bare_app(store, requests=metrics, **options)
            return applications.enter_context(served(app, http=http or HttpConfig())), metrics

        yield run


@pytest.fixture
def spec() -> dict[str, object]:
    return {"name": "tiny", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 10}}


ON_POSTGRES = {
    "test_deleted_jobs",
    "test_histories",
    "test_jobs",
    "test_operations",
    "test_overviews",
    "test_projects",
    "test_stored_checkpoints",
    "test_sweeps",
    "test_webhooks",
}
"""Modules."""
Running = Callable[..., AbstractContextManager[Service]]


@pytest.fixture
def run_service() -> Running:
    """Serve a store at a given port, for tests that stop and start the service."""
    return running


def reports(attempt: int, seq: int, **parts: Any) -> SupervisorReports:
    """What a supervisor of that attempt reports."""
    return SupervisorReports(
        attempt=attempt, seq=seq, status=parts.pop("status", JobStatus(state=JobState.RUNNING)), **parts
    )


@pytest.fixture
def supervise(service: Service, spec: dict[str, object]) -> Callable[..., str]:
    """Makes a job that runs, and that has reported the given parts; its id. With an id: that job reports more."""

    def run(job_id: str | None = None, **parts: Any) -> str:
        if job_id is not None:
            service.store.writing(reporting.apply, service.epoch)(job_id, reports(1, 2, **parts), now=time.time())
            return job_id
        job = service.client.submit(spec)
        attempt = service.store.writing(driving.begin_attempt, service.epoch)(job.id, workers=2, now=time.time())
        service.store.writing(reporting.apply, service.epoch)(job.id, reports(attempt, 1, **parts), now=time.time())
        return job.id

    return run
