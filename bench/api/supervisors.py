"""What running jobs cost the service: played supervisors that report each second and keep their long polls open.

The service is `played_service.py`, a process of its own with control loop, drivers, REST edge and SQLite: all that the
service is but for the gateway, whose work does not depend on reports. This process plays the supervisors and the pages,
over HTTP, on one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from api.pages import Pages
from kit.processes.os_processes import cpu_seconds
from shoal_service.control.token_files import ensure_admin_token
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.goodput import Goodput
from shoal_service.home import HomeReport
from shoal_service.reports import SupervisorReports
from shoal_service.store import Store, submissions
from shoal_service.views import JobStatus, WorkerView
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState
from shoal_workers.contract.messages import Phase

_EVERY_S = 1.0
"""Seconds between two reports of a job."""
_WORKERS = 2
_POLL_S = 20.0
_SETTLE_S = 5.0
_STARTS_S = 300.0
_SCRAPES = 12
_APART_S = 1.1
"""Pause between two scrapes. The service keeps what a scrape has read for a second, and each is to read anew."""
_SPEC = {
    "data": {"corpus": "python-stdlib"},
    "stop": {"steps": 10_000_000},
    "elasticity": {"min_workers": _WORKERS, "max_workers": _WORKERS},
}


def measure_reports(folder: Path, *, jobs: int, pages: int, points: int, seconds: float, tree: Path | None) -> Any:
    """Measures reports: `jobs` report each second, with `points` steps each; `pages` of one of them are open."""
    return asyncio.run(_reports(folder, jobs=jobs, pages=pages, points=points, seconds=seconds, tree=tree))


def measure_polls(folder: Path, *, polls: int, orders: int, tree: Path | None) -> Any:
    """Measures this many open long polls, while one job after the other is cancelled."""
    return asyncio.run(_polls(folder, polls=polls, orders=orders, tree=tree))


def measure_running_scrape(folder: Path, *, jobs: int, tree: Path | None) -> Any:
    """Measures `GET /metrics` while all of these jobs report each second."""
    return asyncio.run(_running_scrape(folder, jobs=jobs, tree=tree))


async def _reports(
    folder: Path, *, jobs: int, pages: int, points: int, seconds: float, tree: Path | None
) -> dict[str, Any]:
    async with _training(folder, jobs, tree) as service:
        reporting = [asyncio.create_task(one.report_forever(points)) for one in service.supervisors]
        await asyncio.sleep(_SETTLE_S)
        before_s, before_reports, begun_mono = cpu_seconds(service.pid), service.num_reports(), time.monotonic()
        await asyncio.sleep(seconds / 2)
        alone = (cpu_seconds(service.pid) - before_s) / (time.monotonic() - begun_mono)
        per_report_ms = (cpu_seconds(service.pid) - before_s) / (service.num_reports() - before_reports) * 1e3
        watched = service.supervisors[0]
        found = await Pages(service.port, service.admin, watched.job_id, pages).follow(service.pid, seconds)
        receipts = sorted(took for one in service.supervisors for took in one.receipts_ms)
        late = max(one.worst_gap_s for one in service.supervisors)
        await stop_tasks(reporting)
    result = {
        "reports_jobs": jobs,
        "reports_points": points,
        "reports_cpu_share": round(alone, 3),
        "reports_cpu_ms": round(per_report_ms, 2),
        "reports_receipt_p50_ms": round(statistics.median(receipts)),
        "reports_receipt_p99_ms": round(receipts[int(len(receipts) * 0.99)]),
        "reports_slowest_gap_s": round(late, 2),
        **{f"reports_{name}": value for name, value in found.items()},
    }
    print(
        f"{jobs} jobs report each {_EVERY_S:g} s, {points} steps each: CPU of the service {alone:.0%} of a core, "
        f"{per_report_ms:.2f} ms per report; receipt p50 {result['reports_receipt_p50_ms']} ms, p99 "
        f"{result['reports_receipt_p99_ms']} ms. With {pages} pages of one job: {found['cpu_share']:.0%} of a core; "
        f"from a report to the last page p50 {found['stream_p50_ms']} ms, p99 {found['stream_p99_ms']} ms"
    )
    return result


async def _polls(folder: Path, *, polls: int, orders: int, tree: Path | None) -> dict[str, Any]:
    async with _training(folder, polls, tree, is_polled=False) as service:
        # First and without a pause: one that has reported and is silent for 15 s is given another token.
        reporting = [asyncio.create_task(one.signs_forever()) for one in service.supervisors]
        await asyncio.sleep(_SETTLE_S)
        bare_mib = service.rss_mib()
        polling = [asyncio.create_task(one.poll_forever()) for one in service.supervisors]
        await asyncio.gather(*(one.polled.wait() for one in service.supervisors))
        rss_mib, before_s, begun_mono = service.rss_mib(), cpu_seconds(service.pid), time.monotonic()
        await asyncio.sleep(2 * _POLL_S)
        share = (cpu_seconds(service.pid) - before_s) / (time.monotonic() - begun_mono)
        admin, times_ms = Connection(service.port, service.admin), []
        for one in service.supervisors[:orders]:
            one.directed.clear()
            begun_mono = time.monotonic()
            await admin.ask("POST", f"/v1/jobs/{one.job_id}/cancel")
            await asyncio.wait_for(one.directed.wait(), 30)
            times_ms.append((time.monotonic() - begun_mono) * 1e3)
        await stop_tasks([*polling, *reporting])
    result = {
        "polls": polls,
        "polls_rss_mib": round(rss_mib),
        "polls_kib_each": round((rss_mib - bare_mib) * 1024 / polls),
        "polls_cpu_share": round(share, 3),
        "order_p50_ms": round(statistics.median(times_ms)),
        "order_max_ms": round(max(times_ms)),
    }
    print(
        f"{polls} long polls open, and a sign of life of each job every second: CPU of the service {share:.0%} of a "
        f"core, {rss_mib:.0f} MiB ({result['polls_kib_each']} KiB a poll); from the request to cancel a job to its "
        f"supervisor p50 {result['order_p50_ms']} ms, worst {result['order_max_ms']} ms of {orders}"
    )
    return result


async def _running_scrape(folder: Path, *, jobs: int, tree: Path | None) -> dict[str, Any]:
    async with _training(folder, jobs, tree) as service:
        reporting = [asyncio.create_task(one.report_forever(1)) for one in service.supervisors]
        await asyncio.sleep(_SETTLE_S)
        scrape = Connection(service.port, service.admin)
        times_ms = []
        for _ in range(_SCRAPES):
            begun_mono = time.monotonic()
            await scrape.ask("GET", "/metrics")
            times_ms.append((time.monotonic() - begun_mono) * 1e3)
            await asyncio.sleep(_APART_S)
        await stop_tasks(reporting)
    result = {
        "running_scrape_p50_ms": round(statistics.median(times_ms)),
        "running_scrape_max_ms": round(max(times_ms)),
    }
    print(
        f"GET /metrics while {jobs} jobs report each second: p50 {result['running_scrape_p50_ms']} ms, worst "
        f"{result['running_scrape_max_ms']} ms"
    )
    return result


class Connection:
    """A kept-alive connection."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        reader, writer = self._streams
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nAuthorization: Bearer {self._token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if "transfer-encoding: chunked" in answer:
            chunks = []
            while size := int(await reader.readline(), 16):
                chunks.append((await reader.readexactly(size + 2))[:-2])
            await reader.readline()
            found = b"".join(chunks)
        else:
            found = await reader.readexactly(int(answer.partition("content-length:")[2].split()[0]))
        assert answer.startswith("http/1.1 20"), (answer, found[:300])
        return found


@dataclass
class Supervisor:
    """Plays the supervisor of one attempt."""

    port: int
    job_id: str
    attempt: int
    token: str
    offset_s: float
    receipts_ms: list[float] = field(default_factory=list)
    worst_gap_s: float = 0.0
    polled: asyncio.Event = field(default_factory=asyncio.Event)
    directed: asyncio.Event = field(default_factory=asyncio.Event)
    _seq: int = 0
    _step: int = 0
    _known: int = 0

    def __post_init__(self) -> None:
        self._path = f"/v1/jobs/{self.job_id}/attempts/{self.attempt}"
        self._reports, self._polls = Connection(self.port, self.token), Connection(self.port, self.token)

    async def report_forever(self, points: int) -> None:
        await self._every_second(lambda: self.report_once(points))

    async def signs_forever(self) -> None:
        await asyncio.sleep(self.offset_s)
        await self.report_once(1)
        await self._every_second(self._sign)

    async def _every_second(self, send: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(self.offset_s)
        next_mono = sent_mono = time.monotonic()
        while True:
            await send()
            next_mono = max(next_mono + _EVERY_S, time.monotonic())
            await asyncio.sleep(next_mono - time.monotonic())
            self.worst_gap_s = max(self.worst_gap_s, time.monotonic() - sent_mono)
            sent_mono = time.monotonic()

    async def report_once(self, points: int) -> None:
        now = time.time()
        series = tuple(_point(self._step + 1 + n, now) for n in range(points))
        self._step += points
        status = JobStatus(
            state=JobState.RUNNING,
            attempt=self.attempt,
            generation=1,
            workers=_WORKERS,
            desired_workers=_WORKERS,
            layout="dp2",
            step=self._step,
            loss=2.0,
            tokens_per_s=1e5,
            tokens=self._step * 1000,
            step_s=_EVERY_S / points,
            step_at=now,
            goodput=Goodput(at=now, seconds={"productive": 1.0 * self._step}, total=1.0 * self._step, ratio=1.0),
        )
        workers = tuple(_worker(self.job_id, rank, self._step) for rank in range(_WORKERS))
        reports = SupervisorReports(
            attempt=self.attempt, seq=self._seq + 1, series=series, status=status, workers=workers
        )
        await self._send(HomeReport(life=1, after=self._seq, reports=reports))

    async def _sign(self) -> None:
        await self._send(HomeReport(life=1, after=self._seq))

    async def _send(self, report: HomeReport) -> None:
        body = to_json(report.model_dump(), inf_nan_mode="constants", serialize_unknown=True)
        begun_mono = time.monotonic()
        answer = await self._reports.ask("POST", f"{self._path}/reports", body)
        self.receipts_ms.append((time.monotonic() - begun_mono) * 1e3)
        self._seq = json.loads(answer)["acknowledged"]

    async def poll_forever(self) -> None:
        while True:
            answer = json.loads(
                await self._polls.ask("GET", f"{self._path}/directive?after={self._known}&wait_s={_POLL_S:g}")
            )
            self.polled.set()
            if answer["directive"] is not None:
                self._known = answer["number"]
                self.directed.set()


@dataclass
class Service:
    admin: str
    port: int
    pid: int
    supervisors: list[Supervisor]

    def rss_mib(self) -> float:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    def num_reports(self) -> int:
        return sum(len(one.receipts_ms) for one in self.supervisors)


@contextlib.asynccontextmanager
async def _training(folder: Path, jobs: int, tree: Path | None, *, is_polled: bool = True) -> AsyncIterator[Service]:
    """Runs a service whose jobs have all begun, each with an open long poll."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two connections of each supervisor, here and there
    with _process(folder, jobs, tree) as service:
        polling = [asyncio.create_task(one.poll_forever()) for one in service.supervisors if is_polled]
        try:
            yield service
        finally:
            await stop_tasks(polling)


@contextlib.contextmanager
def _process(folder: Path, jobs: int, tree: Path | None) -> Iterator[Service]:
    with played_service(folder, tree) as (store, process, service):
        for _ in range(jobs):
            store.writing(submissions.create)(parse_spec(_SPEC), idempotency_key=None, now=time.time())
        watchdog = threading.Timer(_STARTS_S, process.kill)  # its output ends
        watchdog.start()
        while len(service.supervisors) < jobs:
            assert process.stdout is not None
            started = json.loads(process.stdout.readline())
            offset_s = len(service.supervisors) / jobs * _EVERY_S
            one = Supervisor(service.port, started["job"], started["attempt"], started["token"], offset_s)
            service.supervisors.append(one)
        watchdog.cancel()
        yield service


@contextlib.contextmanager
def played_service(
    folder: Path, tree: Path | None, *options: str
) -> Iterator[tuple[Store, subprocess.Popen[str], Service]]:
    """Runs `played_service.py`, and opens its store here too."""
    url = f"sqlite:///{folder}/shoal.db"
    program = Path(__file__).with_name("played_service.py")
    sources = {"PYTHONPATH": ":".join(str(tree / name) for name in ("workers", "service", "api"))} if tree else {}
    process = subprocess.Popen(
        [sys.executable, str(program), url, str(folder), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **sources},
    )
    assert process.stdin is not None and process.stdout is not None
    store = None
    try:
        port = int(process.stdout.readline())
        store = Store.open(url)
        admin = ensure_admin_token(store, folder, now=time.time()).read_text().strip()
        yield store, process, Service(admin, port, process.pid, [])
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        if store is not None:
            store.close()


async def stop_tasks(tasks: list[asyncio.Task[None]]) -> None:
    """Stops the supervisors. Raises what one of them has failed with."""
    for task in tasks:
        task.cancel()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(error, Exception):
            raise error


def _point(step: int, now: float) -> SeriesPoint:
    return SeriesPoint(
        step=step,
        at=now,
        loss=2.0,
        grad_norm=1.0,
        lr=1e-3,
        tokens_per_s=1e5,
        step_s=1.0,
        world_size=_WORKERS,
        generation=1,
    )


def _worker(job_id: str, rank: int, step: int) -> WorkerView:
    return WorkerView(
        worker_id=f"{job_id}/{rank}",
        rank=rank,
        state="training",
        node_id=f"n{rank}",
        node_ip="10.0.0.1",
        pid=1000 + rank,
        generation=1,
        phase=Phase.FORWARD,
        step=step,
    )
