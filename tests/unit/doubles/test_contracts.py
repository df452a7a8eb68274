"""Each fake, and each real implementation that needs no cluster, passes its contract tests."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.fake_agents import FakeAgentProcess, FakeAgents
from doubles.fake_catalog import FakeCatalog
from doubles.fake_clock import FakeClock
from doubles.fake_fleet import FakeFleet
from doubles.fake_journal import FakeJournal, JournalStorage, Replaced
from doubles.fake_key_values import FakeKeyValueStore
from doubles.fake_workers import FakeWorkers
from kit.contracts.agents import AgentsContract
from kit.contracts.catalog import CatalogContract
from kit.contracts.clock import ClockContract
from kit.contracts.fleet import FleetContract
from kit.contracts.journal import JournalContract
from shoal_service.clock import Clock, SystemClock
from shoal_service.supervisor.checkpoints import CheckpointCatalog
from shoal_service.supervisor.journal import GcsJournal
from shoal_service.supervisor.protocols import Catalog, Fleet, Journal, PollAgents
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ErrorReport, Phase, WorkerInfo


class TestFakeClock(ClockContract):
    def make(self) -> Clock:
        return FakeClock()

    async def pass_time(self, clock: Clock, seconds: float) -> None:
        assert isinstance(clock, FakeClock)
        await clock.advance(seconds)


class TestSystemClock(ClockContract):
    def make(self) -> Clock:
        return SystemClock()

    async def pass_time(self, clock: Clock, seconds: float) -> None:
        await asyncio.sleep(seconds)


class TestFakeJournal(JournalContract):
    @pytest.fixture(autouse=True)
    def _storage(self) -> None:
        self.storage = JournalStorage()

    def open(self) -> Journal:
        return FakeJournal(self.storage)


class TestGcsJournalOverAFakeStore(JournalContract):
    @pytest.fixture(autouse=True)
    def _store(self) -> None:
        self.store = FakeKeyValueStore()

    def open(self) -> Journal:
        def replaced() -> None:
            raise Replaced

        return GcsJournal(self.store, "j1", 1, on_replaced=replaced)


class TestFakeCatalog(CatalogContract):
    def make(self) -> Catalog:
        return FakeCatalog()

    def write(self, catalog: Catalog, name: CheckpointName, file: str, num_bytes: int) -> None:
        assert isinstance(catalog, FakeCatalog)
        catalog.files.setdefault(name, {})[file] = num_bytes


class TestCheckpointCatalog(CatalogContract):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "j1"

    def make(self) -> Catalog:
        return CheckpointCatalog(str(self.root))

    def write(self, catalog: Catalog, name: CheckpointName, file: str, num_bytes: int) -> None:
        path = self.root / str(name) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(num_bytes))


class TestFakeAgents(AgentsContract):
    @pytest.fixture(autouse=True)
    def _cluster(self) -> None:
        self.workers = FakeWorkers(SystemClock())
        self.processes: dict[str, FakeAgentProcess] = {}

    def make(self, *, life: int = 1, on_replaced: Callable[[], None] = lambda: None) -> PollAgents:
        return FakeAgents(self.workers, self.processes, life=life, on_replaced=on_replaced)

    def fleet(self, *, life: int = 1) -> Fleet:
        return FakeFleet(self.workers, life=life)

    @property
    def node(self) -> str:
        return "node-1"

    def name(self, index: int) -> str:
        return f"worker-{index}"

    async def kill_agent(self) -> None:
        self.processes[self.node].die()


class TestFakeFleet(FleetContract):
    @pytest.fixture(autouse=True)
    def _workers(self) -> None:
        self.workers = FakeWorkers(SystemClock())

    def make(
        self, *, can_load_task: bool = True, life: int = 1, on_replaced: Callable[[], None] = lambda: None
    ) -> Fleet:
        if not can_load_task:
            self.workers.start_error = ErrorReport(
                type="ImportError", message="no module", traceback="...", phase=Phase.PREPARING
            )
        return FakeFleet(self.workers, life=life, on_replaced=on_replaced)

    def name(self, index: int) -> str:
        return f"worker-{index}"

    def end_process(self, info: WorkerInfo) -> None:
        self.workers.by_name[info.worker_id].die()
