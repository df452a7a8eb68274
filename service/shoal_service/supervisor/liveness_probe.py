"""LivenessProbe: a connection to a worker, which breaks in the moment in which the worker, or its raylet, ends.

Ray says so of a worker that dies alone after some tens of milliseconds; of one that dies with its raylet only after a
connection of its own has been given up and tried again, or after its health checks. A port that was open and refuses
needs no second opinion: the host answers, and nobody listens. A host that says nothing is another matter, and not ours.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

Address = tuple[str, int]

_PAUSE_S = 0.02
_UNREACHABLE_S = 1.0
_REFUSAL_S = 0.2
_SECOND_LOOK_S = 0.3
"""A raylet that lives tells of a death sooner, and why; one that dies a moment after its workers is gone by then."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Nobody listens at the worker's port any more, or very soon."""

    at: float
    """Wall-clock time at which the connection broke."""
    with_raylet: bool
    """And with it everything that Ray has on that node."""


async def until_gone(worker: Address, raylet: Callable[[], Address | None]) -> Gone | None:
    """Returns once a port refuses that was open before. None: the worker's was never open to us.

    A connection may break although the worker lives (a survivor shuts its own to wake up), so the ports are tried.

    Args:
        raylet: where that of its node listens, as far as is known by now.
    """
    was_open = raylet_was_open = False
    at = 0.0
    while True:
        try:
            reader, writer = await asyncio.open_connection(*worker)
        except ConnectionRefusedError:
            if not was_open:
                return None
            await asyncio.sleep(_SECOND_LOOK_S)
            return Gone(at, raylet_was_open and await refuses(raylet()))
        except OSError:  # no way to the host: no word about the worker
            await asyncio.sleep(_UNREACHABLE_S)
            continue
        was_open = True
        try:
            raylet_was_open = raylet_was_open or await accepts(raylet())
            while await reader.read(1):
                pass  # nothing is said unasked
        except OSError:
            pass  # reset: an end like any other
        finally:
            writer.close()
        at = time.time()
        if raylet_was_open and await refuses(raylet()):
            return Gone(at, with_raylet=True)
        await asyncio.sleep(_PAUSE_S)


async def accepts(address: Address | None) -> bool:
    """Somebody listens there, and can be reached from here."""
    return address is not None and await _try(address) is None


async def refuses(address: Address | None) -> bool:
    """The host answers at once that nobody listens there."""
    return address is not None and isinstance(await _try(address), ConnectionRefusedError)


async def _try(address: Address) -> OSError | None:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*address), _REFUSAL_S)
    except OSError as error:  # a TimeoutError is one
        return error
    writer.close()
    return None
