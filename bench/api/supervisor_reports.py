"""What a report of a supervisor costs the service: CPU of the server's process, and the time until its receipt.

    python bench/api/supervisor_reports.py [--jobs 20] [--reports 50] [--every-s 0] [--tree PATH]

A server process with the shipped edge and a store on SQLite; here one thread and one kept-alive connection per job.
Each thread sends its next report `--every-s` after a receipt: with 0 the server is saturated, so that reports arrive
together. The part `reports` of main.py has the service with everything, and reports at their own pace. `--tree`: the
checkout whose service is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from shoal_service.store import driving, submissions, supervisor_links

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests"))

from api.http_edge import NoCluster
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.home import Home, HomeReport
from shoal_service.reports import SupervisorReports
from shoal_service.store import Store
from shoal_service.supervisor.dialer import HttpLink
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState

_SPEC = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1_000_000}}


def serve(url: str) -> None:
    """Runs in the child: prints its address; a line on its input asks for its CPU seconds."""
    from kit.served_app import served
    from shoal_api.http.app import create_app

    app = create_app(store=Store.open(url), cluster=NoCluster(), scrape=lambda _: (b"", ""), version="0")
    with served(app) as address:
        print(address, flush=True)
        for _ in sys.stdin:
            print(time.process_time(), flush=True)


def report_of(life_after: int, num_points: int) -> HomeReport:
    fixed: dict[str, Any] = {"at": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 1.0, "step_s": 1.0}
    first = life_after * num_points
    points = tuple(
        SeriesPoint(step=first + n, loss=1.5, world_size=2, generation=1, **fixed) for n in range(num_points)
    )
    status = JobStatus(state=JobState.RUNNING, attempt=1, step=first + num_points)
    reports = SupervisorReports(attempt=1, seq=life_after + 1, series=points, status=status)
    return HomeReport(life=1, after=life_after, reports=reports)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--reports", type=int, default=50)
    parser.add_argument("--every-s", type=float, default=0.0)
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--serve")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/shoal.db"
        store = Store.open(url)
        now = time.time()
        lease = store.acquire_lease("bench", ttl_s=3600.0, now=now)
        assert lease is not None
        ids = [
            store.writing(submissions.create)(parse_spec(_SPEC), idempotency_key=None, now=now)[0].id
            for _ in range(options.jobs)
        ]
        for job_id in ids:
            store.writing(driving.begin_attempt, lease.epoch)(job_id, workers=1, now=now)
            store.writing(supervisor_links.keep_token, lease.epoch)(job_id, 1, f"shoal-attempt_{job_id}")
        tree = options.tree
        sources = {"PYTHONPATH": ":".join(str(tree / name) for name in ("workers", "service", "api"))} if tree else {}
        child = subprocess.Popen(
            [sys.executable, __file__, "--serve", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **sources},
        )
        assert child.stdin is not None and child.stdout is not None
        address = child.stdout.readline().strip()

        def cpu_s() -> float:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            return float(child.stdout.readline())

        sent = dict.fromkeys(ids, 0)
        for num_points in (1, 20):
            times_ms: list[float] = []
            before = cpu_s()

            def dial(job_id: str, num_points: int = num_points, times_ms: list[float] = times_ms) -> None:
                link = HttpLink(Home(url=address, token=f"shoal-attempt_{job_id}"), job_id, 1)
                for _ in range(options.reports):
                    report = report_of(sent[job_id], num_points)
                    began = time.perf_counter()
                    sent[job_id] = link.report(report).acknowledged
                    times_ms.append((time.perf_counter() - began) * 1e3)
                    time.sleep(options.every_s)

            threads = [threading.Thread(target=dial, args=(job_id,)) for job_id in ids]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            spent_ms = (cpu_s() - before) / len(times_ms) * 1e3
            found = {
                "points": num_points,
                "cpu_ms_per_report": round(spent_ms, 2),
                "median_ms": round(statistics.median(times_ms), 1),
            }
            print(json.dumps(found), flush=True)
        child.stdin.close()
        child.wait(30)
        store.close()


if __name__ == "__main__":
    main()
