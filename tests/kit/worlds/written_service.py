"""A real server over a real store, in a thread of this process, without Ray. A test writes reports into the store as a
supervisor does: for the command line, and for pages of states that no real run reaches at once.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from doubles.fake_cluster_source import FakeClusterSource
from kit.served_app import served
from kit.views import incident_view, series_point, worker_view
from shoal_api.client import Client
from shoal_api.http.app import create_app
from shoal_service.control.token_files import ensure_admin_token
from shoal_service.core.access import ADMIN_TOKEN_FILE
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events.training import CheckpointCommitted, GenerationFormed
from shoal_service.core.events.workers import IncidentOpened
from shoal_service.fleet_views import NodeView
from shoal_service.reports import PendingEvent, PendingLog, SupervisorReports
from shoal_service.store import Store, driving, reporting, submissions
from shoal_service.views import CheckpointView, JobStatus, JobView, WorkerView
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import EndReason, IncidentCause, JobState
from shoal_workers.contract.spec import JobSpec

AT = 1_700_000_000.0
SPEC: dict[str, Any] = {
    "name": "byte-lm",
    "data": {"corpus": "python-stdlib"},
    "batch": {"global_size": 32, "micro_size": 4},
    "stop": {"steps": 100},
    "elasticity": {"min_workers": 2, "max_workers": 4},
}
NODE = NodeView(node_id="a" * 56, ip="127.0.0.1", alive=True, cpus=4, gpus=0, memory_gib=8)


@dataclass
class Service:
    """The server's address, and methods that write into its store as a supervisor does."""

    url: str
    store: Store
    epoch: int
    cluster: FakeClusterSource
    token: str
    """The owner's."""
    _seq: dict[str, int] = field(default_factory=dict)
    _attempt: dict[str, int] = field(default_factory=dict)

    @property
    def client(self) -> Client:
        return Client(self.url, token=self.token)

    def add_job(self, **changes: Any) -> JobView:
        return self.submit(parse_spec({**SPEC, **changes}))

    def submit(self, spec: JobSpec) -> JobView:
        return self.store.writing(submissions.create)(spec, idempotency_key=None, now=AT)[0]

    def begin(self, job: JobView, workers: int = 4) -> None:
        self.store.writing(driving.begin_attempt, self.epoch)(job.id, workers=workers, now=AT)
        self._seq[job.id] = 0
        self._attempt[job.id] = self._attempt.get(job.id, 0) + 1

    def report(self, job: JobView, status: JobStatus, **parts: Any) -> None:
        self._seq[job.id] += 1
        reports = SupervisorReports(attempt=self._attempt.get(job.id, 1), seq=self._seq[job.id], status=status, **parts)
        self.store.writing(reporting.apply, self.epoch)(job.id, reports, now=AT)

    def train(self, job: JobView) -> None:
        """Half of a run: a worker was killed and replaced, a checkpoint was committed."""
        self.begin(job)
        self.report(job, RUNNING, events=(formed(1, 4, 0),))
        self.report(
            job,
            RUNNING,
            events=(
                PendingEvent.of(OPENED, AT),
                formed(2, 3, 10),
                PendingEvent.of(CheckpointCommitted(name="step-10", step=10, generation=1), AT),
            ),
            incidents=(INCIDENT,),
            checkpoints=(CHECKPOINT,),
            series=tuple(point(step, 5.0 - step / 10) for step in range(1, 11)),
            logs=(
                PendingLog(at=AT, rank=0, worker_id="worker-0", stream="stdout", text="hello from rank 0"),
                PendingLog(at=AT, rank=1, worker_id="worker-1", stream="stdout", text="hello from rank 1"),
            ),
            workers=tuple(worker(rank) for rank in range(4)),
        )

    def finish(self, job: JobView, reason: EndReason = EndReason.FINISHED, message: str = "done") -> None:
        self.report(job, RUNNING, end=AttemptEnd(reason=reason, message=message, step=100))


RUNNING = JobStatus(
    state=JobState.RUNNING,
    attempt=1,
    generation=1,
    workers=4,
    desired_workers=4,
    step=10,
    total_steps=100,
    loss=4.0,
    tokens_per_s=1234.0,
    eta_s=42.0,
    num_parameters=1000,
    layout="fsdp4",
)
INCIDENT = incident_view(
    ranks=(2,),
    worker_ids=("worker-2",),
    at=AT,
    to_workers=3,
    detect_s=0.03,
    recovery_s=1.5,
    steps_lost=1,
    closed=True,
    message="killed",
)
CHECKPOINT = CheckpointView(
    step=10,
    url="/tmp/x/step-10",
    state="committed",
    bytes=2048,
    seconds=0.5,
    committed_at=AT,
    attempt=1,
    generation=1,
    world_size=4,
)


def formed(generation: int, workers: int, start_step: int) -> PendingEvent:
    event = GenerationFormed(
        generation=generation,
        workers=workers,
        start_step=start_step,
        steps_lost=0,
        form_s=0.1,
        build_s=0.1,
        restore_s=0.1,
        num_parameters=1000,
        layout=f"fsdp{workers}",
    )
    return PendingEvent.of(event, AT)


OPENED = IncidentOpened(
    id=1,
    cause=IncidentCause.WORKER_DIED,
    witness="ray",
    ranks=(2,),
    message="SIGKILL",
    generation=1,
    workers=4,
    step=10,
)


def point(step: int, loss: float) -> SeriesPoint:
    return series_point(step, at=AT + step, loss=loss, lr=1e-3, tokens_per_s=100, world_size=4)


def worker(rank: int) -> WorkerView:
    return worker_view(rank, worker_id=f"worker-{rank}", node_id="a" * 56, pid=1000 + rank, step=10)


@contextmanager
def written_service(
    store_url: str, *, state_dir: Path, checkpoints: Path, address: socket.socket | None = None
) -> Iterator[Service]:
    """`state_dir`: the token of the server's owner is written into it. `address`: see `served`."""
    store = Store.open(store_url)
    ensure_admin_token(store, state_dir, now=AT)
    lease = store.acquire_lease("test", ttl_s=1e9, now=AT)
    assert lease is not None
    cluster = FakeClusterSource(NODE, owner="test")
    app = create_app(
        store=store,
        cluster=cluster,
        scrape=lambda accept: (b"", "text/plain"),
        version="0.1.0",
        checkpoint_url=str(checkpoints),
    )
    try:
        with served(app, address=address) as url:
            token = (state_dir / ADMIN_TOKEN_FILE).read_text().strip()
            yield Service(url=url, store=store, epoch=lease.epoch, cluster=cluster, token=token)
    finally:
        store.close()
