"""Work that is done to its end although the task that waits for it is cancelled. Called by the driver of an attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from shoal_service.clock import Clock


async def to_its_end(work: Coroutine[Any, Any, None], clock: Clock, within_s: float) -> None:
    """What `work` raises. If the caller is cancelled, it waits for the rest of the work, `within_s` seconds at most.

    A server that stops cancels its drivers. No later control plane knows of an attempt whose end is stored, so without
    this its supervisor would stay in a cluster that outlives the server.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(Exception):  # nothing is left that would act on an error
            await clock.wait_for(task, within_s)
        raise
