"""Threads: blocking calls on a few threads of their own, so that many lanes do not delay the control loop's calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Call it on an event loop."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="webhooks")

    async def __call__(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """The result of the call. A cancelled caller does not end it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(call, *arguments, **named))

    def close(self) -> None:
        """Returns when the calls that have begun are over."""
        self._pool.shutdown(cancel_futures=True)
