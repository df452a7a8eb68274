"""Speed and size of the control plane's HTTP edge: a real server process on a temporary SQLite file.

    python bench/api.py [--seconds 5] [--clients 8]

Measures submissions a second from several clients (each is committed before it is answered), the latency of the first
page of a list of 10,000 jobs, and the server's resident memory with 1,000 finished jobs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SPEC = json.dumps({"name": "bench", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 100}}).encode()
JSON_HEADERS = {"Content-Type": "application/json"}


def main() -> None:
    arguments = _arguments()
    if arguments.serve:
        _serve(arguments.serve, arguments.fd)
        return
    with tempfile.TemporaryDirectory() as folder:
        memory = _with_server(Path(folder) / "memory.db", _measure_memory)
        print(f"resident with 1,000 finished jobs: {memory['rss_mib']} MiB, torch loaded: {memory['torch_loaded']}")
        posts = _with_server(Path(folder) / "posts.db", lambda port, pid: _measure_posts(port, arguments))
        print(
            f"POST /v1/jobs: {posts['posts_per_s']} requests/s, "
            f"p50 {posts['post_p50_ms']} ms, p99 {posts['post_p99_ms']} ms"
        )
        lists = _with_server(Path(folder) / "lists.db", _measure_lists)
        print(f"GET /v1/jobs, first 100 of 10,000: p50 {lists['list_p50_ms']} ms, worst {lists['list_max_ms']} ms")
    print(json.dumps(posts | lists | memory))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _serve(database: str, fd: int) -> None:
    """The server process."""
    from prometheus_client import CollectorRegistry

    from shoal_api.http.app import create_app
    from shoal_api.http.serving import make_server
    from shoal_service.store import Store
    from shoal_service.views import ClusterView

    nothing = dict.fromkeys(("cpus_total", "cpus_free", "gpus_total", "gpus_free"), 0.0)
    view = ClusterView(connected=True, address="none", nodes=(), owner="", epoch=0, **nothing)

    class NoCluster:
        def snapshot(self) -> ClusterView:
            return view

    store = Store.open(f"sqlite:///{database}")
    app = create_app(store=store, cluster=NoCluster(), registry=CollectorRegistry(), version="bench")
    make_server(app, host="127.0.0.1", port=0).run(sockets=[socket.socket(fileno=fd)])
    store.close()


def _with_server(database: Path, measure):  # type: ignore[no-untyped-def]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        command = [sys.executable, __file__, "--serve", str(database), "--fd", str(fd)]
        process = subprocess.Popen(command, pass_fds=[fd])
    try:
        _request(http.client.HTTPConnection("127.0.0.1", port, timeout=60), "GET", "/healthz")
        return measure(port, process.pid)
    finally:
        process.terminate()
        process.wait(30)


def _measure_posts(port: int, arguments: argparse.Namespace) -> dict[str, float]:
    _submit(port, 50)  # warm up
    latencies: list[list[float]] = [[] for _ in range(arguments.clients)]
    end_mono = time.monotonic() + arguments.seconds

    def post(mine: list[float]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
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


def _measure_lists(port: int, pid: int) -> dict[str, float]:
    _submit(port, 10_000)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
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


def _measure_memory(port: int, pid: int) -> dict[str, float | bool]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for job_id in _submit(port, 1000):
        _request(connection, "POST", f"/v1/jobs/{job_id}/cancel")
    _request(connection, "GET", "/v1/jobs?state=CANCELLED&limit=1000")
    status = Path(f"/proc/{pid}/status").read_text()
    rss_kib = int(status.split("VmRSS:")[1].split()[0])
    return {"rss_mib": round(rss_kib / 1024, 1), "torch_loaded": "libtorch" in Path(f"/proc/{pid}/maps").read_text()}


def _submit(port: int, num_jobs: int) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    return [json.loads(_request(connection, "POST", "/v1/jobs", SPEC))["id"] for _ in range(num_jobs)]


def _request(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> bytes:
    connection.request(method, path, body, JSON_HEADERS if body else {})
    response = connection.getresponse()
    answer = response.read()
    if response.status >= 300:
        raise RuntimeError(f"{method} {path}: {response.status} {answer[:500]!r}")
    return answer


if __name__ == "__main__":
    main()
