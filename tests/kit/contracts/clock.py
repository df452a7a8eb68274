"""What every Clock does."""

import asyncio

import pytest

from doubles.event_loop import settle
from shoal_service.clock import Clock


class ClockContract:
    def make(self) -> Clock:
        raise NotImplementedError

    async def pass_time(self, clock: Clock, seconds: float) -> None:
        raise NotImplementedError

    async def test_a_sleep_ends_after_its_time_and_not_before(self) -> None:
        clock = self.make()
        began = clock.time(), clock.monotonic()
        sleep = asyncio.create_task(clock.sleep(0.2))
        await settle()
        assert not sleep.done() or clock.monotonic() - began[1] >= 0.19
        await self.pass_time(clock, 0.3)
        await sleep
        assert clock.time() - began[0] >= 0.19
        assert clock.monotonic() - began[1] >= 0.19

    async def test_sleeps_end_in_the_order_of_their_times(self) -> None:
        clock, ended = self.make(), list[float]()

        async def sleep(seconds: float) -> None:
            await clock.sleep(seconds)
            ended.append(seconds)

        tasks = [asyncio.create_task(sleep(seconds)) for seconds in (0.2, 0.0, 0.1)]
        await self.pass_time(clock, 0.3)
        await asyncio.gather(*tasks)
        assert ended == [0.0, 0.1, 0.2]

    async def test_waiting_returns_the_result_or_raises_the_error_of_what_it_waits_for(self) -> None:
        async def fail() -> None:
            raise LookupError

        clock = self.make()
        assert await clock.wait_for(asyncio.sleep(0, "done"), 60.0) == "done"
        with pytest.raises(LookupError):
            await clock.wait_for(fail(), 60.0)

    async def test_a_wait_beyond_its_timeout_raises_and_cancels_the_awaited_call(self) -> None:
        clock, forever = self.make(), asyncio.create_task(asyncio.Event().wait())
        waiting = asyncio.create_task(clock.wait_for(forever, 0.1))
        await self.pass_time(clock, 0.2)
        with pytest.raises(TimeoutError):
            await waiting
        assert forever.cancelled()

    async def test_a_cancelled_wait_cancels_what_is_waited_for(self) -> None:
        clock, forever = self.make(), asyncio.create_task(asyncio.Event().wait())
        waiting = asyncio.create_task(clock.wait_for(forever, 60.0))
        await settle()
        waiting.cancel()
        await asyncio.gather(waiting, forever, return_exceptions=True)
        assert waiting.cancelled() and forever.cancelled()
