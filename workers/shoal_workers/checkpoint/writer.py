"""Writes one rank's part of a checkpoint: a blocking copy into allocated memory, then a write on a thread of its own.

    training thread   | wait for the previous write | copy | ------------ training continues ------------>
    writer thread                                          | crc32 | .bin + fsync | .json + fsync | on_done

If the storage hangs, so does the writer thread; `abandon` leaves it behind, and its outcome is that of a save that was
given up. There are no collectives. Each rank writes only its own part; the checkpoint exists once the supervisor has
all reports and has written the commit marker. It must never raise for a storage problem: training continues without
the checkpoint. Called by the engine.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal_workers.checkpoint.crc import combine
from shoal_workers.checkpoint.index import IndexItem, ShardIndex, index_name, jsonable, payload_name
from shoal_workers.checkpoint.save_plan import SavePlan, plan_key, plan_save
from shoal_workers.checkpoint.staging import StagingBuffer
from shoal_workers.checkpoint.storage import Directory, open_directory
from shoal_workers.contract.worker_reports import SavedFile, SavedPart, SaveFailed

_WRITE_BYTES = 16 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Part:
    """What the writer thread needs to know about a save."""

    directory: str
    rank: int
    world_size: int
    generation: int
    step: int
    extra: dict[str, Any]


class CheckpointWriter:
    """One per process, for all its generations, so that its memory stays allocated. Training thread only."""

    def __init__(self) -> None:
        self._staging = StagingBuffer()
        self._plan = SavePlan((), 0)
        self._plan_key: Hashable = None
        self._thread: threading.Thread | None = None
        self._durable_in = ""

    def warm(self, state: Mapping[str, torch.Tensor], *, owns_replicated: bool) -> None:
        """Plans the save and allocates the memory before the first save, while the worker would otherwise wait."""
        self.wait()
        key = plan_key(state, owns_replicated=owns_replicated)
        if key != self._plan_key:
            self._plan, self._plan_key = plan_save(state, owns_replicated=owns_replicated), key
        self._staging.prepare(self._plan, pinned=any(tensor.is_cuda for tensor in state.values()))

    def save(
        self,
        state: Mapping[str, torch.Tensor],
        *,
        directory: str,
        rank: int,
        world_size: int,
        generation: int,
        step: int,
        extra: Mapping[str, Any],
        on_done: Callable[[SavedPart | SaveFailed], None],
        owns_replicated: bool | None = None,
        advanced: Callable[[int], None] = lambda num_bytes: None,
    ) -> float:
        """Returns the seconds of the blocking part; afterwards `state` and `extra` may change.

        `state`: flat, fully qualified name -> DTensor or plain tensor, on any device. `extra`: JSON values; a reader
        gets rank 0's. `on_done` is called exactly once, from the writer thread, when the part is durable or has failed;
        `advanced` before that, with the bytes that the storage has accepted so far.
        `owns_replicated`: this rank writes the plain tensors; by default rank 0 does. If ranks have different plain
        tensors (pipeline stages), one rank per stage must own them.
        TypeError or ValueError if `state` or `extra` cannot be saved (see `plan_save`); no error if the storage fails.
        """
        start = time.perf_counter()
        self.warm(state, owns_replicated=rank == 0 if owns_replicated is None else owns_replicated)
        part = _Part(directory, rank, world_size, generation, step, jsonable(extra))
        self._staging.copy_in(state)
        stall_s = time.perf_counter() - start
        plan, data = self._plan, self._staging.bytes()

        def write() -> None:
            outcome = _write(part, plan, data, stall_s, advanced)
            if isinstance(outcome, SavedPart):
                self._durable_in = directory
            elif (
                self._durable_in != directory
            ):  # else a save to it succeeded before, and its files may belong to a checkpoint
                _remove_files(part)
            on_done(outcome)

        self._thread = threading.Thread(target=write, name=f"checkpoint-write-{step}", daemon=True)
        self._thread.start()
        return stall_s

    def wait(self) -> None:
        """Waits until the last save has called its `on_done`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """The storage hangs: leaves the writer thread behind with the memory that it reads. The next save allocates."""
        self._thread = None
        self._staging, self._plan, self._plan_key = StagingBuffer(), SavePlan((), 0), None

    def close(self) -> None:
        """Waits for the last save, and frees the memory."""
        self.wait()
        self._staging, self._plan, self._plan_key = StagingBuffer(), SavePlan((), 0), None


def _write(
    part: _Part, plan: SavePlan, data: memoryview, stall_s: float, advanced: Callable[[int], None]
) -> SavedPart | SaveFailed:
    start = time.perf_counter()
    try:
        files = _write_files(open_directory(part.directory), part, plan, data, advanced)
    except Exception as error:  # the boundary of the writer thread: any error means that the part does not exist
        _log.warning(
            "checkpoint.part_failed",
            extra={"step": part.step, "generation": part.generation, "rank": part.rank, "directory": part.directory},
            exc_info=True,
        )
        return SaveFailed(
            generation=part.generation,
            step=part.step,
            rank=part.rank,
            directory=part.directory,
            error=f"{type(error).__name__}: {error}",
        )
    return SavedPart(
        generation=part.generation,
        step=part.step,
        rank=part.rank,
        world_size=part.world_size,
        directory=part.directory,
        files=files,
        stall_s=stall_s,
        write_s=time.perf_counter() - start,
    )


def _write_files(
    place: Directory, part: _Part, plan: SavePlan, data: memoryview, advanced: Callable[[int], None]
) -> tuple[SavedFile, ...]:
    items, payload_crc = _checksums(plan, data)
    index = ShardIndex(
        rank=part.rank,
        world_size=part.world_size,
        generation=part.generation,
        step=part.step,
        items=items,
        extra=part.extra,
    ).to_json()
    place.create()
    advanced(0)
    place.write(payload_name(part.rank), _chunks(data, advanced))
    advanced(len(data))
    place.write(index_name(part.rank), [index])
    return (
        SavedFile(name=payload_name(part.rank), bytes=len(data), crc32=payload_crc),
        SavedFile(name=index_name(part.rank), bytes=len(index), crc32=zlib.crc32(index)),
    )


def _checksums(plan: SavePlan, data: memoryview) -> tuple[tuple[IndexItem, ...], int]:
    """Checksums of each item and of the whole file; reads every byte once."""
    items: list[IndexItem] = []
    whole = end = 0
    for item in plan.items:
        whole = zlib.crc32(data[end : item.file_offset], whole)
        end = item.file_offset + item.nbytes
        crc = zlib.crc32(data[item.file_offset : end])
        whole = combine(whole, crc, item.nbytes)
        items.append(
            IndexItem(
                fqn=item.fqn,
                dtype=str(item.dtype).removeprefix("torch."),
                shape=item.shape,
                offsets=item.offsets,
                sizes=item.sizes,
                file_offset=item.file_offset,
                nbytes=item.nbytes,
                crc32=crc,
            )
        )
    return tuple(items), whole


def _chunks(data: memoryview, advanced: Callable[[int], None]) -> Iterator[memoryview]:
    for start in range(0, len(data), _WRITE_BYTES):
        yield data[start : start + _WRITE_BYTES]
        advanced(min(start + _WRITE_BYTES, len(data)))


def _remove_files(part: _Part) -> None:
    try:
        place = open_directory(part.directory)
        for name in (payload_name(part.rank), index_name(part.rank)):
            place.remove(name)
    except Exception:  # storage that cannot write may not delete either; retention does it later
        _log.info("checkpoint.part_not_removed", extra={"directory": part.directory, "rank": part.rank}, exc_info=True)
