"""Verifications: reads whole checkpoints for people, one thread each, and tells how far it is.

    begin or join  ->  thread: marker, lengths, checksums of all files  ->  the result, kept until it was answered

A thread that hangs in the storage cannot be ended; it is left behind after STALL_S without a byte, and counts for the
limit until it returns. Used on the event loop; the threads share nothing with the loop but `_Reading`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field

from shoal_service.control.storage.job_storage import StorageAway
from shoal_service.supervisor.checkpoints.catalog import CheckpointCatalog
from shoal_service.views import VerificationState, VerificationView
from shoal_workers.checkpoint.errors import DamagedCheckpoint
from shoal_workers.contract.marker import CheckpointName

MAX_READING = 2
STALL_S = 60.0
_Key = tuple[str, str]
"""Job and checkpoint."""


@dataclass(slots=True)
class _Reading:
    """One verification. Written by its thread, read on the loop; each field is replaced as a whole."""

    catalog: CheckpointCatalog
    name: CheckpointName
    began_mono: float
    advanced_mono: float
    num_bytes: int = 0
    bytes_read: int = 0
    result: tuple[VerificationState, str] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def view(self, now_mono: float) -> VerificationView:
        state, message = self.result or (VerificationState.RUNNING, "")
        if self.result is None and now_mono - self.advanced_mono > STALL_S:
            state, message = VerificationState.FAILED, f"the storage gave no byte for {STALL_S:g} s"
        return VerificationView(
            name=str(self.name),
            state=state,
            bytes_read=self.bytes_read,
            bytes=self.num_bytes,
            seconds=now_mono - self.began_mono,
            message=message,
        )


class Verifications:
    """The verifications of one server process."""

    def __init__(self) -> None:
        self._readings: dict[_Key, _Reading] = {}

    async def verify(
        self, job_id: str, catalog: CheckpointCatalog, name: CheckpointName, *, wait_s: float
    ) -> VerificationView:
        """Begins the verification of a checkpoint, or joins the one that runs, and waits up to `wait_s` seconds for its
        end. Raises StorageAway: as many others as allowed are being read."""
        key = (job_id, str(name))
        reading = self._readings.get(key)
        if reading is None:
            if len(self._readings) >= MAX_READING:
                raise StorageAway(f"{MAX_READING} checkpoints are being verified already; try again later")
            reading = self._readings[key] = self._begin(catalog, name)
        try:
            await asyncio.wait_for(reading.done.wait(), wait_s)
        except TimeoutError:
            return reading.view(time.monotonic())
        self._readings.pop(key, None)
        return reading.view(time.monotonic())

    def _begin(self, catalog: CheckpointCatalog, name: CheckpointName) -> _Reading:
        now, loop = time.monotonic(), asyncio.get_running_loop()
        reading = _Reading(catalog, name, began_mono=now, advanced_mono=now)

        def run() -> None:
            reading.result = _verify(reading)
            try:
                loop.call_soon_threadsafe(reading.done.set)
            except RuntimeError:
                pass  # the server has ended meanwhile

        threading.Thread(target=run, name=f"verify-{name}", daemon=True).start()
        return reading


def _verify(reading: _Reading) -> tuple[VerificationState, str]:
    def advanced(bytes_read: int, num_bytes: int) -> None:
        reading.bytes_read, reading.num_bytes = bytes_read, num_bytes
        reading.advanced_mono = time.monotonic()

    try:
        reading.catalog.verify(reading.name, advanced)
    except DamagedCheckpoint as error:
        return _damaged(reading, error)
    except OSError as error:
        return VerificationState.FAILED, f"{type(error).__name__}: {error}"
    return VerificationState.WHOLE, ""


def _damaged(reading: _Reading, error: DamagedCheckpoint) -> tuple[VerificationState, str]:
    """A deletion removes the marker first, so a checkpoint without one may be gone, and is not called damaged."""
    try:
        is_there = reading.catalog.has_marker(reading.name)
    except OSError:
        return VerificationState.FAILED, str(error)
    return (VerificationState.DAMAGED if is_there else VerificationState.MISSING), str(error)
