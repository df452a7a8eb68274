"""A server that stops when the end of an attempt has just arrived releases its supervisor first, and waits for no
other."""

from __future__ import annotations

import asyncio
from itertools import count

from doubles.event_loop import run, settle, until
from doubles.fake_clock import FakeClock
from doubles.fake_cluster import FakeCluster, FakeSupervisor
from shoal_service.control.config import ControlConfig
from shoal_service.control.driver import Driver
from shoal_service.control.supervisors.report_writer import ReportWriter
from shoal_service.core.endings import AttemptEnd
from shoal_service.signing.calls import SignedCall
from shoal_service.store.store import Store
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import EndReason, JobState

SPEC = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 4}})
END = AttemptEnd(reason=EndReason.FINISHED, message="done", step=4)


class Ending:
    """A job whose supervisor answers `release` when `answers` is set, and the task of its driver."""

    def __init__(self, store: Store) -> None:
        self.clock, self.cluster = FakeClock(), FakeCluster()
        self.asked, self.answers = asyncio.Event(), asyncio.Event()
        now = self.clock.time()
        lease = store.acquire_lease("me", ttl_s=600, now=now)
        assert lease is not None
        self.job_id = store.create_job(SPEC, idempotency_key=None, now=now)[0].id
        store.begin_attempt(self.job_id, workers=2, epoch=lease.epoch, now=now)
        [row] = store.jobs_to_drive()
        config = ControlConfig(owner="me", lease_ttl_s=10.0, checkpoint_url="/checkpoints/")
        driver = Driver(
            store,
            self.cluster,
            self.clock,
            config,
            row,
            epoch=lease.epoch,
            numbers=count(1),
            writer=ReportWriter(store, self.clock),
        )
        self.task = asyncio.create_task(driver.run())

    async def supervisor(self) -> FakeSupervisor:
        await until(lambda: self.cluster.supervisors)
        [supervisor] = self.cluster.supervisors.values()
        supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=1), ())
        release = supervisor.release

        async def slow(epoch: int, signed: SignedCall | None = None) -> None:
            self.asked.set()
            await self.answers.wait()
            await release(epoch, signed)

        supervisor.release = slow  # type: ignore[method-assign]
        return supervisor

    async def until_released(self) -> FakeSupervisor:
        supervisor = await self.supervisor()
        supervisor.end(END)
        await self.clock.advance(1.0)
        await self.asked.wait()
        return supervisor


def test_a_driver_that_is_cancelled_at_the_end_releases_its_supervisor_first(store: Store) -> None:
    async def main() -> None:
        ending = Ending(store)
        supervisor = await ending.until_released()
        assert store.get_job(ending.job_id).status.state is JobState.SUCCEEDED
        ending.task.cancel()
        await settle()
        assert not ending.task.done(), "the job has ended, so no later control plane would release it"
        ending.answers.set()
        await settle()
        assert ending.task.cancelled()
        assert supervisor.is_released and ending.cluster.reaped == [(ending.job_id, 1)]

    run(main())


def test_a_supervisor_that_does_not_answer_holds_a_stop_up_for_seconds_only(store: Store) -> None:
    async def main() -> None:
        ending = Ending(store)
        supervisor = await ending.until_released()
        ending.task.cancel()
        await settle()
        await ending.clock.advance(4.9)
        assert not ending.task.done()
        await ending.clock.advance(0.2)
        await settle()
        assert ending.task.cancelled() and not supervisor.is_released

    run(main())


def test_the_supervisor_of_a_job_that_goes_on_is_left_at_once(store: Store) -> None:
    async def main() -> None:
        ending = Ending(store)
        supervisor = await ending.supervisor()
        await ending.clock.advance(1.0)
        ending.task.cancel()
        await settle()
        assert ending.task.cancelled() and not supervisor.is_released and ending.cluster.reaped == []

    run(main())
