"""CPU seconds that polling costs: every worker by a call of its own, against one call to the agent of their node.

    python bench/scale/polling.py [--workers 4,8,16,32] [--lines 2] [--seconds 20] [--stalled] [--out FILE]

One local Ray node. The workers are the shipped actors, which load no engine and print: one of them `--lines` lines a
second, as rank 0 reports its steps. This process polls them with the shipped code, first directly, then through an
agent. Printed per second: calls that this process makes, and milliseconds of CPU time of this process (the supervisor),
of the agent and of all workers; then the milliseconds from a printed line until it is here. `--stalled`: no worker
makes progress, so each is polled every 0.25 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("tests", "tools"))

import ray
from doubles.fake_nodes import FakeProbe
from kit.processes.os_processes import cpu_seconds
from measurements.machine import describe
from shoal_service.clock import SystemClock
from shoal_service.core.attempt.messages import StartWorker
from shoal_service.core.attempt.state.attempt import Attempt, Group, GroupProgress
from shoal_service.core.attempt.state.parts import Running, Worker, WorkerPool
from shoal_service.core.persistent import Table
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.reporting.reporter import Outbox, Reporter
from shoal_service.supervisor.supervisor import new_attempt
from shoal_service.supervisor.workers.agent_pool import AgentPool
from shoal_service.supervisor.workers.ray_fleet import RayAgents, RayFleet
from shoal_service.supervisor.workers.worker_client import SupervisorContext, WorkerPolling
from shoal_workers.actor import CONCURRENCY_GROUPS, WorkerActor
from shoal_workers.contract.ids import NAMESPACE, agent_name
from shoal_workers.contract.messages import NodePoll, Phase, PollRequest, Progress, WorkerInfo, WorkerPoll
from shoal_workers.contract.spec import JobSpec

_JOB = "bench"
_SETTLE_S = 3.0


class PrintingWorker(WorkerActor):
    """The shipped actor. It prints the time, and counts as training."""

    def begin(self, lines_per_s: float, stalled: bool) -> int:
        self._stalled_s = 3600.0 if stalled else 0.0
        if lines_per_s:
            threading.Thread(target=self._print, args=(1.0 / lines_per_s,), daemon=True).start()
        return os.getpid()

    def _print(self, every_s: float) -> None:
        while True:
            time.sleep(every_s)
            print(f"{time.time():.6f}")

    def _progress(self) -> Progress:
        return Progress(generation=1, phase=Phase.FORWARD, step=1, at=time.time(), stalled_s=self._stalled_s)


class CountingFleet(RayFleet):
    calls: ClassVar[Counter[str]] = Counter()

    async def _ask(self, name: str, index: int, *arguments: Any) -> Any:
        self.calls["direct"] += name == "poll"
        return await super()._ask(name, index, *arguments)


class CountingAgents(RayAgents):
    calls: ClassVar[Counter[str]] = Counter()

    async def poll(self, node_id: str, requests: Sequence[PollRequest]) -> NodePoll:
        self.calls["agent"] += 1
        return await super().poll(node_id, requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="4,8,16,32", help="numbers of workers (4,8,16,32)")
    parser.add_argument("--lines", type=float, default=2.0, help="lines a second of one worker (2)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (20)")
    parser.add_argument("--stalled", action="store_true", help="no worker makes progress")
    parser.add_argument("--out", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="FATAL", namespace=NAMESPACE)
    print("| workers | polled | calls/s | supervisor, ms/s | agent, ms/s | workers, ms/s | line, ms: median | most |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for number in map(int, arguments.workers.split(",")):
        for row in asyncio.run(_measure(number, arguments)):
            rows.append(row)
            print(
                f"| {row['workers']} | {row['polled']} | {row['calls']:.1f} | {row['supervisor_ms']:.1f} | "
                f"{row['agent_ms']:.1f} | {row['workers_ms']:.1f} | {row['line_ms']:.1f} | {row['most_ms']:.1f} |",
                flush=True,
            )
    ray.shutdown()
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


async def _measure(number: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    config = SupervisorConfig(
        job_id=f"{_JOB}-{number}",
        attempt=1,
        spec=_spec(number),
        checkpoint_root="/nowhere",
        granted=number,
        epoch=1,
        spec_version=1,
        snapshot_key="secret",
    )
    fleet, agents = CountingFleet(config), CountingAgents(config)
    fleet._actor_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(PrintingWorker)
    fleet._options["num_cpus"] = 0
    names = {index: f"shoal/{config.job_id}/1/worker-{index}" for index in range(number)}
    for index, name in names.items():
        await fleet.start(StartWorker(index, name))
    handles = [fleet._handles[index] for index in names]
    pids = [
        await handle.begin.remote(arguments.lines if index == 0 else 0.0, arguments.stalled)
        for index, handle in enumerate(handles)
    ]
    bench = Bench(config, fleet, _state(config, names))
    pool = AgentPool(agents, bench.context, agents_from=1)
    pollings = [WorkerPolling(index, name, bench.context) for index, name in names.items()]
    for polling in pollings:
        polling.node_id = _node()
    tasks = [asyncio.ensure_future(polling.run()) for polling in pollings]
    direct = await bench.measure(arguments.seconds, fleet, agents, [], pids)
    pool.start()
    while not agents.calls["agent"]:  # noqa: ASYNC110 -- Ray has no event for it
        await asyncio.sleep(0.1)
    agent = await ray.get_actor(agent_name(config.job_id, 1, _node()), NAMESPACE).ping.remote(1)
    served = await bench.measure(arguments.seconds, fleet, agents, [agent], pids)
    await pool.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(fleet.kill(index) for index in names))
    return [
        {"workers": number, "polled": "directly", **direct},
        {"workers": number, "polled": "by an agent", **served},
    ]


class Bench:
    """What a supervisor gives its clients, without its machine."""

    def __init__(self, config: SupervisorConfig, fleet: RayFleet, state: Attempt) -> None:
        clock, outbox = SystemClock(), Outbox(1)
        self.lines: list[float] = []
        """Milliseconds from the print of each line until it is here."""
        reporter = Reporter(outbox, config, clock)
        record = reporter.record_poll

        def recorded(index: int, poll: WorkerPoll, at: Attempt) -> None:
            self.lines += [1e3 * (time.time() - float(line.text)) for line in poll.logs if line.text.strip()]
            record(index, poll, at)

        reporter.record_poll = recorded  # type: ignore[method-assign, assignment]
        ignore: Callable[..., None] = lambda *_: None  # noqa: E731
        self.context = SupervisorContext(
            fleet=fleet,
            clock=clock,
            until_gone=FakeProbe().until_gone,
            outbox=outbox,
            reporter=reporter,
            post=ignore,
            settled=lambda: asyncio.sleep(0),
            state=lambda: state,
            kill=ignore,
            spawn=ignore,
            raylet=lambda node_id: None,
        )

    async def measure(
        self, seconds: float, fleet: CountingFleet, agents: CountingAgents, agent_pids: list[int], pids: list[int]
    ) -> dict[str, float]:
        await asyncio.sleep(_SETTLE_S)
        fleet.calls.clear()
        agents.calls.clear()
        self.lines.clear()
        before = time.process_time(), _cpu_s(agent_pids), _cpu_s(pids)
        await asyncio.sleep(seconds)
        after = time.process_time(), _cpu_s(agent_pids), _cpu_s(pids)
        used = [1e3 * (late - early) / seconds for early, late in zip(before, after, strict=True)]
        return {
            "calls": (fleet.calls["direct"] + agents.calls["agent"]) / seconds,
            "supervisor_ms": used[0],
            "agent_ms": used[1],
            "workers_ms": used[2],
            "line_ms": statistics.median(self.lines) if self.lines else 0.0,
            "most_ms": max(self.lines, default=0.0),
        }


def _cpu_s(pids: list[int]) -> float:
    return sum(map(cpu_seconds, pids))


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _state(config: SupervisorConfig, names: dict[int, str]) -> Attempt:
    """The state of an attempt whose group has trained for long."""
    workers = tuple(Worker(index=index, worker_id=name, info=_info(name)) for index, name in names.items())
    return replace(
        new_attempt(config, 0.0),
        current=Running(since=0.0),
        group=Group(generation=1, workers=tuple(names)),
        pool=WorkerPool(workers=Table(workers), next_index=len(workers)),
        progress=GroupProgress(step=1),
    )


def _info(name: str) -> WorkerInfo:
    return WorkerInfo(
        worker_id=name, node_id=_node(), node_ip="127.0.0.1", pid=1, store_port=1, device="cpu", version=2
    )


def _spec(number: int) -> JobSpec:
    return JobSpec.model_validate(
        {
            "task": "m:T",
            "stop": {"steps": 1},
            "batch": {"global_size": number, "micro_size": 1},
            "elasticity": {"min_workers": 1, "max_workers": number},
        }
    )


if __name__ == "__main__":
    main()
