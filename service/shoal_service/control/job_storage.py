"""Files of jobs that the server reads and deletes for people. The storage may hang, so it has threads of its own.

    JobStorage     files of programs, profiles and checkpoints: one of NUM_THREADS threads reads the job's directory,
                   <checkpoint.url>/<job id>
    Verifications  reads whole checkpoints, one thread each: marker, lengths, checksums; the result is kept until it was
                   answered

The directory follows from the spec and the server's settings, never from what a worker has reported, and no symbolic
link in it is followed: a job's code must not choose which files the server reads. Supervisors and workers have their
own access; nothing here commits, restores or chooses. Used on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from shoal_service.artifact_views import MediaPage, OutputPage, OutputView
from shoal_service.problems import ServiceError
from shoal_service.supervisor.checkpoints import CheckpointCatalog
from shoal_service.supervisor.config import checkpoint_root
from shoal_service.telemetry.tallies import WaitTallies
from shoal_service.views import JobView, VerificationState, VerificationView
from shoal_workers.checkpoint.errors import DamagedCheckpoint
from shoal_workers.checkpoint.index import index_name
from shoal_workers.checkpoint.storage import Directory, open_job_directory
from shoal_workers.contract import CheckpointName, MediaRecord, RecordName, counted, matcher, merged, name_of, spread
from shoal_workers.contract.data_preview import DATA_FILE, MAX_FILE_BYTES, DataPreview
from shoal_workers.contract.media import FOLDER as MEDIA
from shoal_workers.contract.outputs import FOLDER as OUTPUTS
from shoal_workers.contract.profiles import FOLDER
from shoal_workers.job_files.outputs import read_manifests

T = TypeVar("T")
_NUM_THREADS = 4
_ANSWER_S = 20.0
_PIECE_BYTES = 1 << 20
MAX_READING = 2
_FIRST_INDEX = index_name(0)
_MAX_INDEX_BYTES = 64 << 20
_MAX_IMAGE_BYTES = 32 << 20
_MAX_RECORD_BYTES = 4 << 20
_MAX_PAGE_BYTES = 16 << 20
"""What one answer reads of records: the code of a job writes them."""
STALL_S = 60.0
_Key = tuple[str, str]
"""A job and a checkpoint."""


class StorageAway(ServiceError, code="storage-away", status=502, title="The storage does not answer"):
    """The server cannot reach the job's checkpoint directory, or it does not answer in time."""


