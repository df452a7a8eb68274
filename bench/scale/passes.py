"""How long a pass of the control loop takes beside a long queue.

    python bench/scale/passes.py [--running 200] [--queued 20000] [--hopeless 0.5] [--seconds 20]
                                  [--out build/queue.json]

The shipped control loop, policy and SQLite store, in real time; supervisors that only report (tests/doubles). Each
running job reports a step a second. A share of the queue asks for workers that no node can hold, at a higher priority
than all others. At the end a job with the lowest priority is submitted that fits on a node for which no other job asks:
the seconds until it starts say whether it waits behind those.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shoal_service.store import submissions

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from doubles.control_bench import SPEC, node
from doubles.fake_cluster import FakeCluster
from doubles.fake_clusters import FakeClusters
from measurements.machine import describe
from shoal_service.clock import SystemClock
from shoal_service.control.config import ControlConfig
from shoal_service.control.control_loop import ControlLoop
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.nodes import Node
from shoal_service.store import Store
from shoal_service.telemetry.tallies import Durations, PassTimes
from shoal_service.views import JobStatus, WorkerState, WorkerView
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import JobState
from shoal_workers.contract.messages import Phase
from shoal_workers.contract.spec import JobSpec

_WORKERS_PER_NODE = 8
_LIMIT_S = 0.5
_START_LIMIT_S = 120.0
_FIRST_PASSES = 5
"""These passes are not measured: they read the whole queue for the first time."""
_SPARE = {"room": "spare"}


class _Listed(Durations):
    """A histogram that keeps each value."""

    def __init__(self, inner: Durations) -> None:
        self._inner = inner
        self.seconds: list[float] = []

    def observe(self, seconds: float, *labels: str) -> None:
        self.seconds.append(seconds)
        self._inner.observe(seconds, *labels)


class _Times(PassTimes):
    def __init__(self) -> None:
        super().__init__()
        self.passes = self.listed = _Listed(self.passes)
        self.decisions = self.listed_decisions = _Listed(self.decisions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=200)
    parser.add_argument("--queued", type=int, default=20_000)
    parser.add_argument("--hopeless", type=float, default=0.5, help="share of the queue that fits on no node")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds that are measured")
    parser.add_argument("--out", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-queue-") as folder:
        figures = asyncio.run(_measure(Path(folder), arguments))
    print(f"{describe()}\n")
    for words, value in figures.items():
        print(f"{words:<55} {value:>10.4g}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": describe(), "figures": figures}, indent=1) + "\n")


async def _measure(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    store = Store.open(f"sqlite:///{folder / 'shoal.db'}")
    cluster, times = FakeCluster(_nodes(arguments.running)), _Times()
    config = ControlConfig(owner="bench", lease_ttl_s=60.0, checkpoint_url=str(folder))
    loop = ControlLoop(store, FakeClusters.single(cluster), SystemClock(), config, times=times)
    running = [_submit(store, _spec(f"r{number}", 1000)) for number in range(arguments.running)]
    stop = asyncio.Event()
    task = asyncio.create_task(loop.run(stop))
    reporter = asyncio.create_task(_report(cluster))
    try:
        await _until(lambda: len(cluster.supervisors) == len(running))
        num_hopeless = round(arguments.hopeless * arguments.queued)
        began = time.perf_counter()
        for number in range(arguments.queued):
            is_hopeless = number < num_hopeless
            _submit(store, _spec(f"q{number}", 100 if is_hopeless else 0, cpus=64.0 if is_hopeless else 1.0))
            if number % 100 == 0:
                print(f"\rsubmitted {number}", end="", file=sys.stderr, flush=True)
                await asyncio.sleep(0)
        submitted_s = time.perf_counter() - began
        print("\r", end="", file=sys.stderr)
        times.listed.seconds.clear()
        await _until(lambda: len(times.listed.seconds) >= _FIRST_PASSES)
        times.listed.seconds.clear()
        times.listed_decisions.seconds.clear()
        cpu = time.process_time()
        await asyncio.sleep(arguments.seconds)
        cpu_s = time.process_time() - cpu
        passes, decisions = list(times.listed.seconds), list(times.listed_decisions.seconds)
        began = time.perf_counter()
        last = _submit(store, _spec("last", -1000, labels=_SPARE))
        await _until(lambda: store.get_job(last).status.state is not JobState.QUEUED)
        started_s = time.perf_counter() - began
        assert not reporter.done(), "the supervisors do not report any more"
    finally:
        stop.set()
        reporter.cancel()
        await task
        store.close()
    return {
        "running jobs": len(running),
        "queued jobs": arguments.queued,
        "of these on no node": num_hopeless,
        "seconds to submit them": submitted_s,
        "passes in the measured time": len(passes),
        "pass p50, s": statistics.median(passes),
        "pass p95, s": statistics.quantiles(passes, n=20, method="inclusive")[-1],
        f"pass max, s (target {_LIMIT_S:g})": max(passes),
        "decision p50, s": statistics.median(decisions),
        "CPU, s per s": cpu_s / arguments.seconds,
        "last of the queue that fits: submit to start, s": started_s,
    }


def _nodes(running: int) -> tuple[Node, ...]:
    """Nodes that are full with the jobs that run, and one that no other job may use."""
    full = [_labelled(f"n{number}", "all") for number in range(2 * running // _WORKERS_PER_NODE)]
    return (*full, _labelled("spare", "spare"))


def _labelled(name: str, room: str) -> Node:
    return node(name, cpus=float(_WORKERS_PER_NODE)).model_copy(update={"labels": {"room": room}})


def _spec(name: str, priority: int, *, cpus: float = 1.0, labels: dict[str, str] | None = None) -> JobSpec:
    worker: dict[str, Any] = {"cpus": cpus, "selector": labels or {"room": "all"}}
    elasticity = {"min_workers": 2, "max_workers": 2}
    return parse_spec({**SPEC, "name": name, "priority": priority, "worker": worker, "elasticity": elasticity})


def _submit(store: Store, spec: JobSpec) -> str:
    return store.writing(submissions.create)(spec, idempotency_key=None, now=time.time())[0].id


async def _report(cluster: FakeCluster) -> None:
    """Reports a step a second of each job, with its status, as a supervisor does."""
    step = 0
    while True:
        step += 1
        await asyncio.sleep(0.01)
        for supervisor in list(cluster.supervisors.values()):
            now = time.time()
            status = JobStatus(
                state=JobState.RUNNING, attempt=1, generation=1, workers=2, step=step, loss=1.0, step_at=now
            )
            supervisor.outbox.set_status(status, tuple(_worker(rank, step) for rank in range(2)))
            supervisor.report(
                SeriesPoint(
                    step=step,
                    at=now,
                    loss=1.0,
                    grad_norm=1.0,
                    lr=1e-3,
                    tokens_per_s=1024.0,
                    step_s=1.0,
                    world_size=2,
                    generation=1,
                )
            )
            await asyncio.sleep(1.0 / max(1, len(cluster.supervisors)))


def _worker(rank: int, step: int) -> WorkerView:
    return WorkerView(
        worker_id=f"w{rank}",
        rank=rank,
        state=WorkerState.TRAINING,
        node_id="n0",
        node_ip="10.0.0.1",
        pid=1,
        generation=1,
        phase=Phase.FORWARD,
        step=step,
    )


async def _until(condition: Any) -> None:
    async with asyncio.timeout(_START_LIMIT_S):
        while not condition():  # noqa: ASYNC110 -- what is waited for lies in the store
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    main()
