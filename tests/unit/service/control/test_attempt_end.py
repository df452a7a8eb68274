"""The end of an attempt: it is stored, its supervisor is released, and its actors are ended."""

import asyncio

from doubles.driver_bench import END, DriverBench
from doubles.event_loop import settle
from doubles.fake_clock import FakeClock
from shoal_service.control.driver import to_its_end
from shoal_service.store.store import Store
from shoal_workers.contract.job import JobState


async def test_the_receipt_of_the_end_releases_the_supervisor(store: Store) -> None:
    bench = DriverBench(store)
    supervisor = await bench.started()
    supervisor.end(END)
    await bench.clock.advance(1.0)
    assert supervisor.is_released and store.get_job(bench.job_id).status.state is JobState.SUCCEEDED
    assert bench.task.done() and bench.cluster.reaped == [(bench.job_id, 1)]


async def test_a_driver_that_is_cancelled_while_it_ends_the_actors_does_so_first() -> None:
    """No later control plane knows of an attempt whose end is stored."""

    clock = FakeClock()
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def reap() -> None:
        await may_end.wait()
        ended.set()

    task = asyncio.create_task(to_its_end(reap(), clock, 5.0))
    await settle()
    task.cancel()
    await settle()
    assert not task.done()
    may_end.set()
    await settle()
    assert task.cancelled() and ended.is_set()


async def test_the_supervisor_of_a_job_that_goes_on_is_left_at_once(store: Store) -> None:
    bench = DriverBench(store)
    supervisor = await bench.started()
    await bench.clock.advance(1.0)
    bench.task.cancel()
    await settle()
    assert bench.task.cancelled() and not supervisor.is_released and bench.cluster.reaped == []
