"""Speed and memory of the control plane: a real `shoal serve` with control loop, SQLite and embedded Ray cluster.

    python bench/api.py [--seconds 5] [--clients 8]

Measures submissions per second from several clients (the server commits each one before it answers), the latency of the
first page of a list of 10,000 jobs, and the server's resident memory with 1,000 finished jobs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("bench", "tests", "tools"))

from shoal_server import ShoalServer, serving

NEVER = {"min_workers": 8, "max_workers": 8}
"""More workers than the cluster has CPUs: the jobs stay in the queue, so that only the service is measured."""
SPEC = json.dumps(
    {"name": "bench", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}, "elasticity": NEVER}
).encode()
JSON_HEADERS = {"Content-Type": "application/json"}


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        with serving(Path(folder) / "memory", num_cpus=1) as server:
            memory = _measure_memory(server)
        print(f"resident with 1,000 finished jobs: {memory['rss_mib']} MiB, torch loaded: {memory['torch_loaded']}")
        with serving(Path(folder) / "posts", num_cpus=1) as server:
            posts = _measure_posts(server, arguments)
        print(
            f"POST /v1/jobs: {posts['posts_per_s']} requests/s, "
            f"p50 {posts['post_p50_ms']} ms, p99 {posts['post_p99_ms']} ms"
        )
        with serving(Path(folder) / "lists", num_cpus=1) as server:
            lists = _measure_lists(server)
        print(f"GET /v1/jobs, first 100 of 10,000: p50 {lists['list_p50_ms']} ms, worst {lists['list_max_ms']} ms")
    print(json.dumps(posts | lists | memory))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=8)
    return parser.parse_args()


def _measure_posts(server: ShoalServer, arguments: argparse.Namespace) -> dict[str, float]:
    _submit(server, 50)  # warm up
    latencies: list[list[float]] = [[] for _ in range(arguments.clients)]
    end_mono = time.monotonic() + arguments.seconds

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
        "posts_per_s": round(len(every) / arguments.seconds, 1),
        "post_p50_ms": round(statistics.median(every) * 1e3, 1),
        "post_p99_ms": round(every[int(len(every) * 0.99)] * 1e3, 1),
        "clients": arguments.clients,
    }


def _measure_lists(server: ShoalServer) -> dict[str, float]:
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


def _measure_memory(server: ShoalServer) -> dict[str, float | bool]:
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


if __name__ == "__main__":
    main()
