"""SupervisorBench: one executor with fakes all around it; tests drive the workers, the nodes and the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

from doubles.event_loop import settle, until
from doubles.fake_agents import FakeAgentProcess, FakeAgents
from doubles.fake_catalog import FakeCatalog
from doubles.fake_clock import FakeClock
from doubles.fake_fleet import FakeFleet
from doubles.fake_journal import FakeJournal, JournalStorage
from doubles.fake_nodes import FakeHostWatch, FakeNodeWatch, FakeProbe
from doubles.fake_workers import FakeWorker, FakeWorkers
from shoal_service.cluster.node_table import NodeTable
from shoal_service.core.attempt.messages import Command
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import SupervisorReports
from shoal_service.supervisor.config import Directive, SupervisorConfig
from shoal_service.supervisor.executor import TICK_S, Executor
from shoal_service.supervisor.journal import JournalEntry
from shoal_service.supervisor.protocols import World
from shoal_service.supervisor.reporting.reporter import Outbox
from shoal_service.supervisor.supervisor import new_attempt
from shoal_workers.contract.spec import JobSpec

SPEC = JobSpec.model_validate(
    {
        "task": "m:T",
        "stop": {"steps": 4},
        "batch": {"global_size": 4, "micro_size": 1},
        "elasticity": {"min_workers": 1, "max_workers": 2},
    }
)


class SupervisorBench:
    """What survives a supervisor (workers, storage, journal) is kept over `restart`."""

    def __init__(self, *, granted: int = 2, spec: JobSpec = SPEC, agents_from: int = 0) -> None:
        self.clock = FakeClock()
        self.log: list[str] = []
        """Journal writes and calls to workers, in order."""
        self.workers = FakeWorkers(self.clock)
        self.catalog = FakeCatalog()
        self.catalog.trusts_parts = True
        self.storage = JournalStorage()
        self.config = SupervisorConfig(
            job_id="j1",
            attempt=1,
            spec=spec,
            checkpoint_root="/checkpoints/j1",
            granted=granted,
            epoch=1,
            spec_version=1,
            agents_from=agents_from,
        )
        self.agent_processes: dict[str, FakeAgentProcess] = {}
        """By node id."""
        self.outbox = Outbox(1)
        self.node_of: dict[int, str] = {}
        self.before_command: Callable[[Command], None] = lambda command: None
        self.is_replaced = False
        """It has learnt that it has a successor; the real process ends."""
        self._open()

    def _open(self) -> None:
        self.fleet = FakeFleet(self.workers, self.log, on_replaced=self._replaced)
        self.fleet.node_of = self.node_of
        self.journal = FakeJournal(self.storage, self.log)
        self.nodes = FakeNodeWatch()
        self.hosts = FakeHostWatch()
        self.probe = FakeProbe()
        beginning = self.journal.begin(self.clock.time())
        entry = beginning.entry
        self.fleet.life = beginning.life
        self.agents = FakeAgents(self.workers, self.agent_processes, life=beginning.life, on_replaced=self._replaced)
        if entry is not None:
            self.outbox = Outbox(1, seq=entry.seq + 1000, unacknowledged=entry.unacknowledged)
        world = World(
            fleet=self.fleet,
            journal=self.journal,
            catalog=self.catalog,
            node_watch=self.nodes,
            host_watch=self.hosts,
            clock=self.clock,
            until_gone=self.probe.until_gone,
            agents=self.agents,
            before_command=lambda command: self.before_command(command),
        )
        state = entry.state if entry is not None else new_attempt(self.config, self.clock.time())
        state = replace(state, life=beginning.life)
        self.executor = Executor(self.config, state, entry, self.outbox, world)

    def successor(self) -> SupervisorBench:
        """Another supervisor of the same attempt, while this one goes on: it was only believed dead."""
        other = copy(self)
        other.outbox = Outbox(1)
        other._open()
        return other

    def _replaced(self) -> None:
        self.is_replaced = True
        self.running.cancel()

    def start(self) -> None:
        self.running = asyncio.create_task(self.executor.run())

    async def start_and_train(self) -> None:
        """Until the group of the granted workers has trained one step."""
        self.start()
        await until(lambda: len(self.workers.group) == self.config.granted, "the group runs")
        self.workers.form()
        self.workers.train()
        await until(lambda: self.status.step == 1, "a step is reported")

    async def restart(self, *, dead_nodes: frozenset[str] = frozenset()) -> None:
        """The supervisor is killed, and started again."""
        mine = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not mine:
                task.cancel()
        await settle()
        self._open()
        self.nodes.table = NodeTable(dead=dead_nodes)
        self.start()

    async def advance_until(self, condition: Callable[[], Any], limit_s: float = 60.0) -> None:
        """Let time pass in the executor's ticks until the condition holds."""
        end = self.clock.time() + limit_s
        await settle()
        while not condition():
            assert self.clock.time() < end, f"not within {limit_s:g} s; stage {self.stage}"
            await self.clock.advance(TICK_S)

    async def end(self) -> AttemptEnd:
        """Wait for the attempt's end; time passes as it is needed."""
        await self.advance_until(self.running.done)
        self.running.result()
        end = self.reports.end
        assert end is not None
        return end

    def direct(self, **changes: Any) -> None:
        """The control plane sends what it wants now."""
        values: dict[str, Any] = {
            "epoch": 1,
            "granted": self.config.granted,
            "desired": Desired.RUN,
            "elasticity": self.config.spec.elasticity,
            "parallelism": self.config.spec.parallelism,
            "spec_version": 2,
            **changes,
        }
        self.executor.direct(Directive(**values))

    @property
    def entry(self) -> JournalEntry:
        return self.journal.written[-1]

    @property
    def stage(self) -> Stage:
        return self.executor._state.stage

    @property
    def reports(self) -> SupervisorReports:
        """Everything that is not acknowledged yet."""
        return self.outbox.pull(0, 0.0)

    @property
    def status(self) -> Any:
        return self.reports.status

    def events(self) -> list[str]:
        return [str(event.type) for event in self.reports.events]

    def worker(self, index: int) -> FakeWorker:
        return self.workers.by_name[self.fleet.starts[index].worker_id]
