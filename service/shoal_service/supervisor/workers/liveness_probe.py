"""The liveness probe of a worker: a connection that breaks when the worker, or its raylet, ends.

Ray reports the death of a single worker after some tens of milliseconds. It reports the death of a worker together with
its raylet only after it has lost and retried a connection of its own, or after its health checks. A port that was open
and now refuses connections is proof: the host answers, and no process listens. A host that does not answer is not
judged here. Called by the worker clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

Address = tuple[str, int]

_PAUSE_S = 0.02
_UNREACHABLE_S = 1.0
REFUSAL_S = 0.2
_RAYLET_CHECK_S = 0.3
"""A live raylet reports the worker's death, with its cause, within this time. A raylet that dies just after its
workers has ended by then."""


@dataclass(frozen=True, slots=True)
class Gone:
    """No process listens at the worker's port, or soon none will."""

    at: float
    """Wall-clock time at which the connection broke."""
    with_raylet: bool
    """The node's raylet has ended too, and with it all workers of that node."""


async def until_gone(worker: Address, raylet: Callable[[], Address | None]) -> Gone | None:
    """Returns once a port that was open refuses connections. None: the worker's port was never open to this process.

    A connection may break although the worker lives (a survivor shuts its own connections to wake up), so each broken
    connection is tried again.

    Args:
        raylet: the address of the raylet of the worker's node; None: unknown.
    """
    was_open = raylet_was_open = False
    at = 0.0
    while True:
        try:
            reader, writer = await asyncio.open_connection(*worker)
        except ConnectionRefusedError:
            if not was_open:
                return None
            await asyncio.sleep(_RAYLET_CHECK_S)
            return Gone(at, raylet_was_open and await refuses(raylet()))
        except OSError:  # the host cannot be reached, so nothing is known about the worker
            await asyncio.sleep(_UNREACHABLE_S)
            continue
        was_open = True
        try:
            raylet_was_open = raylet_was_open or await accepts(raylet())
            while await reader.read(1):
                pass  # the worker sends nothing of its own accord
        except OSError:
            pass  # a reset also ends the connection
        finally:
            writer.close()
        at = time.time()
        if raylet_was_open and await refuses(raylet()):
            return Gone(at, with_raylet=True)
        await asyncio.sleep(_PAUSE_S)


async def accepts(address: Address | None) -> bool:
    """A process listens there, and can be reached from here."""
    return address is not None and await _try(address) is None


async def refuses(address: Address | None) -> bool:
    """The host answers that no process listens there."""
    return address is not None and isinstance(await _try(address), ConnectionRefusedError)


async def _try(address: Address) -> OSError | None:
    """A loop that was busy has not looked whether an answer came in time: the host is asked again."""
    while True:
        began = time.monotonic()
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*address), REFUSAL_S)
        except TimeoutError as error:
            if time.monotonic() - began < 2 * REFUSAL_S:
                return error
        except OSError as error:
            return error
        else:
            writer.close()
            return None
