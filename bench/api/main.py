"""Speed and memory of the control plane: a real `shoal serve` with control loop, SQLite and embedded Ray cluster.

    python bench/api/main.py [--parts posts,lists,memory,scrape,page,streams] [--seconds 5] [--clients 8] [--pages 200]

posts     submissions per second from several clients; the server commits each one before it answers
lists     latency of the first page of a list of 10,000 jobs
memory    resident memory with 1,000 finished jobs
scrape    `GET /metrics` with 1,000 jobs that train, all of which have reported since the last scrape
page      what the page of a job of 1,000,000 steps asks for: server time, bytes
streams   200 open pages of one job that trains: from a worker's report to the last client; CPU of the control plane

For `scrape` and `page` the database is filled through the store, and the HTTP edge runs without a control loop, since
1,000 jobs do not fit on one machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from api import reads, requests, streams
from choices import some_of
from measurements.machine import describe
from shoal_server import serving

PARTS = ("posts", "lists", "memory", "scrape", "page", "streams")


def main() -> None:
    arguments = _arguments()
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "posts": lambda folder: _posts(folder, arguments),
        "lists": _lists,
        "memory": _memory,
        "scrape": reads.measure_scrape,
        "page": reads.measure_page,
        "streams": lambda folder: streams.measure(folder, pages=arguments.pages),
    }
    machine = describe()
    print(f"{machine['cpu']}, {machine['system']}")
    found: dict[str, Any] = {}
    for name in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            found |= parts[name](Path(folder))
    print(json.dumps(found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=some_of(PARTS), default=PARTS)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pages", type=int, default=200)
    return parser.parse_args()


def _posts(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    with serving(folder, num_cpus=1) as server:
        posts = requests.measure_posts(server, seconds=arguments.seconds, clients=arguments.clients)
    print(
        f"POST /v1/jobs: {posts['posts_per_s']} requests/s, "
        f"p50 {posts['post_p50_ms']} ms, p99 {posts['post_p99_ms']} ms"
    )
    return posts


def _lists(folder: Path) -> dict[str, Any]:
    with serving(folder, num_cpus=1) as server:
        lists = requests.measure_lists(server)
    print(f"GET /v1/jobs, first 100 of 10,000: p50 {lists['list_p50_ms']} ms, worst {lists['list_max_ms']} ms")
    return lists


def _memory(folder: Path) -> dict[str, Any]:
    with serving(folder, num_cpus=1) as server:
        memory = requests.measure_memory(server)
    print(f"resident with 1,000 finished jobs: {memory['rss_mib']} MiB, torch loaded: {memory['torch_loaded']}")
    return memory


if __name__ == "__main__":
    main()
