"""Submissions per second, the latency of the first page of 10,000 jobs, and memory with 1,000 ended jobs."""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from shoal_server import ShoalServer

NEVER = {"min_workers": 8, "max_workers": 8}
"""More workers than the cluster has CPUs: the jobs stay in the queue, so that only the service is measured."""
SPEC = json.dumps(
    {"name": "bench", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}, "elasticity": NEVER}
).encode()
JSON_HEADERS = {"Content-Type": "application/json"}


def measure_posts(server: ShoalServer, *, seconds: float, clients: int) -> dict[str, float]:
    _submit(server, 50)  # warm up
    latencies: list[list[float]] = [[] for _ in range(clients)]
    end_mono = time.monotonic() + seconds

    def post(mine: list[float]) -> None:
        connection = _connect(server)
        while (begun_mono := time.monotonic()) < end_mono:
            _request(connection, "POST", "/v1/jobs", SPEC)
            mine.append(time.monotonic() - begun_mono)

    threads = [threading.Thread(target=post, args=(mine,)) for mine in latencies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = sorted(value for mine in latencies for value in mine)
    return {
        "posts_per_s": round(len(every) / seconds, 1),
        "post_p50_ms": round(statistics.median(every) * 1e3, 1),
        "post_p99_ms": round(every[int(len(every) * 0.99)] * 1e3, 1),
        "clients": clients,
    }


def measure_lists(server: ShoalServer) -> dict[str, float]:
    _submit(server, 10_000)
    connection = _connect(server)
    times_s = []
    for _ in range(50):
        begun_mono = time.monotonic()
        page = json.loads(_request(connection, "GET", "/v1/jobs?limit=100"))
        times_s.append(time.monotonic() - begun_mono)
        assert len(page["items"]) == 100
    return {
        "list_p50_ms": round(statistics.median(times_s) * 1e3, 1),
        "list_max_ms": round(max(times_s) * 1e3, 1),
    }


def measure_memory(server: ShoalServer) -> dict[str, float | bool]:
    connection = _connect(server)
    for job_id in _submit(server, 1000):
        _request(connection, "POST", f"/v1/jobs/{job_id}/cancel")
    _request(connection, "GET", "/v1/jobs?state=CANCELLED&limit=1000")
    status = Path(f"/proc/{server.pid}/status").read_text()
    rss_kib = int(status.split("VmRSS:")[1].split()[0])
    return {
        "rss_mib": round(rss_kib / 1024, 1),
        "torch_loaded": "libtorch" in Path(f"/proc/{server.pid}/maps").read_text(),
    }


def _submit(server: ShoalServer, num_jobs: int) -> list[str]:
    connection = _connect(server)
    return [json.loads(_request(connection, "POST", "/v1/jobs", SPEC))["id"] for _ in range(num_jobs)]


@dataclass(frozen=True)
class _Connection:
    http: http.client.HTTPConnection
    headers: dict[str, str]


def _connect(server: ShoalServer) -> _Connection:
    headers = {"Authorization": f"Bearer {server.token}"}
    return _Connection(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60), headers)


def _request(to: _Connection, method: str, path: str, body: bytes | None = None) -> bytes:
    connection = to.http
    connection.request(method, path, body, to.headers | (JSON_HEADERS if body else {}))
    response = connection.getresponse()
    answer = response.read()
    if response.status >= 300:
        raise RuntimeError(f"{method} {path}: {response.status} {answer[:500]!r}")
    return answer
