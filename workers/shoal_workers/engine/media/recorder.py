"""Recorder of media: takes copies from the training thread, and writes them on a thread of its own.

    training thread   log(): check, copy, append to the queue          begin | ... steps ... | end: waits a little
    recorder thread          encode | images | record | limits

The training thread takes no lock that the other thread holds while it works: a thread of lower priority may hold one
for long. The queue is bounded by calls and bytes; what comes while it is full is dropped, counted in the next record
and said once in the job's log. An error of the storage never reaches the training. A record carries attempt and
generation; nothing is written once the generation is fenced. One per worker; the engine begins and ends it with each
generation.
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
from shoal_workers.engine.media.encode import fetched, histogram, image_file, table
from shoal_workers.engine.media.staging import Staging

_MAX_WAITING = 64
"""Calls that may wait for the storage."""
_NICENESS = 10
"""Niceness of the thread: training goes first if there are too few CPUs."""


@dataclass(frozen=True, slots=True)
class _Writer:
    """Who logs: one rank in one generation."""

    attempt: int
    generation: int
    rank: int
    is_over: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Call:
    writer: _Writer
    name: RecordName
    at: float
    held_s: float
    captured: Captured
    file: tuple[str, bytes] | None = None
    """A file of another kind, which is stored as it is; there is no record of it."""


class Recorder:
    """The module docstring says which thread calls what."""

    def __init__(self, root: str, settings: MediaSpec, *, say: Callable[[str], None]) -> None:
        """`root`: URL of the job's checkpoint directory. `say`: adds a line to the job's log; any thread."""
        self._root = root
        self._settings = settings
        self._say = say
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        # Each counter is written by one thread and read by both: neither waits for the other.
        self._waiting: SimpleQueue[_Call | None] = SimpleQueue()
        self._num_put = self._bytes_put = self._num_dropped = 0
        """Sums over all calls so far; training thread."""
        self._num_done = self._bytes_taken = 0
        """Recorder thread."""
        self._num_lost = self._num_said_dropped = 0
        """Calls that could not be written, and dropped ones that a record has counted; recorder thread."""
        self._done = threading.Condition()
        """A call was written; `end` waits for it."""
        self._writer: _Writer | None = None
        self._step = -1
        self._num_calls = 0
        self._said: set[str] = set()
        self._kept: dict[RecordName, dict[str, int]] | None = None
        """Files of this rank in the storage with their bytes, by record. Recorder thread only."""
        self._kept_rank = -1

    def begin(self, *, attempt: int, generation: int, rank: int, is_over: Callable[[], bool]) -> None:
        """Training thread: a generation begins. `is_over`: whether it is fenced; any thread."""
        self._step, self._num_calls = -1, 0
        is_kept = self._settings.enabled and (rank == 0 or self._settings.ranks is MediaRanks.ALL)
        self._writer = _Writer(attempt, generation, rank, is_over) if is_kept else None
        if is_kept and (self._thread is None or not self._thread.is_alive()):  # now, since `log` shall not wait for it
            self._thread = threading.Thread(target=self._write_all, name="shoal-media", daemon=True)
            self._thread.start()

    def end(self, *, within_s: float) -> None:
        """Training thread: the generation is over. Waits for the storage for some time, 0: not at all."""
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
        """Training thread: keeps copies of these values for `step`, which is the one that they belong to once it is
        complete. Waits for nothing. On a rank that is not kept, and between generations, it does nothing.

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
        """Training thread: replace a file beside the records. Does not wait for the storage. `make` is not called on a
        rank that is not kept."""
        if (writer := self._writer) is not None:
            name = RecordName(0, writer.attempt, writer.generation, writer.rank, 0)
            self._put(_Call(writer, name, time.time(), 0.0, Captured(), (file, make())))

    def _put(self, call: _Call) -> None:
        self._num_put += 1
        self._bytes_put += call.captured.num_bytes
        self._waiting.put(call)

    def close(self) -> None:
        """Training thread, when no generation runs: the thread ends when it has written what waits."""
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
            dropped = self._num_dropped + self._num_lost - self._num_said_dropped
            try:
                is_written = not call.writer.is_over() and self._write(call, dropped)
            except Exception as error:  # of the storage, or a value that cannot be encoded
                self._say_once(f"media: what was logged could not be stored: {type(error).__name__}: {error}")
                is_written = False
            if is_written:
                self._num_said_dropped += dropped
            else:
                self._num_lost += 1
            if (buffer := call.captured.buffer) is not None:
                self._staging.give_back(buffer)
            del call, buffer
            with self._done:
                self._num_done += 1
                self._done.notify_all()

    def _write(self, call: _Call, dropped: int) -> bool:
        """Returns False if the generation was fenced meanwhile."""
        place = open_job_directory(self._root).child(FOLDER)
        if call.file is not None:
            place.create()
            place.write(call.file[0], [call.file[1]])
            return True
        if self._kept is None or self._kept_rank != call.name.rank:
            place.create()
            self._kept, self._kept_rank = _found(place, call.name.rank), call.name.rank
        files: dict[str, int] = {}
        record = self._encoded(call, dropped, place, files)
        data = record.model_dump_json().encode()
        if call.writer.is_over():
            for file in files:
                place.remove(file)
            return False
        place.write(str(call.name), [data])
        files[str(call.name)] = len(data)
        self._kept[call.name] = files
        self._remove(place, [item for item in self._kept if _is_replaced(item, call.name)])
        self._keep_limits(place)
        return True

    def _encoded(self, call: _Call, dropped: int, place: Directory, files: dict[str, int]) -> MediaRecord:
        """Writes the images, which are noted in `files`, and makes the record."""
        captured, notes, images = fetched(call.captured), list(call.captured.notes), []
        for index, image in enumerate(captured.images):
            try:
                data, suffix, width, height = image_file(image)
            except (OSError, ValueError) as error:
                notes.append(f"image {image.name}: {error}")
                continue
            file = call.name.image(index, suffix)
            place.write(file, [data])
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
            dropped=dropped,
            images=tuple(images),
            histograms=tuple(histogram(tensor) for tensor in captured.tensors),
            tables=tuple(table(media_table) for media_table in captured.tables),
            texts=tuple(MediaText(name=name, text=text, num_chars=num) for name, text, num in captured.texts),
            notes=tuple(notes),
        )

    def _keep_limits(self, place: Directory) -> None:
        assert self._kept is not None
        while True:
            steps = {name.step for name in self._kept}
            num_bytes = sum(sum(files.values()) for files in self._kept.values())
            if len(steps) < 2 or (len(steps) <= self._settings.max_steps and num_bytes <= self._settings.max_bytes):
                return
            gone = {*thinned_out(steps)}
            self._remove(place, [name for name in self._kept if name.step in gone])

    def _remove(self, place: Directory, names: list[RecordName]) -> None:
        assert self._kept is not None
        for name in names:
            files = self._kept.pop(name)
            place.remove(str(name))  # first: a record never names an image that is not there
            for file in files.keys() - {str(name)}:
                place.remove(file)


def _is_replaced(record_name: RecordName, by: RecordName) -> bool:
    return record_name.step == by.step and (record_name.attempt, record_name.generation) < (by.attempt, by.generation)


def _found(place: Directory, rank: int) -> dict[RecordName, dict[str, int]]:
    """What this rank has in the storage already. Images without a record are those of a writer that was killed; the
    limits count them with their step."""
    counts: dict[RecordName, dict[str, int]] = {}
    for file, num_bytes in place.files().items():
        stem = file.partition(".")[0]
        stem = stem.rpartition("-i")[0] if "-i" in stem else stem
        name = RecordName.parse(f"{stem}.json")
        if name is not None and name.rank == rank:
            counts.setdefault(name, {})[file] = num_bytes
    return counts
