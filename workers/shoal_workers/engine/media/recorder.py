"""Recorder of media: takes copies on the training thread, and writes them on a separate thread.

    training thread   log(): check, copy, append to the queue          begin | ... steps ... | end: waits a little
    recorder thread          encode | images | record | limits

The training thread takes no lock that the other thread holds while it works: a thread of lower priority may hold one
for long. The queue is bounded by calls and bytes; a call while it is full is dropped, counted in the next record, and
mentioned once in the job's log. An error of the storage never reaches the training. A record has attempt and
generation; nothing is written once the generation is fenced. Each worker has one; the engine begins and ends it with
each generation.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from shoal_workers.checkpoint.storage import Directory, open_job_directory
from shoal_workers.contract.media import (
    FOLDER,
    MAX_CALLS,
    MediaImage,
    MediaRanks,
    MediaRecord,
    MediaSpec,
    MediaText,
    RecordName,
    thinned_out,
)
from shoal_workers.engine.media.capture import Captured, capture
from shoal_workers.engine.media.encode import encode_image, fetch, make_histogram, make_table
from shoal_workers.engine.media.staging import Staging

_MAX_WAITING = 64
"""Calls that may wait for the storage."""
_NICENESS = 10
"""Niceness of the thread: training goes first if there are too few CPUs."""


@dataclass(frozen=True, slots=True)
class _Writer:
    """One rank in one generation, which logs."""

    attempt: int
    generation: int
    rank: int
    is_fenced: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Call:
    writer: _Writer
    name: RecordName
    at: float
    held_s: float
    captured: Captured
    file: tuple[str, bytes] | None = None
    """Name and content of a file that is stored without a record."""


class Recorder:
    """Logs media of one worker. Each method says which thread calls it."""

    def __init__(self, root: str, settings: MediaSpec, *, say: Callable[[str], None]) -> None:
        """Write below `root`, the job's checkpoint directory.

        Args:
            say: adds a line to the job's log; on any thread.
        """
        self._root = root
        self._settings = settings
        self._say = say
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        # Each counter is written by one thread and read by both, so neither waits for the other.
        self._waiting: SimpleQueue[_Call | None] = SimpleQueue()
        self._num_put = self._bytes_put = self._num_dropped = 0
        """Sums over all calls so far; training thread."""
        self._num_done = self._bytes_taken = 0
        """Sums over all calls so far; recorder thread."""
        self._num_lost = self._num_counted = 0
        """Calls that could not be written, and dropped or lost calls that a record has counted; recorder thread."""
        self._done = threading.Condition()
        """Notified after each call that is done; `end` waits for it."""
        self._writer: _Writer | None = None
        self._step = -1
        self._num_calls = 0
        self._said: set[str] = set()
        self._stored: dict[RecordName, dict[str, int]] | None = None
        """Files of this rank in the storage with their bytes, by record. Recorder thread only."""
        self._stored_rank = -1

    def begin(self, *, attempt: int, generation: int, rank: int, is_fenced: Callable[[], bool]) -> None:
        """Begin a generation. Training thread; `is_fenced` may be called on any thread."""
        self._step, self._num_calls = -1, 0
        is_recorded = self._settings.enabled and (rank == 0 or self._settings.ranks is MediaRanks.ALL)
        self._writer = _Writer(attempt, generation, rank, is_fenced) if is_recorded else None
        if is_recorded and (self._thread is None or not self._thread.is_alive()):  # here, so that `log` need not wait
            self._thread = threading.Thread(target=self._write_all, name="shoal-media", daemon=True)
            self._thread.start()

    def end(self, *, within_s: float) -> None:
        """End the generation, and wait for the storage for at most `within_s`. Training thread."""
        self._writer = None
        with self._done:
            is_done = self._done.wait_for(lambda: self._num_done == self._num_put, within_s)
        if within_s and not is_done:
            self._say(
                f"media: the storage has not taken all that was logged within {within_s:g} s; the rest may be lost"
            )

    def log(
        self,
        step: int,
        *,
        images: Mapping[str, Any] | None = None,
        histogram: Mapping[str, Any] | None = None,
        table: Mapping[str, Any] | None = None,
        text: Mapping[str, str] | None = None,
    ) -> None:
        """Record copies of these values for `step`, which may still run. Training thread; never waits.

        Does nothing between generations, and on a rank that is not recorded.

        Raises:
            ValueError, TypeError: a name or a value cannot be logged.
        """
        writer, start = self._writer, time.perf_counter()
        if writer is None:
            return
        if step != self._step:
            self._step, self._num_calls = step, 0
        self._num_calls += 1
        is_full = (
            self._num_put - self._num_done > _MAX_WAITING
            or self._bytes_put - self._bytes_taken >= self._settings.max_waiting_bytes
        )
        if is_full or self._num_calls > MAX_CALLS:
            self._drop(is_full=is_full)
            return
        captured = capture(images, histogram, table, text, staging=self._staging)
        name = RecordName(step, writer.attempt, writer.generation, writer.rank, self._num_calls)
        self._put(_Call(writer, name, time.time(), time.perf_counter() - start, captured))

    def store(self, file: str, make: Callable[[], bytes]) -> None:
        """Replace a file beside the records. Training thread; never waits for the storage.

        Does nothing, and does not call `make`, on a rank that is not recorded.
        """
        if (writer := self._writer) is not None:
            name = RecordName(0, writer.attempt, writer.generation, writer.rank, 0)
            self._put(_Call(writer, name, time.time(), 0.0, Captured(), (file, make())))

    def _put(self, call: _Call) -> None:
        self._num_put += 1
        self._bytes_put += call.captured.num_bytes
        self._waiting.put(call)

    def close(self) -> None:
        """Let the recorder thread end once it has written what waits. Training thread, between generations."""
        if self._thread is not None and self._thread.is_alive():
            self._waiting.put(None)

    def _drop(self, *, is_full: bool) -> None:
        self._num_dropped += 1
        if is_full:
            self._say_once(
                "media: some of what was logged is dropped, because it comes faster than the storage takes it"
            )
        else:
            self._say_once(
                f"media: more than {MAX_CALLS} calls in one step; the rest is dropped. Log several values at once"
            )

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            self._say(message)

    def _write_all(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        except OSError:
            pass
        self._staging.make_ready()
        while (call := self._waiting.get()) is not None:
            self._bytes_taken += call.captured.num_bytes
            num_dropped = self._num_dropped + self._num_lost - self._num_counted
            try:
                is_written = not call.writer.is_fenced() and self._write(call, num_dropped)
            except Exception as error:  # of the storage, or a value that cannot be encoded
                self._say_once(f"media: what was logged could not be stored: {type(error).__name__}: {error}")
                is_written = False
            if is_written:
                self._num_counted += num_dropped
            else:
                self._num_lost += 1
            if (buffer := call.captured.buffer) is not None:
                self._staging.give_back(buffer)
            del call, buffer
            with self._done:
                self._num_done += 1
                self._done.notify_all()

    def _write(self, call: _Call, num_dropped: int) -> bool:
        """Write the files of a call; False if the generation was fenced meanwhile."""
        directory = open_job_directory(self._root).child(FOLDER)
        if call.file is not None:
            directory.create()
            directory.write(call.file[0], [call.file[1]])
            return True
        if self._stored is None or self._stored_rank != call.name.rank:
            directory.create()
            self._stored, self._stored_rank = _list_files(directory, call.name.rank), call.name.rank
        files: dict[str, int] = {}
        record = self._write_images(call, num_dropped, directory, files)
        data = record.model_dump_json().encode()
        if call.writer.is_fenced():
            for file in files:
                directory.remove(file)
            return False
        directory.write(str(call.name), [data])
        files[str(call.name)] = len(data)
        self._stored[call.name] = files
        self._remove(directory, [name for name in self._stored if _is_replaced(name, call.name)])
        self._enforce_limits(directory)
        return True

    def _write_images(self, call: _Call, num_dropped: int, directory: Directory, files: dict[str, int]) -> MediaRecord:
        """Write the images, and add them to `files`. Return the record of the call."""
        captured, notes, images = fetch(call.captured), list(call.captured.notes), []
        for index, image in enumerate(captured.images):
            try:
                data, suffix, width, height = encode_image(image)
            except (OSError, ValueError) as error:
                notes.append(f"image {image.name}: {error}")
                continue
            file = call.name.image(index, suffix)
            directory.write(file, [data])
            files[file] = len(data)
            images.append(
                MediaImage(name=image.name, file=file, bytes=len(data), width=width, height=height, note=image.note)
            )
        return MediaRecord(
            step=call.name.step,
            attempt=call.name.attempt,
            generation=call.name.generation,
            rank=call.name.rank,
            at=call.at,
            held_s=call.held_s,
            dropped=num_dropped,
            images=tuple(images),
            histograms=tuple(map(make_histogram, captured.tensors)),
            tables=tuple(map(make_table, captured.tables)),
            texts=tuple(MediaText(name=name, text=text, num_chars=num) for name, text, num in captured.texts),
            notes=tuple(notes),
        )

    def _enforce_limits(self, directory: Directory) -> None:
        assert self._stored is not None
        while True:
            steps = {name.step for name in self._stored}
            num_bytes = sum(sum(files.values()) for files in self._stored.values())
            if len(steps) < 2 or (len(steps) <= self._settings.max_steps and num_bytes <= self._settings.max_bytes):
                return
            removed = {*thinned_out(steps)}
            self._remove(directory, [name for name in self._stored if name.step in removed])

    def _remove(self, directory: Directory, names: list[RecordName]) -> None:
        assert self._stored is not None
        for name in names:
            files = self._stored.pop(name)
            directory.remove(str(name))  # first: a record never names an image that does not exist
            for file in files.keys() - {str(name)}:
                directory.remove(file)


def _is_replaced(record_name: RecordName, by: RecordName) -> bool:
    return record_name.step == by.step and (record_name.attempt, record_name.generation) < (by.attempt, by.generation)


def _list_files(directory: Directory, rank: int) -> dict[RecordName, dict[str, int]]:
    """Return the bytes of each stored file of this rank, by record.

    Images without a record are those of a writer that was killed; the limits count them with their step.
    """
    files_by_record: dict[RecordName, dict[str, int]] = {}
    for file, num_bytes in directory.files().items():
        stem = file.partition(".")[0]
        stem = stem.rpartition("-i")[0] if "-i" in stem else stem
        name = RecordName.parse(f"{stem}.json")
        if name is not None and name.rank == rank:
            files_by_record.setdefault(name, {})[file] = num_bytes
    return files_by_record
