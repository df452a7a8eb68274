"""Speed and memory of the control plane: a real `shoal serve` with control loop, SQLite and embedded Ray cluster.

    python bench/api/main.py [--parts posts,lists,memory,scrape,page,search,streams,reports,polls,running,first]
        [--seconds 5] [--clients 8] [--pages 200] [--jobs 200] [--polls 1000] [--tree PATH]

posts     submissions per second from several clients; the server commits each one before it answers
lists     latency of the first page of a list of 10,000 jobs
memory    resident memory with 1,000 finished jobs
scrape    `GET /metrics` with 1,000 jobs that train, all of which have reported since the last scrape
page      what the page of a job of 1,000,000 steps asks for: server time, bytes
search    what the search over everything asks for, with 10,000 jobs
streams   200 open pages of one job that trains: from a worker's report to the last client; CPU of the control plane
reports   200 jobs that report each second, with 1 and with 20 steps: CPU of the service, and 200 pages of one of them
polls     1,000 long polls of supervisors: memory, CPU, and from a request to the supervisor that it is for
running   `GET /metrics` while 200 jobs report each second
first     from a submission to the first step

For `scrape`, `page` and `search` the database is filled through the store, and the HTTP edge runs without a control
loop, since 1,000 jobs do not fit on one machine. For `reports`, `polls` and `running` the service is complete, but for
Ray and the gateway: supervisors are played over HTTP. With `--tree` these three measure the service of another
checkout; for the others name its packages in PYTHONPATH. The last line is JSON.
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

from api import first_step, reads, requests, searches, streams, supervisors
from choices import some_of
from measurements.machine import describe
from shoal_server import serving

PARTS = ("posts", "lists", "memory", "scrape", "page", "search", "streams", "reports", "polls", "running", "first")
_POINTS = (1, 20)


def main() -> None:
    arguments = _arguments()
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "posts": lambda folder: _posts(folder, arguments),
        "lists": _lists,
        "memory": _memory,
        "scrape": reads.measure_scrape,
        "page": reads.measure_page,
        "search": searches.measure,
        "streams": lambda folder: streams.measure(folder, pages=arguments.pages),
        "reports": lambda folder: _reports(folder, arguments),
        "polls": lambda folder: supervisors.measure_polls(
            folder, polls=arguments.polls, orders=20, tree=arguments.tree
        ),
        "first": lambda folder: first_step.measure(folder, trials=arguments.trials),
        "running": lambda folder: supervisors.measure_running_scrape(folder, jobs=arguments.jobs, tree=arguments.tree),
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
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--trials", type=int, default=5, help="of `first`")
    parser.add_argument("--polls", type=int, default=1000)
    parser.add_argument("--window", type=float, default=60.0, help="seconds of each part of `reports`")
    parser.add_argument("--tree", type=Path, help="the checkout whose service is measured; default: this one")
    return parser.parse_args()


def _posts(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    with serving(folder, num_cpus=1) as server:
        posts = requests.measure_posts(server, seconds=arguments.seconds, clients=arguments.clients)
    print(
        f"POST /v1/jobs: {posts['posts_per_s']} requests/s, "
        f"p50 {posts['post_p50_ms']} ms, p99 {posts['post_p99_ms']} ms"
    )
    return posts


def _reports(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for points in _POINTS:
        place = folder / str(points)
        place.mkdir()
        of_points = supervisors.measure_reports(
            place,
            jobs=arguments.jobs,
            pages=arguments.pages,
            points=points,
            seconds=arguments.window,
            tree=arguments.tree,
        )
        found[f"points_{points}"] = of_points
    return {"reports": found}


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
