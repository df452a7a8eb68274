"""The contracts of the implementations over Ray. A pytest module of its own process, a driver of a running cluster.

Started by `tests/ray/test_contracts.py`, with the cluster's address in SHOAL_TEST_RAY_ADDRESS.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Coroutine, Iterator

import pytest

import ray
from doubles.fake_journal import Replaced
from kit.contracts.agents import AgentsContract
from kit.contracts.fleet import FleetContract, assignment, eventually
from kit.contracts.journal import JournalContract
from shoal_service.cluster.gcs import GcsKeyValueStore
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.journal import GcsJournal
from shoal_service.supervisor.protocols import Fleet, Journal, PollAgents
from shoal_service.supervisor.workers.ray_fleet import RayAgents, RayFleet
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.ids import NAMESPACE, agent_name
from shoal_workers.contract.messages import ExitKind, WorkerInfo
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource


@pytest.fixture(scope="session", autouse=True)
def _driver() -> Iterator[None]:
    ray.init(os.environ["SHOAL_TEST_RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


class TestGcsJournal(JournalContract):
    @pytest.fixture(autouse=True)
    def _attempt(self) -> Iterator[None]:
        self.job_id = uuid.uuid4().hex
        yield
        self.open().delete()

    def open(self) -> Journal:
        def replaced() -> None:
            raise Replaced

        return GcsJournal(GcsKeyValueStore(b"shoal-contracts"), self.job_id, 1, on_replaced=replaced)


class TestRayAgents(AgentsContract):
    @pytest.fixture(autouse=True)
    def _attempt(self) -> None:
        self.job_id = uuid.uuid4().hex

    def make(self, *, life: int = 1, on_replaced: Callable[[], None] = lambda: None) -> PollAgents:
        return RayAgents(_config(self.job_id), life=life, on_replaced=on_replaced)

    def fleet(self, *, life: int = 1) -> Fleet:
        return RayFleet(_config(self.job_id), life=life)

    @property
    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def name(self, index: int) -> str:
        return f"shoal/{self.job_id}/1/worker-{index}"

    async def test_an_agent_without_a_supervisor_ends_by_itself(self) -> None:
        agents = RayAgents(_config(self.job_id), idle_s=1.0)
        await agents.start(self.node)
        name = agent_name(self.job_id, 1, self.node)
        assert ray.get_actor(name, NAMESPACE)

        async def is_gone() -> bool:
            try:
                ray.get_actor(name, NAMESPACE)
            except ValueError:
                return True
            return False

        await eventually(is_gone)

    def test_an_agent_does_not_load_torch(self) -> None:
        """Outside of a fork server, which has it already, as beside workers with a GPU."""
        code = "import sys, shoal_workers.poll_agent.agent as it; print('torch' in sys.modules, it.__name__)"
        ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        assert ran.stdout.split() == ["False", "shoal_workers.poll_agent.agent"]

    async def kill_agent(self) -> None:
        agent = ray.get_actor(agent_name(self.job_id, 1, self.node), NAMESPACE)
        os.kill(await agent.ping.remote(1), signal.SIGKILL)

    def run(self, test: Coroutine[None, None, None]) -> None:
        async def coroutine() -> None:
            try:
                await test
            finally:
                await _end_workers(self.fleet(life=9), self.name)
                agents = self.make(life=9)
                await agents.start(self.node)  # finds it, if it is there
                await agents.end(self.node)

        asyncio.run(coroutine())


class TestRayFleet(FleetContract):
    @pytest.fixture(autouse=True)
    def _attempt(self) -> None:
        self.job_id = uuid.uuid4().hex

    def make(
        self, *, can_load_task: bool = True, life: int = 1, on_replaced: Callable[[], None] = lambda: None
    ) -> Fleet:
        config = _config(self.job_id, can_load_task=can_load_task)
        return RayFleet(config, life=life, on_replaced=on_replaced)

    def name(self, index: int) -> str:
        return f"shoal/{self.job_id}/1/worker-{index}"

    def end_process(self, info: WorkerInfo) -> None:
        os.kill(info.pid, signal.SIGKILL)

    def run(self, test: Coroutine[None, None, None]) -> None:
        async def coroutine() -> None:
            try:
                await test
            finally:
                await _end_workers(self.make(life=9), self.name)

        asyncio.run(coroutine())

    @pytest.mark.parametrize("num_parts", [3, 300])
    async def test_an_order_has_the_source_of_its_state(self, num_parts: int) -> None:
        """The worker cannot read a snapshot that nobody serves; without one it would begin from the seed."""
        fleet = self.make()
        info = await self.started(fleet)
        server = SnapshotServer(node_id="gone", host="127.0.0.1", port=1)
        source = SnapshotSource(generation=1, world_size=num_parts, step=1, parts=(server,) * num_parts)
        place = {"store_host": info.node_ip, "store_port": info.store_port, "restore_snapshot": source}
        worker_exit = await fleet.run(0, assignment(2).model_copy(update=place))
        assert worker_exit.kind is ExitKind.SNAPSHOT_LOST


def _config(job_id: str, *, can_load_task: bool = True) -> SupervisorConfig:
    document = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}}
    return SupervisorConfig(
        job_id=job_id,
        attempt=1,
        spec=parse_spec(document if can_load_task else {**document, "task": "no_such_module:Task"}),
        checkpoint_root=f"{tempfile.gettempdir()}/shoal-contracts",
        granted=1,
        epoch=1,
        spec_version=1,
        snapshot_key="secret",
    )


async def _end_workers(fleet: Fleet, name: Callable[[int], str]) -> None:
    for index in range(2):
        if fleet.find(index, name(index), None):
            await fleet.kill(index)
