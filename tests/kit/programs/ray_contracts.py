"""The contracts of the implementations over Ray. A pytest module of its own process, a driver of a running cluster.

Started by `tests/ray/test_contracts.py`, with the cluster's address in SHOAL_TEST_RAY_ADDRESS.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Awaitable, Callable, Iterator

import pytest

import ray
from doubles.fake_journal import Replaced
from kit.contracts.fleet import FleetContract
from kit.contracts.journal import JournalContract
from shoal_service.cluster.gcs import GcsKeyValueStore
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.journal import GcsJournal
from shoal_service.supervisor.protocols import Fleet, Journal
from shoal_service.supervisor.workers.ray_fleet import RayFleet
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.messages import WorkerInfo


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


class TestRayFleet(FleetContract):
    @pytest.fixture(autouse=True)
    def _attempt(self) -> None:
        self.job_id = uuid.uuid4().hex

    def make(
        self, *, can_load_task: bool = True, life: int = 1, on_replaced: Callable[[], None] = lambda: None
    ) -> Fleet:
        document = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}}
        spec = parse_spec(document if can_load_task else {**document, "task": "no_such_module:Task"})
        return RayFleet(
            SupervisorConfig(
                job_id=self.job_id,
                attempt=1,
                spec=spec,
                checkpoint_root="/nowhere",
                granted=1,
                epoch=1,
                spec_version=1,
                snapshot_key="secret",
            ),
            life=life,
            on_replaced=on_replaced,
        )

    def name(self, index: int) -> str:
        return f"shoal/{self.job_id}/1/worker-{index}"

    def end_process(self, info: WorkerInfo) -> None:
        os.kill(info.pid, signal.SIGKILL)

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        async def coroutine() -> None:
            try:
                await main()
            finally:
                fleet = self.make(life=9)
                for index in range(2):
                    if fleet.find(index, self.name(index), None):
                        await fleet.kill(index)

        asyncio.run(coroutine())