class JobStorage:
    """The directories of jobs. Calls wait for a thread; one that hangs raises StorageAway after a time."""

    def __init__(self, default_url: str, waits: WaitTallies | None = None) -> None:
        """`default_url`: the checkpoint directory of jobs without a `checkpoint.url`; empty: they cannot be read."""
        self._default_url = default_url
        self._waits = waits or WaitTallies()
        self._waits.expect("storage", _ANSWER_S)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="storage")

    def catalog(self, job: JobView) -> CheckpointCatalog:
        """Open the catalog of a job's checkpoints. Raises StorageAway."""
        return CheckpointCatalog(self._find_root(job))

    def root(self, job: JobView) -> str:
        """URL of the job's directory; empty if this server does not know it."""
        try:
            return self._find_root(job)
        except StorageAway:
            return ""

    async def profile_file(self, job: JobView, number: int, name: str) -> tuple[int, AsyncIterator[bytes]] | None:
        """Length and content of a file of a profile; None if it is not there any more. `name` must be a valid one.

        Raises:
            StorageAway: also while the content is read.
        """
        place = open_job_directory(self._find_root(job)).child(FOLDER).child(name_of(number))
        return await self._open(place, name)

    async def media(self, job: JobView, step: int | None, limit: int, *, is_spread: bool = False) -> MediaPage:
        """The records of a step, else the newest ones. Raises StorageAway."""
        place = open_job_directory(self._find_root(job)).child(MEDIA)
        return await self.run(lambda: _list_media(place, step, limit, is_spread))

    async def data_preview(self, job: JobView) -> DataPreview:
        """What the job reads, as its rank 0 has described it; without splits if there is no valid document. Raises
        StorageAway."""
        place = open_job_directory(self._find_root(job)).child(MEDIA)
        preview = await self._read_parsed(place, DATA_FILE, MAX_FILE_BYTES, DataPreview.model_validate_json)
        return preview or DataPreview()

    async def media_file(self, job: JobView, name: str) -> bytes | None:
        """An image; None if there is none of this name. `name` must be a valid one. Raises StorageAway."""
        return await self._read_parsed(
            open_job_directory(self._find_root(job)).child(MEDIA), name, _MAX_IMAGE_BYTES, bytes
        )

    async def outputs(self, job: JobView, patterns: Sequence[str], limit: int) -> OutputPage:
        """What the program has written, of files that match one of the patterns. Raises StorageAway."""
        place, matches = open_job_directory(self._find_root(job)).child(OUTPUTS), matcher(patterns)
        manifests = await self.run(lambda: read_manifests(place))
        outputs = [output for output in merged(manifests) if matches(output.name)]
        views = [
            OutputView(
                name=output.name,
                bytes=output.file.bytes,
                modified_at=output.file.modified_ns / 1e9,
                sha256=output.file.sha256,
                node=output.node,
            )
            for output in outputs[:limit]
        ]
        return OutputPage(
            items=tuple(views),
            num_files=len(outputs),
            bytes=sum(output.file.bytes for output in outputs),
            num_left_out=sum(manifest.num_left_out for manifest in manifests.values()),
            bytes_left_out=sum(manifest.bytes_left_out for manifest in manifests.values()),
        )

    async def output_file(self, job: JobView, name: str) -> tuple[int, AsyncIterator[bytes]] | None:
        """Length and content of a file of `outputs`; None if there is none of this name.

        Raises:
            StorageAway: also while the content is read.
        """
        storage = open_job_directory(self._find_root(job)).child(OUTPUTS)
        manifests = await self.run(lambda: read_manifests(storage))
        file = next((output for output in merged(manifests) if output.name == name), None)
        if file is None:
            return None
        return await self._open(storage.child(str(file.node)), file.file.content)

    async def _open(self, place: Directory, name: str) -> tuple[int, AsyncIterator[bytes]] | None:
        """Length and content of a file; None if it is not there any more."""
        try:
            length = (await self.run(place.files)).get(name)
        except FileNotFoundError:
            return None
        return None if length is None else (length, self._read_pieces(place, name, length))

    async def data_hash(self, job: JobView, name: CheckpointName) -> str:
        """Content hash of the data that a checkpoint was made with; empty if it says none, or cannot be read."""
        place = open_job_directory(self._find_root(job)).child(str(name))
        try:
            return await self._read_parsed(place, _FIRST_INDEX, _MAX_INDEX_BYTES, _parse_data_hash) or ""
        except (StorageAway, AttributeError):
            return ""

    async def _read_parsed(self, place: Directory, name: str, most_bytes: int, parse: Callable[[bytes], T]) -> T | None:
        """Read and parse a file on one of the threads. None if it is not there, is larger, or `parse` raises
        ValueError."""

        def read() -> T | None:
            length = place.files().get(name)
            return None if length is None or length > most_bytes else parse(place.read(name))

        try:
            return await self.run(read)
        except (FileNotFoundError, ValueError):
            return None

    async def run(self, work: Callable[[], T], *, within_s: float = _ANSWER_S) -> T:
        """Run a blocking call on one of the threads, and return its result. Raises StorageAway, FileNotFoundError."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            async with self._waits.bounded("storage", within_s):
                return await asyncio.shield(future)
        except TimeoutError:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, whatever it is
            raise StorageAway(f"the storage did not answer within {within_s:g} s") from None
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageAway(f"the server cannot use the storage: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the threads without a wait, because one that hangs in the storage cannot be ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find_root(self, job: JobView) -> str:
        if not (job.spec.checkpoint.url or self._default_url):
            raise StorageAway("this server has no checkpoint directory (SHOAL_CHECKPOINT_URL)")
        return checkpoint_root(job.spec, self._default_url, job.id)

    async def _read_pieces(self, place: Directory, name: str, length: int) -> AsyncIterator[bytes]:
        at = 0
        while at < length:
            buffer = bytearray(min(_PIECE_BYTES, length - at))
            count = await self.run(lambda at=at, buffer=buffer: place.read_into(name, at, memoryview(buffer)))  # type: ignore[misc]
            if not count:
                raise StorageAway(f"{name} became shorter while it was read")
            yield bytes(buffer[:count])
            at += count


def _parse_data_hash(content: bytes) -> str:
    extra = json.loads(content).get("extra", {})
    data_hash = extra.get("data") if isinstance(extra, dict) else None
    return data_hash[:200] if isinstance(data_hash, str) else ""


def _list_media(place: Directory, step: int | None, limit: int, is_spread: bool) -> MediaPage:
    """A record that cannot be read is left out: the code of a job can write anything there."""
    try:
        lengths = place.files()
    except FileNotFoundError:
        return MediaPage(steps=(), items=(), num_records=0)
    names = counted(lengths)
    of_step = [name for name in names if step is None or name.step == step]
    chosen = spread(of_step, limit) if is_spread else of_step[-limit:]
    items: list[MediaRecord] = []
    left = _MAX_PAGE_BYTES
    for name in reversed(chosen):
        length = lengths[str(name)]
        if length > _MAX_RECORD_BYTES or length > left:
            continue
        left -= length
        with suppress(FileNotFoundError, ValueError):  # thinned out meanwhile, or not Shoal's
            record = MediaRecord.model_validate_json(place.read(str(name)))
            if RecordName(record.step, record.attempt, record.generation, record.rank, name.number) == name:
                items.append(record)
    return MediaPage(
        steps=tuple(sorted({name.step for name in names})), items=tuple(reversed(items)), num_records=len(names)
    )


@dataclass(slots=True)
class _Reading:
    """One verification. Its thread writes it, the loop reads it; each field is replaced as a whole."""

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
    """The verifications of one server process.

    A thread that hangs in the storage cannot be ended; it is left behind after STALL_S without a byte, and counts for
    the limit until it returns. Threads and loop share nothing but `_Reading`.
    """

    def __init__(self) -> None:
        self._readings: dict[_Key, _Reading] = {}

    async def verify(
        self, job_id: str, catalog: CheckpointCatalog, name: CheckpointName, *, wait_s: float
    ) -> VerificationView:
        """Begin the verification of a checkpoint, or join the one that runs, and wait up to `wait_s` seconds for its
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
            with suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(reading.done.set)

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
    """Tell whether the error means damage. A deletion removes the marker first, so a checkpoint without one may be
    gone, and is not called damaged."""
    try:
        is_there = reading.catalog.has_marker(reading.name)
    except OSError:
        return VerificationState.FAILED, str(error)
    return (VerificationState.DAMAGED if is_there else VerificationState.MISSING), str(error)
