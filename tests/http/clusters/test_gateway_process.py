"""The gateway that a server starts for its own cluster: ended, hanging, and unseen. Real processes without Ray."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kit.processes.server import until as until_now
from shoal_service.clusters.wire import GatewayConfig
from shoal_service.control.gateway_process import GatewayProcess
from shoal_service.core.gateways import HangLimits
from shoal_service.store.errors import StoreUnavailable

CONFIG = GatewayConfig(url="http://127.0.0.1:1", token="t", ray_address="auto")
COMMAND = (sys.executable, "-c", "import sys; sys.stdin.read()")
LIMITS = HangLimits(silent_s=0.3, start_s=60.0)
LOOK_S = 0.01


class Reports:
    """The newest one of the cluster, as the server reads it."""

    def __init__(self) -> None:
        self.number = 0
        self.goes_on = True
        self.is_away = False

    def __call__(self) -> tuple[str, int]:
        if self.is_away:
            raise StoreUnavailable("the database does not answer")
        self.number += self.goes_on
        return "a" * 16, self.number


async def until(condition: Callable[[], Any]) -> None:
    await asyncio.to_thread(until_now, condition, "the condition")


def following(check: Callable[[GatewayProcess, Reports], Any]) -> None:
    """Runs a gateway process while `check` runs."""

    async def main() -> None:
        reports = Reports()
        process = GatewayProcess(
            lambda: CONFIG, dict(os.environ), reports, command=COMMAND, limits=LIMITS, look_s=LOOK_S
        )
        running = asyncio.create_task(process.run())
        try:
            await until(lambda: process.pid and reports.number > 2)
            await check(process, reports)
        finally:
            running.cancel()
            await asyncio.to_thread(process.stop)

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGSTOP, 0])
def test_one_that_hangs_is_killed_and_another_one_is_started(number: int) -> None:
    """Stopped by a signal, or with a thread that has ended: it lives, and does not report."""

    async def check(process: GatewayProcess, reports: Reports) -> None:
        first = process.pid
        assert first is not None
        os.kill(first, number)
        reports.goes_on = False
        await until(lambda: process.pid not in (None, first))
        reports.goes_on = True
        second = process.pid
        seen = reports.number
        await until(lambda: reports.number > seen + 100)  # longer than the limit
        assert process.pid == second

    following(check)


@pytest.mark.slow
def test_while_the_database_is_away_it_is_not_killed() -> None:
    async def check(process: GatewayProcess, reports: Reports) -> None:
        first = process.pid
        reports.is_away = True
        await asyncio.sleep(3 * LIMITS.silent_s)
        reports.is_away = False
        seen = reports.number
        await until(lambda: reports.number > seen + 10)
        assert process.pid == first

    following(check)
