"""DriverBench: a job with an attempt, its driver, a real store and a fake cluster."""

import asyncio
from typing import Any

from doubles.event_loop import until
from doubles.fake_clock import FakeClock
from doubles.fake_cluster import FakeCluster, FakeSupervisor
from doubles.fake_clusters import FakeClusters
from shoal_service.control.config import ControlConfig
from shoal_service.control.driver import Driver
from shoal_service.control.supervisor_reports import SupervisorEndpoint, SupervisorLinks
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import PendingEvent
from shoal_service.store import driving, histories, submissions
from shoal_service.store.driving import DriveRow
from shoal_service.store.store import Store
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import EndReason, JobState
from shoal_workers.contract.log_settings import LogFormat, LogSettings

LOGS = LogSettings(format=LogFormat.JSON)
CONFIG = ControlConfig(owner="me", lease_ttl_s=10.0, checkpoint_url="/checkpoints/", logs=LOGS)
SPEC: dict[str, Any] = {"data": {"corpus": "python-stdlib"}, "stop": {"steps": 4}}
END = AttemptEnd(reason=EndReason.FINISHED, message="done", step=4)


class DriverBench:
    def __init__(self, store: Store, **spec: Any) -> None:
        self.store = store
        self.clock = FakeClock()
        self.cluster = FakeCluster(endpoint=SupervisorEndpoint(store, self.clock), clock=self.clock)
        lease = store.acquire_lease("me", ttl_s=600, now=self.clock.time())
        assert lease is not None
        self.epoch = lease.epoch
        job, _ = store.writing(submissions.create)(
            parse_spec({**SPEC, **spec}), idempotency_key=None, now=self.clock.time()
        )
        self.job_id = job.id
        store.writing(driving.begin_attempt, self.epoch)(job.id, workers=2, now=self.clock.time())
        self.driver = self.make_driver()

    def make_driver(self) -> Driver:
        return Driver(
            self.store,
            FakeClusters.single(self.cluster),
            self.clock,
            CONFIG,
            self.row,
            epoch=self.epoch,
            links=SupervisorLinks(self.store, self.clock),
        )

    def start(self) -> asyncio.Task[None]:
        self.task = asyncio.create_task(self.driver.run())
        return self.task

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def started(self) -> FakeSupervisor:
        """The supervisor, once the driver follows it and it has a status."""
        self.start()
        await until(lambda: self.cluster.supervisors)
        supervisor = self.supervisor
        supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=1), ())
        supervisor._changed.set()
        return supervisor

    @property
    def row(self) -> DriveRow:
        [row] = self.store.reading(driving.to_drive)()
        return row

    @property
    def supervisor(self) -> FakeSupervisor:
        return self.cluster.supervisors[self.job_id, 1]

    async def stored(self, *numbers: int) -> None:
        """Let time pass until the events with these numbers, and no others, are stored."""
        for _ in range(40):
            if self.events() == [*numbers]:
                return
            await self.clock.advance(0.05)
        raise AssertionError(self.events())

    def failed_starts(self) -> list[Any]:
        return [
            event.data
            for event in self.store.reading(histories.read_events)(self.job_id)
            if event.type == "supervisor.start_failed"
        ]

    def events(self) -> list[Any]:
        return [
            event.data["n"]
            for event in self.store.reading(histories.read_events)(self.job_id)
            if event.type == "worker.started"
        ]


def event(number: int) -> PendingEvent:
    return PendingEvent(at=1.0, type="worker.started", data={"n": number})
