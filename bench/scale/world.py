"""A supervisor of thousands of workers: the shipped executor, machine, journal and outbox; workers that only answer.

The workers are those of the tests (`tests/doubles/fake_workers.py`): objects on the executor's own loop that answer the
protocol and compute nothing. The journal is the shipped one over a key-value store in this process, which counts bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from doubles.fake_catalog import FakeCatalog
from doubles.fake_fleet import FakeFleet
from doubles.fake_key_values import FakeKeyValueStore
from doubles.fake_nodes import FakeHostWatch, FakeNodeWatch, FakeProbe
from doubles.fake_workers import FakeWorkers
from shoal_service.clock import SystemClock
from shoal_service.cluster.node_table import NodeTable
from shoal_service.collector import collect_rarely
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.executor import Executor
from shoal_service.supervisor.journal import GcsJournal
from shoal_service.supervisor.protocols import World
from shoal_service.supervisor.reporting.reporter import Outbox
from shoal_service.supervisor.supervisor import new_attempt
from shoal_workers.contract.messages import ExitKind, Phase, Progress
from shoal_workers.contract.snapshots import SnapshotPart
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.worker_reports import StepReport

WORKERS_PER_NODE = 8
STEP_S = 0.5
_TOTAL_STEPS = 1_000_000


class CountingStore(FakeKeyValueStore):
    """Counts how much the journal writes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0
        self.num_bytes = 0

    def put(self, key: bytes, value: bytes) -> None:
        self.num_writes += 1
        self.num_bytes += len(value)
        super().put(key, value)


@dataclass
class Turns:
    """What the executor did: how many events in how many turns, and the seconds that each turn took."""

    num_events: int = 0
    seconds: list[float] = field(default_factory=list)

    def clear(self) -> None:
        self.num_events = 0
        self.seconds.clear()


