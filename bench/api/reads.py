"""Reads of a full database: a scrape of 1,000 jobs that train, and the page of a job of 1,000,000 steps."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.processes.os_processes import cpu_seconds
from shoal_service.control.token_files import ensure_admin_token
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.events.service import SupervisorRestarted
from shoal_service.core.goodput import Goodput
from shoal_service.reports import PendingEvent, PendingLog, SupervisorReports
from shoal_service.store import Store, driving, reporting, submissions
from shoal_service.views import CheckpointView, IncidentView, JobStatus, WorkerView
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import IncidentCause, JobState
from shoal_workers.contract.messages import LogStream, Phase, WorkerUse

NUM_JOBS, NUM_STEPS = 1_000, 1_000_000
_WORKERS = 4
_SCRAPES, _VIEWS = 12, 12
_APART_S = 1.1
"""Pause between two scrapes. The service keeps what it has read for a second, and each scrape is to read anew."""
_AT_ONCE = 2_000
_PAGE_PARTS = 8
"""Events of a stream's first answer: job, series, samples, incidents, workers, checkpoints, events, logs."""


def measure_scrape(folder: Path) -> dict[str, Any]:
    url = f"sqlite:///{folder}/shoal.db"
    store = Store.open(url)
    jobs = [Attempt(store, f"job-{number}") for number in range(NUM_JOBS)]
    for job in jobs:
        job.report(step=1, incidents=_incidents(1), checkpoints=_checkpoints(2))
    times_s, cpu_s, size, begun_mono = [], 0.0, 0, 0.0
    with http_edge(store, url) as edge:
        for turn in range(_SCRAPES):
            for job in jobs:
                job.report(step=2 + turn, series=(point(2 + turn),))
            time.sleep(max(0.0, begun_mono + _APART_S - time.monotonic()))
            begun_mono, before_s = time.monotonic(), cpu_seconds(edge.pid)
            size = len(fetch(edge, "/metrics", accept="application/openmetrics-text;version=1.0.0"))
            times_s.append(time.monotonic() - begun_mono)
            cpu_s += cpu_seconds(edge.pid) - before_s if turn else 0.0
    store.close()
    found = {**times("scrape", times_s[1:]), "scrape_first_ms": round(times_s[0] * 1e3, 1), "scrape_kb": size // 1000}
    found["scrape_cpu_ms"] = round(cpu_s / (_SCRAPES - 1) * 1e3)
    print(
        f"GET /metrics, {NUM_JOBS:,} jobs that train: p50 {found['scrape_p50_ms']} ms, worst {found['scrape_max_ms']} "
        f"ms, the first one {found['scrape_first_ms']} ms; CPU {found['scrape_cpu_ms']} ms; {found['scrape_kb']:,} kB"
    )
    return found


def measure_page(folder: Path) -> dict[str, Any]:
    url = f"sqlite:///{folder}/shoal.db"
    store = Store.open(url)
    job = Attempt(store, "long")
    for begin in range(1, NUM_STEPS, _AT_ONCE):
        job.report(step=begin + _AT_ONCE - 1, series=tuple(point(step) for step in range(begin, begin + _AT_ONCE)))
    event, line = SupervisorRestarted(found=4, of=4), "step 1000000: a line of the log, as long as such lines are"
    job.report(
        step=NUM_STEPS,
        incidents=_incidents(40),
        checkpoints=_checkpoints(40),
        events=tuple(PendingEvent.of(event, time.time()) for _ in range(500)),
        logs=tuple(
            PendingLog(at=time.time(), rank=0, worker_id="w", stream=LogStream.STDOUT, text=line) for _ in range(1000)
        ),
    )
    times_s, overview_s, cpu_s, body = [], [], 0.0, b""
    with http_edge(store, url) as edge:
        for _ in range(_VIEWS):
            job.report(step=NUM_STEPS)  # a change, so that no answer is kept from the view before
            begun_mono, before_s = time.monotonic(), cpu_seconds(edge.pid)
            body = first_answer(edge, f"/v1/jobs/{job.id}/overview?logs=true")
            times_s.append(time.monotonic() - begun_mono)
            cpu_s += cpu_seconds(edge.pid) - before_s
            begun_mono = time.monotonic()
            fetch(edge, f"/v1/jobs/{job.id}/overview")
            overview_s.append(time.monotonic() - begun_mono)
    store.close()
    found = {
        **times("page", times_s),
        **times("overview", overview_s),
        "page_cpu_ms": round(cpu_s / _VIEWS * 1e3),
        "page_kb": len(body) // 1000,
        "page_gzip_kb": len(gzip.compress(body)) // 1000,
    }
    print(
        f"page of a job of {NUM_STEPS:,} steps: p50 {found['page_p50_ms']} ms, worst {found['page_max_ms']} ms, "
        f"CPU {found['page_cpu_ms']} ms, {found['page_kb']} kB; GET .../overview p50 {found['overview_p50_ms']} ms"
    )
    return found


class Attempt:
    """Plays the supervisor of one job."""

    def __init__(self, store: Store, name: str, **changes: Any) -> None:
        self._store = store
        lease = store.acquire_lease("bench", ttl_s=1e6, now=time.time())
        assert lease is not None
        self._epoch, self._seq = lease.epoch, 0
        spec = parse_spec(
            {
                "name": name,
                "data": {"corpus": "python-stdlib"},
                "stop": {"steps": 2 * NUM_STEPS},
                "elasticity": {"min_workers": 1, "max_workers": _WORKERS},
                **changes,
            }
        )
        self.id = store.writing(submissions.create)(spec, idempotency_key=None, now=time.time())[0].id
        self._number = store.writing(driving.begin_attempt, self._epoch)(self.id, workers=_WORKERS, now=time.time())

    def report(self, *, step: int, **parts: Any) -> None:
        self._seq += 1
        now = time.time()
        status = JobStatus(
            state=JobState.RUNNING,
            attempt=self._number,
            generation=1,
            workers=_WORKERS,
            desired_workers=_WORKERS,
            layout="fsdp4",
            step=step,
            total_steps=2 * NUM_STEPS,
            loss=2 + 1 / step,
            metrics={"accuracy": 0.5, "perplexity": 7.5},
            tokens_per_s=1e5,
            tokens=step * 1000,
            grad_norm=1.5,
            lr=1e-3,
            step_s=0.3,
            step_at=now,
            communication_share=0.1,
            data_share=0.01,
            incidents=1,
            goodput=Goodput(at=now, seconds={}, total=0.0, ratio=None),
        )
        workers = tuple(_worker(rank, step, now) for rank in range(_WORKERS))
        reports = SupervisorReports(attempt=self._number, seq=self._seq, status=status, workers=workers, **parts)
        self._store.writing(reporting.apply, self._epoch)(self.id, reports, now=now)


def point(step: int) -> SeriesPoint:
    return SeriesPoint(
        step=step,
        at=1e9 + 0.3 * step,
        loss=2 + math.sin(step / 1e5) / 10 + (step % 97) / 1000,
        grad_norm=1 + (step % 31) / 100,
        lr=1e-3 * (1 - step / (2 * NUM_STEPS)),
        tokens_per_s=1e5 + step % 1013,
        step_s=0.3 + (step % 11) / 1000,
        world_size=4 - (step // 50_000) % 2,
        generation=1 + step // 50_000,
        val_loss=2.1 if step % 1000 == 0 else None,
        metrics={"accuracy": (step % 1000) / 1000, "perplexity": 7.5},
    )


def _worker(rank: int, step: int, now: float) -> WorkerView:
    use = {"shm_bytes": 1 << 34, "shm_free_bytes": 1 << 33, "disk_bytes": 1 << 40, "disk_free_bytes": 1 << 39}
    return WorkerView(
        worker_id=f"bench/{rank}",
        rank=rank,
        state="training",
        node_id=f"node-{rank}",
        node_ip="127.0.0.1",
        pid=1000 + rank,
        generation=1,
        phase=Phase.FORWARD,
        step=step,
        use=WorkerUse(at=now, cpu_cores=1.0, resident_bytes=1 << 30, **use),
    )


def _incidents(count: int) -> tuple[IncidentView, ...]:
    return tuple(
        IncidentView(
            id=number,
            cause=IncidentCause.WORKER_DIED,
            witness="run call",
            ranks=(1,),
            worker_ids=("bench/1",),
            generation=number,
            at=1e9 + number * 5000.0,
            from_workers=4,
            to_workers=3,
            recovery_s=0.5,
            detect_s=0.05,
            steps_lost=0,
            from_layout="fsdp4",
            to_layout="fsdp3",
            closed=True,
            message="the worker's process was killed by signal 9 (SIGKILL)",
        )
        for number in range(1, count + 1)
    )


def _checkpoints(count: int) -> tuple[CheckpointView, ...]:
    return tuple(
        CheckpointView(
            step=number * 10,
            url=f"/checkpoints/step-{number * 10}",
            state="committed",
            bytes=10**9,
            seconds=2.0,
            committed_at=1e9 + number,
            attempt=1,
            generation=1,
        )
        for number in range(1, count + 1)
    )


@dataclass(frozen=True)
class Edge:
    port: int
    headers: dict[str, str]
    pid: int


@contextlib.contextmanager
def http_edge(store: Store, url: str) -> Iterator[Edge]:
    token = ensure_admin_token(store, Path(url.removeprefix("sqlite:///")).parent, now=time.time()).read_text().strip()
    program = Path(__file__).with_name("http_edge.py")
    process = subprocess.Popen([sys.executable, str(program), url], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        edge = Edge(int(process.stdout.readline()), {"Authorization": f"Bearer {token}"}, process.pid)
        fetch(edge, "/healthz")
        yield edge
    finally:
        process.terminate()
        process.wait(30)


def fetch(edge: Edge, path: str, *, accept: str = "application/json") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", edge.port, timeout=120)
    connection.request("GET", path, headers={"Accept": accept, **edge.headers})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    assert response.status == 200, (response.status, body[:500])
    return body


def first_answer(edge: Edge, path: str) -> bytes:
    """Reads all parts that a page needs before it shows anything; then closes the page."""
    connection = http.client.HTTPConnection("127.0.0.1", edge.port, timeout=120)
    connection.request("GET", path, headers={"Accept": "text/event-stream", **edge.headers})
    response, lines, num_parts = connection.getresponse(), [], 0
    while num_parts < _PAGE_PARTS:
        line = response.readline()
        lines.append(line)
        num_parts += line.startswith(b"event:")
    while line.strip():
        line = response.readline()
        lines.append(line)
    connection.close()
    return b"".join(lines)


def times(name: str, times_s: list[float]) -> dict[str, float]:
    return {
        f"{name}_p50_ms": round(statistics.median(times_s) * 1e3, 1),
        f"{name}_max_ms": round(max(times_s) * 1e3, 1),
    }
