"""Runs a test's coroutine on an event loop without threads: `asyncio.to_thread` calls its function immediately.

So the order of everything in a test is the same in each run, and the loop is idle when nothing is ready.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_TURNS = 200
_MAX_TURNS = 20_000
_LIMIT_S = 240.0


def run(main: Coroutine[Any, Any, None]) -> None:
    """Everything that the coroutine has left running is cancelled at its end."""

    async def limited() -> None:
        asyncio.get_running_loop().set_default_executor(_InlineExecutor())
        async with asyncio.timeout(_LIMIT_S):
            await main

    asyncio.run(limited())


async def settle() -> None:
    """Let every task run until it waits for something that only the test provides."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Let tasks run until the condition holds. Time does not pass."""
    for _ in range(_MAX_TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{what} does not come true without time passing")


class Hangs(BaseException):
    """Raised by a double in the place of a blocking call that does not return before `answer` or `go_on`."""

    future: Future[Any]

    def answer(self, error: Exception) -> None:
        self.future.set_exception(error)

    def go_on(self) -> None:
        """Make the call that the exception was made with, and return what it returns."""
        [call] = self.args
        self.future.set_result(call())


class _InlineExecutor(ThreadPoolExecutor):
    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Hangs as hang:
            hang.future = future
        except BaseException as error:
            future.set_exception(error)
        return future