class ScaleWorld:
    """One attempt of `num_workers` granted workers. Used on an asyncio loop."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.clock = SystemClock()
        self.workers = FakeWorkers(self.clock, total_steps=_TOTAL_STEPS)
        self.fleet = FakeFleet(self.workers)
        self.fleet.node_of = {index: f"node-{index // WORKERS_PER_NODE}" for index in range(4 * num_workers)}
        self.store = CountingStore()
        self.nodes = FakeNodeWatch()
        spec = self.spec = _spec(num_workers)
        config = SupervisorConfig(
            job_id="j1",
            attempt=1,
            spec=spec,
            checkpoint_root="/checkpoints/j1",
            granted=num_workers,
            epoch=1,
            spec_version=1,
        )
        journal = GcsJournal(self.store, "j1", 1)
        life = journal.begin(self.clock.time()).life
        self.outbox = Outbox(1)
        world = World(
            fleet=self.fleet,
            journal=journal,
            catalog=FakeCatalog(),
            node_watch=self.nodes,
            host_watch=FakeHostWatch(),
            clock=self.clock,
            until_gone=FakeProbe().until_gone,
        )
        self.fleet.life = life
        self.executor = Executor(config, new_attempt(config, self.clock.time()), None, self.outbox, world)
        self.turns = Turns()
        self._watch_turns()
        self.running: asyncio.Task[None] | None = None

    def _watch_turns(self) -> None:
        take, turns = self.executor._take, self.turns

        def timed(*events: Any) -> None:
            began = time.perf_counter()
            take(*events)
            turns.seconds.append(time.perf_counter() - began)
            turns.num_events += len(events)

        self.executor._take = timed  # type: ignore[method-assign]

    @property
    def stage(self) -> str:
        return str(self.executor._state.stage)

    @property
    def is_whole(self) -> bool:
        """Every worker of the newest group has received its `run`."""
        group = self.executor._state.group
        handles = self.fleet._handles
        return bool(group.workers) and all(
            index in handles and (run := handles[index].assignment) is not None and run.generation == group.generation
            for index in group.workers
        )

    async def start(self) -> None:
        """Starts the attempt. Returns when every worker has received `run` of the first group. From then on the groups
        live on."""
        collect_rarely()  # as the supervisor's process does
        self.running = asyncio.create_task(self.executor.run())
        await self.until(lambda: self.stage == "forming" and self.is_whole)
        self._group_life = asyncio.create_task(self._live())

    async def train(self, seconds: float) -> None:
        await self.until(lambda: self.stage == "running")
        await asyncio.sleep(seconds)

    async def _live(self) -> None:
        """Does what the workers' own processes would do: form, train, and stop at a step boundary on request."""
        formed, next_step = 0, 0.0
        while True:
            await asyncio.sleep(0.02)
            group = self.executor._state.group
            if group.generation != formed:
                if self.is_whole:
                    formed = group.generation
                    self.workers.form(self.executor._state.progress.step)
                continue
            first = self.fleet._handles.get(group.workers[0])
            if first is not None and first.yields and first.assignment is not None:
                for worker in self.workers.group:
                    worker.yields.clear()
                    worker.leave(ExitKind.YIELDED)
            elif self.stage == "running" and time.monotonic() >= next_step:
                next_step = time.monotonic() + STEP_S
                self._step()

    def _step(self) -> None:
        """Completes a step on every worker, and reports it from rank 0."""
        group, now = self.executor._state.group, self.clock.time()
        workers = [self.fleet._handles[index] for index in group.workers if index in self.fleet._handles]
        for worker in workers:
            worker.step += 1
            worker.progress = Progress(
                generation=group.generation, phase=Phase.FORWARD, step=worker.step, at=now, counter=worker.step + 1
            )
        num = len(group.workers)
        workers[0].report(
            StepReport(
                generation=group.generation,
                step=workers[0].step,
                at=now,
                loss=2.5,
                grad_norm=1.0,
                lr=1e-3,
                tokens=8 * num,
                step_s=STEP_S,
                world_size=num,
                compute_s=(0.9 * STEP_S,) * num,
            )
        )

    def _keep_snapshots(self) -> None:
        """Gives each worker its own part of the newest snapshot in its memory, and that of the worker a node
        further."""
        group = self.executor._state.group
        workers = [self.fleet._handles[index] for index in group.workers]
        num = len(workers)
        for rank, worker in enumerate(workers):
            worker.parts = tuple(
                SnapshotPart(
                    generation=group.generation,
                    rank=of,
                    world_size=num,
                    step=worker.step,
                    num_bytes=1 << 30,
                    node_id=worker.info.node_id,
                )
                for of in (rank, (rank - WORKERS_PER_NODE) % num)
            )

    async def lose_worker(self, rank: int) -> float:
        """Kills one worker. Returns the seconds until the last `run` of the next group has arrived."""
        victim = self.fleet._handles[self.executor._state.group.workers[rank]]
        self._keep_snapshots()
        began, before = time.perf_counter(), self.executor.generation
        victim.die()
        return await self._next_group(began, before)

    async def lose_nodes(self, share: float) -> float:
        """Takes away a share of the nodes at once: their workers die, and the head says so. Returns seconds, as
        `lose_worker` does."""
        nodes = list(dict.fromkeys(self.executor._state.group.nodes))
        gone = frozenset(nodes[1 : 1 + max(1, round(share * len(nodes)))])
        victims = [worker for worker in self.workers.by_name.values() if worker.info.node_id in gone]
        self._keep_snapshots()
        began, before = time.perf_counter(), self.executor.generation
        for worker in victims:
            worker.die()
        self.nodes.show(NodeTable(dead=gone))
        return await self._next_group(began, before)

    async def _next_group(self, began: float, before: int) -> float:
        await self.until(lambda: self.executor.generation > before and self.is_whole)
        return time.perf_counter() - began

    async def until(self, condition: Callable[[], bool], limit_s: float = 600.0) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert self.running is None or not self.running.done(), self.running.exception()
            assert time.monotonic() < end, f"not within {limit_s:g} s; stage {self.stage}"
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _spec(num_workers: int) -> JobSpec:
    return JobSpec.model_validate(
        {
            "task": "m:T",
            "stop": {"steps": _TOTAL_STEPS},
            "batch": {"global_size": 8 * num_workers, "micro_size": 1},
            "elasticity": {"min_workers": 1, "max_workers": num_workers},
            "retry": {"max_recoveries": 1000},
        }
    )
